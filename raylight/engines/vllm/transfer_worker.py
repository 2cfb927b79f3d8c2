"""Extension of vLLM's worker processes for weight transfers.

The module is imported by its dotted name in each worker.
"""

from __future__ import annotations

import pickle
from typing import Any

from vllm.config import set_current_vllm_config

import raylight.engines.vllm.gloo_backend  # noqa: F401  # registers the backend
from raylight.engines.vllm.start_log import note_start_stages
from raylight.engines.vllm.worker import WorkerExtension

note_start_stages()  # imported before the worker loads its weights

LOST, FAILED = "lost", "failed"
"""Kinds of failures: another process was lost, or this worker failed."""


class TransferWorkerExtension(WorkerExtension):
    """Mixin of vLLM's worker class. Its methods are called through `collective_rpc`."""

    vllm_config: Any
    weight_transfer_engine: Any
    _weight_update_active: bool

    def raylight_transfer(self, phase: str, args: bytes) -> tuple[str, str] | None:
        """Execute a phase of a weight transfer, while nothing is scheduled.

        Returns the kind and the reason of a failure, or None. It raises nothing: vLLM's executor does not
        read the responses of the workers after the first one that raised.

        Args:
            phase: name of the worker's method.
            args: its pickled arguments, from the replica.
        """
        try:
            getattr(self, phase)(*pickle.loads(args))
        except Exception as error:  # of any kind, see above
            kind = LOST if isinstance(error, ConnectionError) else FAILED
            return kind, str(error) or type(error).__name__
        return None

    def raylight_abort_update(self, started: bool) -> None:
        """Leave the transfer, and end an update that was broken off.

        Its layers have old, new and undefined weights until the next update is complete.

        Args:
            started: True if all workers have started the update; False if none or only some have.
        """
        self.weight_transfer_engine.shutdown()
        if started or self._weight_update_active:
            with set_current_vllm_config(self.vllm_config):
                self.weight_transfer_engine.finish_weight_update()
            self._weight_update_active = False
