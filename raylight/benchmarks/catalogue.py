"""The benchmarks that `raylight eval` takes by name, from `catalogue.yaml`: data set, prompt, scorer and
published figures."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from raylight._utils.files import read_table
from raylight.benchmarks import answers, function_calls
from raylight.errors import ConfigError
from raylight.types import JsonObject

Score = float | dict[str, float] | answers.Check


@dataclass(frozen=True)
class Published:
    """A figure that was published for a model, in percent."""

    model: str
    percent: float
    setting: str
    """Difference from this catalogue's setting."""
    source: str


@dataclass(frozen=True)
class Benchmark:
    """A benchmark: one question, one answer. The sampling is greedy, as for most published figures."""

    name: str
    title: str
    repo: str
    """Id of the data set on the Hugging Face hub."""
    revision: str
    files: tuple[str, ...]
    """Files with the rows. Rows of further files are joined to the first file's by `id`."""
    columns: tuple[str, ...]
    """Columns that a row must have."""
    rows: int
    license: str
    prompt: str
    """Format of the user message, with the columns of a row as fields."""
    score: Callable[[JsonObject, Any], Score]
    max_tokens: int
    published: tuple[Published, ...]
    tools: Callable[[JsonObject], list[JsonObject]] | None = None
    packages: tuple[str, ...] = ()
    """Modules of the extra `benchmarks` that the scorer imports."""
    samples: int = 1
    """Rollouts per row."""
    sampling: Mapping[str, object] = field(default_factory=lambda: {"temperature": 0.0})

    @property
    def sampling_parameters(self) -> JsonObject:
        """Sampling parameters with the maximum of tokens."""
        return {**self.sampling, "max_tokens": self.max_tokens}

    def check_packages(self) -> None:
        """Check that the scorer can be imported.

        Raises:
            ConfigError: a package, or nltk's data for IFEval, is missing.
        """
        if missing := [name for name in self.packages if importlib.util.find_spec(name) is None]:
            raise ConfigError(
                f"the benchmark {self.name} needs {', '.join(missing)}: pip install 'raylight[benchmarks]'"
            )
        if "nltk" in self.packages:
            _check_sentences()


def _check_sentences() -> None:
    """Check that nltk can split sentences, or fetch its data.

    Raises:
        ConfigError: the data cannot be fetched.
    """
    import nltk

    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError:
        if not nltk.download("punkt_tab", quiet=True):
            raise ConfigError(
                "the benchmark ifeval counts sentences with nltk's data punkt_tab, which cannot be fetched; "
                "copy the folder tokenizers/punkt_tab of github.com/nltk/nltk_data to ~/nltk_data on every "
                "machine with runners, or set NLTK_DATA"
            ) from None


def _benchmark(name: str, entry: JsonObject) -> Benchmark:
    known = vars(answers) | vars(function_calls)
    functions = {key: known[entry[key]] for key in ("score", "tools") if key in entry}
    lists = {key: tuple(value) for key, value in entry.items() if isinstance(value, list)}
    published = tuple(Published(*figure) for figure in entry["published"])
    return Benchmark(name, **entry | functions | lists | {"published": published})


_TABLE: JsonObject = read_table(Path(__file__).with_name("catalogue.yaml"))
del _TABLE["shared"]
BENCHMARKS = {name: _benchmark(name, entry) for name, entry in _TABLE.items()}


def find_benchmark(name: str) -> Benchmark:
    """Return the benchmark of a name.

    Raises:
        ConfigError: there is none; the message lists all.
    """
    if name not in BENCHMARKS:
        listed = "; ".join(f"{one.name} ({one.title})" for one in BENCHMARKS.values())
        raise ConfigError(
            f"there is no benchmark {name!r}; the benchmarks are {listed}. An agent is named "
            "package.module:agent or path/to/file.py:agent"
        )
    return BENCHMARKS[name]


def print_catalogue() -> None:
    """Print all benchmarks: `raylight eval` without arguments."""
    table = Table(title="raylight eval BENCHMARK --model MODEL", title_style="bold")
    for name in ("benchmark", "questions", "data set", "rows", "tokens", "licence"):
        table.add_column(name, justify="right" if name in ("rows", "tokens") else "left", overflow="fold")
    for one in BENCHMARKS.values():
        table.add_row(one.name, one.title, one.repo, str(one.rows), str(one.max_tokens), one.license)
    Console().print(table)


def print_published(benchmark: Benchmark) -> None:
    """Print figures that were published for the benchmark, with what was different."""
    console = Console()
    console.print(f"published for {benchmark.name}:", highlight=False)
    for figure in benchmark.published:
        setting = f" ({figure.setting})" if figure.setting else ""
        console.print(
            f"  {figure.percent / 100:.3f}  {figure.model}{setting}, {figure.source}",
            highlight=False,
            soft_wrap=True,
        )
