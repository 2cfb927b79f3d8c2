"""Extension of vLLM's worker processes: their end with the replica, constraints, the stages of a start.

The module imports neither torch nor vllm itself.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import select
import signal
import threading
from typing import Any

from raylight.engines.start_stages import note_stage

STAGES = {
    "Starting to load model": "loading weights",
    "Model loading took": "profiling memory",
    "Using cache directory": "compiling",
    "Dynamo bytecode transform time": "compiling",
    "Initial profiling/warmup run took": "profiling memory",
    "GPU KV cache size": "warming up and capturing graphs",
    "Graph capturing finished": "opening the server",
    "init engine (profile": "opening the server",
}
"""Beginning of a message -> the stage that it begins."""


class WorkerExtension:
    """Mixin of vLLM's worker class. Its methods are called through `collective_rpc`."""

    model_runner: Any

    def raylight_end_with(self, pid: int) -> None:
        """End this worker and its engine core with the replica's process, even if that is killed.

        vLLM ends them only if the replica shuts down in order. Workers that are Ray actors end with their
        placement group, and the core with them.

        Args:
            pid: the replica's process, on this machine.
        """
        core = multiprocessing.parent_process()
        if core is not None:
            replica = os.pidfd_open(pid)
            threading.Thread(target=_end_with, args=(replica, pid, core.pid), daemon=True).start()

    def raylight_repair_updates(self) -> None:
        """Prepare the model for weight updates."""
        from raylight.engines.vllm.update_repairs import load_tied_output, repair_expert_updates

        repair_expert_updates()
        load_tied_output(self.model_runner.get_model())

    def raylight_record_constraints(self) -> str | None:
        """Record the policy's log-probs of constrained requests, and the tokens that could have been sampled,
        from now on.

        Returns the reason if this is not possible, else None.
        """
        from raylight.engines.vllm.constraints import (
            CandidateRecorder,
            ConstraintRecorder,
            repair_allowed_tokens,
        )

        problem = ConstraintRecorder.problem(self.model_runner)
        if problem is None:
            repair_allowed_tokens(type(self.model_runner.input_batch))
            ConstraintRecorder(self.model_runner)
            CandidateRecorder(self.model_runner)
        return problem

    def raylight_scale_prompts(self) -> bool:
        """Compute a request's prompt log-probs at the temperature that it asks for, from now on.

        Returns False if the model runner does not compute them in the method that is extended.
        """
        from raylight.engines.vllm.prompt_temperature import PromptTemperatures

        if not hasattr(self.model_runner, PromptTemperatures.METHOD):
            return False
        PromptTemperatures(self.model_runner)
        return True

    def raylight_expert_layers(self) -> list[int]:
        """Return the indices of the layers whose routes vLLM captures."""
        from vllm.model_executor.layers.fused_moe import layer, routed_experts_capturer

        kinds = layer.MoERunner, routed_experts_capturer.RoutedExpertsCaptureSource
        parts = self.model_runner.get_model().modules()
        return sorted(part.layer_id for part in parts if isinstance(part, kinds))

    def raylight_unused_adapter_layers(self, adapter: int) -> list[str]:
        """Return the layers of a loaded adapter that fit no layer of the model, which vLLM ignores.

        Args:
            adapter: vLLM's number of the adapter.
        """
        manager = self.model_runner.lora_manager._adapter_manager
        names = manager.get_adapter(adapter).loras
        return sorted(name for name in names if name.removesuffix(".base_layer") not in manager.modules)


def _end_with(replica: int, replica_pid: int, core_pid: int) -> None:
    """Wait for a replica's end, and kill its engine core and this process.

    Args:
        replica: file descriptor of the replica's process.
        core_pid: the parent of this process: the core, or the replica if the worker is in the core.
    """
    waiting = select.poll()
    waiting.register(replica, select.POLLIN)
    waiting.poll()
    if core_pid != replica_pid and os.getppid() == core_pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(core_pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


class StageHandler(logging.Handler):
    """Notes the stages that vLLM's messages tell of."""

    def emit(self, record: logging.LogRecord) -> None:
        message = str(record.msg)
        if stage := next((stage for start, stage in STAGES.items() if message.startswith(start)), None):
            note_stage(stage)


def note_start_stages() -> None:
    """Note the stages of this process from now on."""
    logger = logging.getLogger("vllm")
    if not any(isinstance(handler, StageHandler) for handler in logger.handlers):
        logger.addHandler(StageHandler(logging.INFO))
