"""Make a starter model from demonstrations, and write it to a folder."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from examples.starter_models.batches import MAX_TOKENS
from examples.starter_models.model import SIZES, build_model
from examples.starter_models.sampling import sampled_accuracy
from examples.starter_models.tasks.registry import KNOWN, TaskFamily, demonstrations, find_family
from examples.starter_models.tokenizer import MODEL_LENGTH, build_tokenizer
from examples.starter_models.training import StarterTraining, TeachingProgress
from raylight._utils.files import atomic_folder, write_atomic
from raylight.errors import ConfigError, DatasetError
from raylight.experience.batches.demonstrations import (
    Demonstration,
    DemonstrationRow,
    demonstration_rows,
    render_demonstration,
)

logger = logging.getLogger(__name__)

MAX_DEMONSTRATIONS, MAX_CHARACTERS = 16_384, 8_000_000
"""Demonstrations that are taken from a task at most, and the length of their texts that is enough."""
STEP_CHARACTERS = 10 * MAX_TOKENS
"""Length of the texts that is enough for one step: more than it reads, with six characters a token."""
MAX_READ = 2000
"""Demonstrations whose words the tokenizer counts."""
MAX_HELD_OUT, LEAST_HELD_OUT = 128, 16
"""Demonstrations that measure the accuracy: a quarter of all, at most 128. Fewer than 16 are too few: then
those that are trained on measure it."""
MEASURED_TOKENS = 16_384
"""Tokens of held-out demonstrations that are enough to measure the accuracy; at least 16 are taken."""
RECORD = "starter.json"
"""File of a starter model's folder with its `StarterModel`."""
TOLERANCE = 0.1
"""Part of the aimed accuracy that may be missing without a warning."""


@dataclass(frozen=True)
class StarterModel:
    """A starter model that has been made."""

    path: str
    """Folder of the model, as `GRPO(model=...)` takes it."""
    task: str
    """Name of its task."""
    parameters: int
    """Number of parameters."""
    demonstrations: int
    """Demonstrations that were trained on."""
    steps: int
    """Training steps."""
    seconds: float
    """Seconds that it took, with the demonstrations and the measurements."""
    skill: float
    """Accuracy before the teacher became careless."""
    accuracy: float
    """Probability that the model gives all answers of a conversation as the teacher does, sampled at
    temperature 1; the mean over conversations that are not trained on."""
    sampled_accuracy: float
    """The same, measured by sampling from the saved model."""


def make_starter(
    task: str | Callable[..., Iterable[Any]] | None = None,
    output: str | Path = "outputs/starter",
    *,
    messages: str | Path | Iterable[Any] | None = None,
    options: Mapping[str, Any] | None = None,
    size: str | None = None,
    accuracy: float | None = None,
    seed: int = 0,
    steps: int | None = None,
    batch_tokens: int = MAX_TOKENS,
    report: Callable[[str], None] | None = print,
) -> StarterModel:
    """Make a small model that answers about half of a task's questions, and write it to a folder.

    A model that misses the aimed accuracy is written too, with a warning that names both figures.

    Args:
        task: name of a task, such as `"add"`, `"reasoning_gym:chain_sum"` or `"package.module:function"`, or
            a function that yields demonstrations.
        output: folder for the model; it is new, empty, or holds a starter model.
        messages: demonstrations in place of a task: a file with one in each line (JSONL), or an iterable.
        options: arguments of the task's function, such as `{"max_terms": 2}`.
        size: `"tiny"`, `"small"`, `"medium"` or `"large"`; by default what the task needs.
        accuracy: probability, above 0 and at most 1, that all answers of a conversation are the teacher's;
            by default 0.5, or less for a task that is also solved in other ways.
        seed: seed of the demonstrations, the weights and the batches.
        steps: training steps at most; by default what the task needs.
        batch_tokens: tokens of a batch at most. More steps with smaller batches soon learn short rows.
        report: called with each line of progress; None for none.

    Raises:
        ConfigError: an argument is unknown or does not fit, or a package of the task is missing.
        DatasetError: the demonstrations are missing, malformed, or cannot be rendered.
    """
    import torch

    start = time.monotonic()
    say = report or (lambda line: None)
    name, family, options = _source(task, messages, dict(options or {}))
    size, steps = size or family.size, family.steps if steps is None else steps
    accuracy = family.accuracy if accuracy is None else accuracy
    _check(accuracy, steps, size)
    folder = Path(output).expanduser()
    if folder.exists() and (
        not folder.is_dir() or (any(folder.iterdir()) and not (folder / RECORD).is_file())
    ):
        raise ConfigError(f"output={str(output)!r} exists and is not a starter model; give a new folder")
    tokenizer, rows, held_out = _encode(demonstrations(family, options, seed, name), name, steps)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build_model(tokenizer, size)
    parameters = model.num_parameters()
    say(
        f"{name}: {len(rows)} demonstrations, {parameters:,} parameters. Up to {steps} steps make the model "
        f"right, and then a careless teacher lowers its accuracy to {accuracy:g}"
    )
    training = StarterTraining(
        model, rows, held_out, tokenizer.pad_token_id, seed, batch_tokens, lambda p: say(progress_line(p))
    )
    reached = training.run(steps, accuracy)
    with atomic_folder(folder) as partial, _without_progress_bars():
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        sampled = sampled_accuracy(partial, held_out, seed)
        seconds = round(time.monotonic() - start, 1)
        made = StarterModel(
            path=str(folder),
            task=name,
            parameters=parameters,
            demonstrations=len(rows),
            steps=training.steps_done,
            seconds=seconds,
            skill=training.skill,
            accuracy=reached,
            sampled_accuracy=sampled,
        )
        write_atomic(partial / RECORD, json.dumps(asdict(made), indent=2) + "\n")
    if training.skill < accuracy * (1 - TOLERANCE):
        logger.warning(
            "the model for %s reached an accuracy of %.3f in %d steps, and %.3f was aimed at; give more "
            "steps (%d now), a larger size (%s now), or easier tasks",
            *(name, reached, training.steps_done, accuracy, steps, size),
        )
    say(f"{made.path}: accuracy {reached:.2f} (sampled {sampled:.2f}), {made.steps} steps, {seconds:.0f} s")
    return made


