"""Control of all replicas by the sender of weights: vLLM's client protocol over the coordinator."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from raylight.errors import CoordinatorUnavailableError, TransferBrokenError
from raylight.weights.client import call_coordinator, call_until_answered, order_limit
from raylight.weights.orders import Member, Phase


@dataclass(frozen=True)
class PublicationSettings:
    """Settings of the publications of a run, for the learners.

    Attributes:
        transport: name of the transport.
        dtype: name of the engines' dtype.
        names: naming of the tensors: "checkpoint" for vLLM, "module" for engines that load into a module of
            transformers.
        timeout_s: time that a version may take to reach all replicas.
        replacement_timeout_s: further time while no replica is left.
        coordinator: handle of the coordinator's actor.
        during_updates: weights are sent from a snapshot, while the learners' next update runs.
    """

    transport: str
    dtype: str
    names: Literal["checkpoint", "module"]
    timeout_s: float
    replacement_timeout_s: float
    coordinator: object
    during_updates: bool = False

    @property
    def limit_s(self) -> float:
        """Longest time that a publication takes."""
        return order_limit(self.timeout_s, self.replacement_timeout_s)


class SenderClient:
    """A `SyncClient`. Its methods block, and may be called by any thread that runs no event loop."""

    def __init__(self, settings: PublicationSettings) -> None:
        self._coordinator, self._timeout_s = settings.coordinator, settings.timeout_s
        self._limit_s = settings.limit_s
        self._members: Sequence[Member] = ()

    def begin(self, version: int, token: str) -> list[Member] | None:
        """Wait until replicas lack a version; return them. None: the publication has ended."""
        call = call_until_answered(self._coordinator, "begin_transfer", version, token, within=self._limit_s)
        members: list[Member] | None = asyncio.run(call)
        self._members = members or ()
        return members

    def init_weight_transfer_engine(self, init_info: dict[str, object]) -> None:
        """Have all replicas join the group, each with the ranks that follow the previous one's."""
        infos, offset = {}, 1
        for index, member in enumerate(self._members):
            own = {"rank_offset": offset, "replica_rank": index, "num_replicas": len(self._members)}
            infos[member.replica] = init_info | {k: v for k, v in own.items() if k in init_info}
            offset += member.workers
        self._run("init", infos)

    def start_weight_update(self) -> None:
        self._run("start", {})

    def update_weights(self, update_info: object) -> None:
        self._run("update", {member.replica: update_info for member in self._members})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._run("finish", {})

    def send(self, update_info: object) -> None:
        self._run("send", {member.replica: update_info for member in self._members})

    def _run(self, kind: Phase, infos: Mapping[str, object]) -> None:
        """Run a phase on all replicas.

        Raises:
            TransferBrokenError: a replica failed or was lost, or it is unknown if the phase was executed.
        """
        known = {id(info): pickle.dumps(info) for info in infos.values()}  # replicas may share one
        pickled = {replica: known[id(info)] for replica, info in infos.items()}
        call = call_coordinator(
            self._coordinator, "run_phase", kind, pickled, self._timeout_s, within=self._limit_s
        )
        try:
            asyncio.run(call)
        except CoordinatorUnavailableError as error:
            raise TransferBrokenError(str(error)) from None
