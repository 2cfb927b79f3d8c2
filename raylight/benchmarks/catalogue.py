"""The benchmarks that `raylight eval` takes by name: data set, prompt, scorer and published figures."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from raylight.benchmarks.answers import (
    Check,
    score_code,
    score_instructions,
    score_mathematics,
    score_number,
    score_option,
)
from raylight.benchmarks.function_calls import score_call, tools_of
from raylight.errors import ConfigError
from raylight.types import JsonObject

Score = float | dict[str, float] | Check


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
    sampling: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 0.0})

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


SMOLLM2 = "https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct"
LLAMA = "https://huggingface.co/meta-llama/Llama-3.1-8B-Instruct"
QWEN = "https://arxiv.org/abs/2412.15115"
R1 = "https://huggingface.co/deepseek-ai/DeepSeek-R1"


def _figures(*figures: tuple[str, float, str, str]) -> tuple[Published, ...]:
    return tuple(Published(*figure) for figure in figures)


_TABLE = (
    Benchmark(
        name="gsm8k",
        title="sums of grade school",
        repo="openai/gsm8k",
        revision="cc7b047b6e5bb11b4f1af84efc572db110a51b3c",
        files=("main/test-00000-of-00001.parquet",),
        columns=("question", "answer"),
        rows=1319,
        license="MIT",
        prompt="{question}\n\nSolve this step by step. Write the result, a number, in a last line of the "
        'form "Answer: NUMBER".',
        score=score_number,
        max_tokens=1024,
        published=_figures(
            ("SmolLM2-135M-Instruct", 1.4, "5 examples", SMOLLM2),
            ("Qwen2.5-0.5B-Instruct", 49.6, "setting not stated", QWEN),
            ("Llama-3.1-8B-Instruct", 84.5, "8 examples", LLAMA),
        ),
    ),
    Benchmark(
        name="math500",
        title="500 problems of competitions, of MATH",
        repo="HuggingFaceH4/MATH-500",
        revision="6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be",
        files=("test.jsonl",),
        columns=("problem", "answer"),
        rows=500,
        license="MIT",
        prompt="{problem}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}.",
        score=score_mathematics,
        max_tokens=4096,
        published=_figures(
            ("GPT-4o-0513", 74.6, "", R1),
            ("DeepSeek-R1-Distill-Qwen-1.5B", 83.9, "temperature 0.6, 32,768 tokens", R1),
            ("DeepSeek-R1-Distill-Qwen-7B", 92.8, "temperature 0.6, 32,768 tokens", R1),
        ),
        packages=("math_verify",),
    ),
    Benchmark(
        name="ifeval",
        title="instructions that a program can check",
        repo="google/IFEval",
        revision="966cd89545d6b6acfd7638bc708b98261ca58e84",
        files=("ifeval_input_data.jsonl",),
        columns=("key", "prompt", "instruction_id_list", "kwargs"),
        rows=541,
        license="Apache 2.0",
        prompt="{prompt}",
        score=score_instructions,
        max_tokens=1280,
        published=_figures(
            ("SmolLM2-135M-Instruct", 29.9, "mean of prompt and instruction", SMOLLM2),
            ("Qwen2.5-0.5B-Instruct", 27.9, "", QWEN),
            ("Llama-3.1-8B-Instruct", 80.4, "measure not stated", LLAMA),
        ),
        packages=("lm_eval", "langdetect", "nltk"),
    ),
    Benchmark(
        name="humaneval",
        title="functions in Python with hidden tests",
        repo="openai/openai_humaneval",
        revision="7dce6050a7d6d172f3cc5c32aa97f52fa1a2e544",
        files=("openai_humaneval/test-00000-of-00001.parquet",),
        columns=("prompt", "test", "entry_point"),
        rows=164,
        license="MIT",
        prompt="Complete this function. Answer with the whole function in one block of Python code.\n\n"
        "```python\n{prompt}```",
        score=score_code,
        max_tokens=1024,
        published=_figures(
            ("Qwen2.5-0.5B-Instruct", 35.4, "", QWEN),
            ("Llama-3.1-8B-Instruct", 72.6, "", LLAMA),
        ),
    ),
    Benchmark(
        name="mmlu",
        title="questions of 57 subjects with four options",
        repo="cais/mmlu",
        revision="c30699e8356da336a370243923dbaf21066bb9fe",
        files=("all/test-00000-of-00001.parquet",),
        columns=("question", "choices", "answer"),
        rows=14042,
        license="MIT",
        prompt="{question}\n\nA) {choices[0]}\nB) {choices[1]}\nC) {choices[2]}\nD) {choices[3]}\n\n"
        "Think step by step. Write the letter of the right option in a last line of the form "
        '"Answer: LETTER".',
        score=score_option,
        max_tokens=1024,
        published=_figures(
            ("SmolLM2-135M-Instruct", 29.3, "likelihood of the options' texts", SMOLLM2),
            ("Llama-3.1-8B-Instruct", 69.4, "5 examples, without reasoning", LLAMA),
            ("Llama-3.1-8B-Instruct", 73.0, "", LLAMA),
        ),
    ),
    Benchmark(
        name="bfcl",
        title="one function call, checked by its arguments (BFCL v3, simple Python)",
        repo="gorilla-llm/Berkeley-Function-Calling-Leaderboard",
        revision="main",
        files=("BFCL_v3_simple.json", "possible_answer/BFCL_v3_simple.json"),
        columns=("question", "function", "ground_truth"),
        rows=400,
        license="Apache 2.0",
        prompt="{question[0][0][content]}",
        score=score_call,
        max_tokens=512,
        published=_figures(("Llama-3.1-8B-Instruct", 76.1, "all categories", LLAMA)),
        tools=tools_of,
    ),
)
BENCHMARKS = {benchmark.name: benchmark for benchmark in _TABLE}


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
