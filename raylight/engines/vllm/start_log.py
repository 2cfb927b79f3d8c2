"""Stages of vLLM's start, by what its workers log."""

from __future__ import annotations

import logging

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