def recipe_model(
    task: str | Callable[..., Iterable[Any]], folder: Path, *, keep: bool = False, **settings: Any
) -> str:
    """Make the tiny model of a recipe by `make_starter`, with one thread of torch; return its folder.

    Args:
        keep: use the starter model that is in the folder, if one is.
        settings: other arguments of `make_starter`.
    """
    import torch

    if not (keep and (folder / RECORD).is_file()):
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # more slow down matrices of this size
        try:
            make_starter(task, folder, **settings)
        finally:
            torch.set_num_threads(threads)
    return str(folder)


@contextlib.contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Silence the bars of transformers for writing and loading a model."""
    from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

    shown = is_progress_bar_enabled()
    disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            enable_progress_bar()


def progress_line(progress: TeachingProgress) -> str:
    """Return the line of a measurement."""
    phase = "careless step" if progress.careless else "step"
    return (
        f"{phase} {progress.step}/{progress.steps}  loss {progress.loss:.3f}  accuracy "
        f"{progress.accuracy:.3f}  {progress.seconds:.0f} s, at most {progress.seconds_left:.0f} s left"
    )


def _source(task: Any, messages: Any, options: dict[str, Any]) -> tuple[str, TaskFamily, dict[str, Any]]:
    """Return the name of the demonstrations, the family that yields them, and the options of its function."""
    if task is None and messages is None:
        raise ConfigError(f"give a task, or messages; {KNOWN}")
    if task is not None and messages is not None:
        raise ConfigError("give either a task or messages, and not both")
    if messages is None:
        family, options = find_family(task, options)
        return task if isinstance(task, str) else getattr(task, "__name__", repr(task)), family, options
    if not isinstance(messages, str | Path):
        return "messages", TaskFamily(lambda: messages), options
    from raylight.trainer.spec.task_files import read_tasks

    return str(messages), TaskFamily(lambda: read_tasks(messages)), options


def _check(accuracy: float, steps: int, size: str) -> None:
    if not 0 < accuracy <= 1:
        raise ConfigError(f"accuracy={accuracy} is not above 0 and at most 1; 0.5 leaves room to learn")
    if steps < 1:
        raise ConfigError(f"steps={steps} is not at least 1")
    if size not in SIZES:
        raise ConfigError(f"there is no size {size!r} of a starter model; the sizes are: {', '.join(SIZES)}")


def _encode(
    found: Iterator[Any], name: str, steps: int
) -> tuple[Any, list[DemonstrationRow], list[DemonstrationRow]]:
    """Return the tokenizer, the rows to train on, and those that measure the accuracy."""
    plain, parsed, texts = build_tokenizer([]), [], []
    room = min(MAX_CHARACTERS, steps * STEP_CHARACTERS)
    for number, value in enumerate(itertools.islice(found, MAX_DEMONSTRATIONS), 1):
        source = f"demonstration {number} of {name}"
        parsed.append((Demonstration.parse(value, source), source))
        texts.append(render_demonstration(plain, *parsed[-1]))
        room -= len(texts[-1])
        if room < 0:
            break
    if not parsed:
        raise DatasetError(f"{name} has no demonstrations; yield at least one")
    tokenizer = build_tokenizer(texts[:MAX_READ])
    encoded = [demonstration_rows(tokenizer, *entry) for entry in parsed]
    for rows, (_, source) in zip(encoded, parsed, strict=True):
        if (longest := max(len(row.tokens) for row in rows)) > MODEL_LENGTH:
            raise DatasetError(f"{source} has {longest} tokens, and a starter model reads {MODEL_LENGTH}")
    trained, held_out = split_held_out([tuple(map(_key, rows)) for rows in encoded])
    measured = enough_rows([r for i in held_out for r in encoded[i]])
    return tokenizer, [r for i in trained for r in encoded[i]], measured


def _key(row: DemonstrationRow) -> Hashable:
    return tuple(row.tokens), tuple(row.answers)


def enough_rows(rows: Sequence[DemonstrationRow]) -> list[DemonstrationRow]:
    """Return the first rows that measure an accuracy: long ones take long, and fewer are enough."""
    totals = itertools.accumulate(len(row.tokens) for row in rows)
    count = sum(total <= MEASURED_TOKENS for total in totals)
    return list(rows[: max(count, LEAST_HELD_OUT)])


def split_held_out(keys: Sequence[Hashable]) -> tuple[list[int], list[int]]:
    """Return the indices of the demonstrations to train on, and of those that measure the accuracy.

    Equal demonstrations are on one side. Too few different ones are on both sides.

    Args:
        keys: equal for equal demonstrations.
    """
    different = list(dict.fromkeys(keys))
    count = min(MAX_HELD_OUT, len(different) // 4)
    first = {key: index for index, key in reversed(list(enumerate(keys)))}
    if count < LEAST_HELD_OUT:
        return list(range(len(keys))), [first[key] for key in different[:MAX_HELD_OUT]]
    held_out = set(different[:count])
    trained = [index for index, key in enumerate(keys) if key not in held_out]
    return trained, [first[key] for key in different[:count]]
