"""The examples of supervised training: from files, lists, and the rollouts of runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from raylight.algorithms.supervised import SFT, RewardModel, SupervisedAlgorithm
from raylight.config import LearnerConfig
from raylight.engines.reward_model.scorer import conversation_tokens
from raylight.errors import ConfigError, DatasetError
from raylight.experience.batches.demonstrations import Demonstration, demonstration_rows, render_demonstration
from raylight.experience.batches.supervised_batches import (
    BatchSchedule,
    Example,
    LearnedRow,
    LengthLimit,
    SupervisedData,
)
from raylight.experience.settings.supervised_settings import PairSettings
from raylight.experience.trajectories.rollout_selection import RolloutSelection
from raylight.experience.trajectories.row_rules import RowRules, algorithm_settings, learned_rows
from raylight.rewards.group import GroupRollout
from raylight.rewards.scoring_model import RewardModelInput
from raylight.trainer.output.run_records import read_config
from raylight.trainer.output.stored_rollouts import StoredRollouts
from raylight.trainer.spec.run_file import read_data
from raylight.types import FinishedRollout, Tokenizer

STORE_SUFFIX = ".db"
STORE_SETTINGS = ("split", "min_reward", "best_of_group")
"""Settings that are read with rollouts of a run."""
LEARN_MESSAGES = "export the messages with `raylight export-traces`, and learn these"


def batch_schedule(algorithm: SupervisedAlgorithm, data: SupervisedData, seed: int) -> BatchSchedule:
    """Return the batches of a run's steps."""
    lengths = [example.tokens for example in data.train]
    return BatchSchedule(
        lengths, algorithm.batch_size, algorithm.batch_tokens, algorithm.n_epochs, algorithm.n_steps, seed
    )


def load_supervised_data(
    algorithm: SupervisedAlgorithm, model_path: str, learner: LearnerConfig
) -> SupervisedData:
    """Return the examples of a run as tokens.

    Args:
        model_path: folder of the model, whose tokenizer encodes messages.

    Raises:
        ConfigError: the store does not exist, or its tokens are not the model's.
        DatasetError: there are no examples, or one is malformed.
        RowTooLongError: an example is longer than the learners take, and `learner.long_rows` is "error".
    """
    from transformers import AutoTokenizer

    _check_read(algorithm)
    if isinstance(algorithm, RewardModel) and learner.long_rows == "truncate":
        raise ConfigError(
            "learner.long_rows='truncate' would cut off the answers that a reward model scores; choose "
            "'drop', or raise learner.max_row_tokens"
        )
    reader = _ExampleReader(algorithm, AutoTokenizer.from_pretrained(model_path), learner)
    train = reader.read(algorithm.data, "data")
    held_out = [] if algorithm.val_data is None else reader.read(algorithm.val_data, "val_data")
    return SupervisedData(train, held_out, reader.notes)


def _check_read(algorithm: SupervisedAlgorithm) -> None:
    """Raise a ConfigError if the algorithm has settings of rollouts, and no run to take them from."""
    if is_store(algorithm.data) or is_store(algorithm.val_data):
        return
    fields = {name: field.default for name, field in type(algorithm).model_fields.items()}
    given = [name for name in STORE_SETTINGS if name in fields and getattr(algorithm, name) != fields[name]]
    if given:
        raise ConfigError(
            f"nothing reads {', '.join(given)}: data is not a run directory; leave it out, or select "
            "rollouts with `raylight export-traces`"
        )


