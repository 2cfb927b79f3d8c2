"""Load of vLLM, from the statistics that its scheduler sends with the tokens of each step."""

from __future__ import annotations

from typing import Any

from vllm.v1.metrics.loggers import AggregateStatLoggerBase
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from raylight.engines.protocol import EngineLoad


class LoadStats(AggregateStatLoggerBase):
    """Keeps the last statistics of each engine core (one for each data-parallel part).

    Without statistics (`disable_log_stats`), only the number of requests is known.

    Args:
        client: an `AsyncLLM`.
    """

    def __init__(self, client: Any) -> None:
        self._cache = client.vllm_config.cache_config
        self._requests: dict[str, Any] = client.output_processor.request_states
        self._cores: dict[int, SchedulerStats] = {}
        self._preemptions = self._preempted_by_pause = 0
        if client.logger_manager is not None:
            client.logger_manager.stat_loggers.append(self)

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is not None:
            self._cores[engine_idx] = scheduler_stats
        if iteration_stats is not None:
            preempted = iteration_stats.num_preempted_reqs
            by_pause = min(preempted, self._preempted_by_pause)
            self._preempted_by_pause -= by_pause
            self._preemptions += preempted - by_pause

    def begin_pause(self) -> None:
        """Leave out the preemptions of a pause: vLLM preempts all requests to recompute their cache, and
        reports it with their next tokens."""
        self._preempted_by_pause = len(self._requests)

    def log_engine_initialized(self) -> None:
        """Do nothing."""

    def read(self, paused: bool) -> EngineLoad:
        """Return the load; the engine core sends nothing while it has no requests."""
        cores = list(self._cores.values()) if self._requests else []
        waiting = sum(core.num_waiting_reqs for core in cores)
        running = sum(core.num_running_reqs for core in cores)
        return EngineLoad(
            kv_use=max((core.kv_cache_usage for core in cores), default=0.0),
            running=running if self._cores else len(self._requests),
            waiting=waiting,
            preemptions=self._preemptions,
            capacity=self._cache.kv_cache_size_tokens or 0,
            paused=paused,
        )
