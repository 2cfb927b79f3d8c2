"""Divergences of each micro-batch's sampled tokens from teachers, on the learners' ranks or in engines."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch.distributed.fsdp import FSDPModule

from raylight.config import LearnerConfig
from raylight.errors import ConfigError
from raylight.experience.settings.advantages import OPDAdvantage
from raylight.experience.settings.policy_settings import PolicySettings
from raylight.learner.losses.divergence import LocalDivergence, TeacherHidden, TopDivergence
from raylight.learner.model.fsdp import RaylightEngine
from raylight.learner.model.verl_engines import build_reference
from raylight.learner.tokens.micro_batch import MicroBatch
from raylight.learner.tokens.rows import mask_all
from raylight.learner.tokens.token_logprobs import TokenDivergence


class Distiller:
    """Makes the divergences of this rank's micro-batches, and has the teachers that are on the ranks.

    Constructing it is a collective, as are its methods.

    Raises:
        ConfigError: a teacher cannot be loaded, or the settings of the learners do not allow it.
    """

    def __init__(self, settings: PolicySettings, config: LearnerConfig) -> None:
        assert isinstance(settings.advantage, OPDAdvantage), "only OPD has teachers"
        if config.ulysses > 1:
            raise ConfigError(
                f"divergence={settings.divergence!r} cannot be computed with learner.ulysses="
                f"{config.ulysses}, which divides sequences among ranks; remove it, or set 'sampled'"
            )
        self._options = settings.advantage
        # a teacher has other experts
        config = config.model_copy(update={"router_replay": False, "router_aux_loss_coef": 0.0})
        self._engines = [build_reference(path, config) for path in settings.local_teachers]

    def load_images(self, files: Mapping[str, bytes]) -> None:
        """Take the images of an update, by digest."""
        for engine in self._engines:
            engine.load_images(files)

    @contextlib.contextmanager
    def resident(self) -> Iterator[None]:
        """Context in which offloaded teachers stay on the device."""
        with contextlib.ExitStack() as stack:
            for engine in self._engines:
                stack.enter_context(engine.resident())
            yield

    @contextlib.contextmanager
    def __call__(self, batch: MicroBatch) -> Iterator[TokenDivergence]:
        """Context with the divergences of a micro-batch, in which the teachers' output layers are whole."""
        options, targets = self._options, batch.targets()
        assert options.divergence != "sampled", "the policy has a divergence in its loss"
        formula = options.divergence, options.js_beta
        if not self._engines:
            yield TopDivergence(*formula, *_sent_tops(batch))
            return
        teachers = [self._read(number, batch) for number in range(len(self._engines))]
        modules = [module for engine in self._engines for module in _output_groups(engine)]
        for module in modules:
            module.unshard()
        try:
            yield LocalDivergence(*formula, options.teacher_top_k, teachers, targets.temperatures)
        finally:
            for module in modules:
                module.reshard()

    def _read(self, number: int, batch: MicroBatch) -> TeacherHidden:
        """Have a teacher read its rows, or one with an empty mask if it has none: all ranks take part."""
        engine, rows = self._engines[number], batch.rows
        sampled: list[int] = batch.computed.sum(-1).tolist()
        owned = torch.arange(sum(sampled)).split(sampled)
        own = [i for i, row in enumerate(rows) if row.teacher == number]
        read = [rows[i] for i in own] or [mask_all(rows[0])]
        hidden = engine.infer_hidden(batch if len(own) == len(rows) else replace(batch, rows=read))
        tokens = torch.cat([owned[i] for i in own]) if own else torch.arange(0)
        return TeacherHidden(engine.head.logits, hidden, tokens.to(hidden.device))


def _output_groups(engine: RaylightEngine) -> list[FSDPModule]:
    """Return the groups of FSDP with the weights that a model's output layer reads."""
    return [module for module in (engine.module, engine.head.layer) if isinstance(module, FSDPModule)]


def _sent_tops(batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids and log-probs, shape (sampled tokens, k), that engines of the teacher have sent.

    Raises:
        ConfigError: the rows have none.
    """
    ids, logprobs = batch.matrix("teacher_top_ids"), batch.matrix("teacher_top_logprobs")
    if ids is None:
        raise ConfigError(
            "a divergence was given rows without distributions of a teacher; use rl.OPD(teacher=...) with "
            "raylight's own training loop"
        )
    return ids[batch.computed], logprobs[batch.computed]