class _ExampleReader:
    """Reads the examples of an algorithm, and applies the limit of their length."""

    def __init__(self, algorithm: SupervisedAlgorithm, tokenizer: Tokenizer, learner: LearnerConfig) -> None:
        self._algorithm, self._tokenizer, self._learner = algorithm, tokenizer, learner
        self._is_paired = isinstance(algorithm, PairSettings)
        self._is_scored = isinstance(algorithm, RewardModel)
        self.notes: list[str] = []

    def read(self, source: object, name: str) -> list[Example]:
        """Return the examples of a source.

        Args:
            name: of the setting, for messages.
        """
        limit = LengthLimit(self._learner.row_limit, self._learner.long_rows)
        read = self._from_store if is_store(source) else self._from_values
        examples = [kept for example in read(source, name) if (kept := limit.apply(example)) is not None]
        if limit.dropped or limit.truncated:
            self.notes.append(
                f"{name}: {limit.dropped} examples were left out and {limit.truncated} truncated, because "
                f"they are longer than {self._learner.row_limit} tokens (learner.long_rows="
                f"{self._learner.long_rows!r})"
            )
        if not examples:
            raise DatasetError(
                f"{name} has no examples within {self._learner.row_limit} tokens; raise "
                "learner.max_row_tokens"
            )
        return examples

    def _from_values(self, source: object, name: str) -> Iterator[Example]:
        """Yield the examples of a file or of a list."""
        if not getattr(self._tokenizer, "chat_template", None):
            raise ConfigError(
                f"the model {self._algorithm.model!r} has no chat template to render messages with; add "
                "chat_template.jinja to its folder, or use an instruct model"
            )
        values, origin = (
            (read_data(source, name), source) if isinstance(source, str | Path) else (source, name)
        )
        if not isinstance(values, Iterable) or isinstance(values, Mapping):
            raise DatasetError(
                f"{name} is {values!r:.80}; give a file, a list of examples, or a run directory"
            )
        encode = self._pair if self._is_paired else self._conversation
        empty = True
        for number, value in enumerate(values, 1):
            empty = False
            yield encode(value, f"example {number} of {origin}")
        if empty:
            raise DatasetError(f"{name} is empty; give at least one example")

    def _conversation(self, value: object, source: str) -> Example:
        return Example(source, (self._encode(Demonstration.parse(value, source), source),))

    def _pair(self, value: Any, source: str) -> Example:
        chosen, rejected = Demonstration.parse_pair(value, source)
        answers = self._encode(chosen, f"{source}, chosen"), self._encode(rejected, f"{source}, rejected")
        return Example(source, answers, self._margin(value, source))

    def _margin(self, value: Mapping[str, object], source: str) -> float:
        margin = value.get("margin", 0.0)
        if not self._is_scored:
            return 0.0
        if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
            raise DatasetError(f"{source}: margin is {margin!r:.80}; give a finite number, or leave it out")
        return float(margin)

    def _encode(self, demonstration: Demonstration, source: str) -> tuple[LearnedRow, ...]:
        if self._is_scored:
            text = render_demonstration(self._tokenizer, demonstration, source)
            tokens = self._tokenizer(text, add_special_tokens=False)["input_ids"]
            return (self._scored(tokens),)
        rows = demonstration_rows(self._tokenizer, demonstration, source)
        return tuple(map(LearnedRow.from_demonstration, rows))

    def _scored(self, tokens: list[int]) -> LearnedRow:
        """Return a row with the token whose score transformers returns: the last one that is not padding."""
        padding = getattr(self._tokenizer, "pad_token_id", None)
        if padding is None:  # verl then pads with the other, which the saved configuration names
            padding = self._tokenizer.eos_token_id
        while len(tokens) > 1 and tokens[-1] == padding:
            tokens.pop()
        return LearnedRow.scored(tokens)

    def _from_store(self, source: Any, name: str) -> Iterator[Example]:
        """Yield the examples of a run, with the tokens that its engine recorded."""
        algorithm, stored = self._algorithm, StoredRollouts(source)
        best = isinstance(algorithm, SFT) and algorithm.best_of_group
        selection = RolloutSelection(algorithm.split, algorithm.min_reward, best)
        lines = stored.lines()
        chosen: list[tuple[str, ...]] = (
            [*selection.pairs(lines)] if self._is_paired else [(one,) for one in selection.choose(lines)]
        )
        if not chosen:
            what = "groups whose rewards differ" if self._is_paired else "rollouts that succeeded"
            least = (
                "" if algorithm.min_reward is None else f" and a reward of at least {algorithm.min_reward:g}"
            )
            raise DatasetError(
                f"{name}: {stored.file} has no {what} in the split {algorithm.split!r}{least}; lower "
                "min_reward, choose another split, or give another run"
            )
        if not self._is_paired and selection.takes_all:
            below, highest = selection.below_best(stored.lines())
            if below:
                self.notes.append(
                    f"{name}: {below} of {len(chosen)} rollouts have a lower reward than the best of their "
                    f"group, and are learned too; min_reward={highest!r} learns those with the highest "
                    "reward only, best_of_group=True the best of each group"
                )
        config = read_config(stored.file.parent) or {}
        if not self._is_scored:
            self._check_tokenizer(config, name)
        rules = RowRules.from_config(config)
        rollouts = stored.read([rollout_id for ids in chosen for rollout_id in ids])
        empty = 0
        for ids in chosen:
            parts = list(itertools.islice(rollouts, len(ids)))
            answers = tuple(self._recorded_rows(part, rules) for part in parts)
            if all(answers):
                yield Example(" and ".join(part.rollout.rollout_id for part in parts), answers)
            else:
                empty += 1
        if empty == len(chosen):
            raise DatasetError(
                f"{name}: no rollout of {stored.file} has tokens that the run's settings train "
                "(trained_agents, train_auxiliary_calls, trajectory_selection); give another run"
            )
        if empty:
            self.notes.append(f"{name}: {empty} of {len(chosen)} examples have no recorded tokens to learn")

    def _check_tokenizer(self, config: Mapping[str, object], name: str) -> None:
        """Raise a ConfigError if the model of a run has another tokenizer. A note says if it is not there.

        Args:
            config: the settings of the run.
            name: of the setting, for messages.
        """
        from transformers import AutoTokenizer

        sampled_by = algorithm_settings(config).get("model")
        if not isinstance(sampled_by, str) or not Path(sampled_by).is_dir():
            missing = f"the model {sampled_by} is not there" if sampled_by else "config.yaml names no model"
            self.notes.append(
                f"{name}: {missing}, so its tokenizer is not compared with the tokenizer of "
                f"{self._algorithm.model!r}; check that both are the same"
            )
            return
        if AutoTokenizer.from_pretrained(sampled_by).get_vocab() != self._tokenizer.get_vocab():
            raise ConfigError(
                f"the rollouts were sampled by {sampled_by}, whose tokenizer is not that of "
                f"{self._algorithm.model!r}: {LEARN_MESSAGES}"
            )

    def _recorded_rows(self, finished: FinishedRollout, rules: RowRules) -> tuple[LearnedRow, ...]:
        if self._is_scored:
            rollout = GroupRollout(finished)
            if not rollout.messages:
                return ()
            conversation = RewardModelInput(rollout.messages, rollout.tools)
            return (self._scored(conversation_tokens(self._tokenizer, conversation)),)
        rows = learned_rows(finished, rules)
        vocabulary = len(self._tokenizer)
        if any(int(row.token_ids.max()) >= vocabulary for row in rows):
            raise ConfigError(
                f"rollout {finished.rollout.rollout_id} has tokens that the model {self._algorithm.model!r} "
                f"does not have; {LEARN_MESSAGES}"
            )
        return tuple(map(LearnedRow.from_trajectory, rows))


def is_store(source: object) -> bool:
    """Return True for a run directory, or the file of a store."""
    if not isinstance(source, str | Path):
        return False
    path = Path(source).expanduser()
    return path.is_dir() or path.suffix == STORE_SUFFIX
