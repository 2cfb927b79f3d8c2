"""Training of agents that run elsewhere, and open sessions over HTTP: `raylight serve --learn`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raylight._utils.bounds import ENDLESS
from raylight.algorithms.policy import PolicyAlgorithm
from raylight.config import SessionConfig
from raylight.errors import ConfigError
from raylight.trainer.launch import short_errors, show_summary
from raylight.trainer.ray_session.blocking import run_blocking
from raylight.trainer.ray_session.cluster_monitor import until_lost, watch_loss
from raylight.trainer.runs.policy_run import OnlineRun
from raylight.trainer.spec.resume import Resume
from raylight.trainer.spec.run_file import build_algorithm
from raylight.trainer.trainer import Trainer
from raylight.types import JsonObject

MIN_KEY_LENGTH = 16
"""Fewest characters of the server's key: who has the key of a session could find out a short one."""
ONLINE_DEFAULTS: JsonObject = {
    "name": "ReinforcePlusPlus",
    "n_steps": ENDLESS,
    "max_steps_without_signal": ENDLESS,
    "max_staleness": 2,
    "stale": "mask",
    "override_sampling": True,
    "off_policy_sampling": "mask",
    "val_every": None,
    "best": None,
}
"""Settings of an algorithm for agents that the run does not control, and for tasks that do not end."""
LEASE_S = 60.0
"""Seconds without a call or a heartbeat after which a session expires."""


def online_algorithm(
    model: str, given: JsonObject, sessions_per_step: int | None = None, lease_s: float | None = None
) -> object:
    """Return an algorithm that trains on sessions.

    Args:
        given: its settings, which win over `ONLINE_DEFAULTS`, with its name as `name`.
        sessions_per_step: sessions with a reward in a training step; None: `tasks_per_step` groups.
        lease_s: seconds without a call or a heartbeat after which a session expires; None: `LEASE_S`.

    Raises:
        ConfigError: a setting is wrong.
    """
    limits = {
        "timeout_seconds": None,
        "unresponsive_seconds": lease_s or LEASE_S,
        "infrastructure_retries": 0,
    }
    own = given.get("rollout") or {}
    _check_given_once("--sessions-per-step", sessions_per_step, "tasks_per_step", given)
    _check_given_once("--lease", lease_s, "unresponsive_seconds", own, "rollout.")
    rollout = {**limits, **own} if isinstance(own, Mapping) else own  # the algorithm rejects other types
    settings = ONLINE_DEFAULTS | given | {"model": model, "rollout": rollout}
    algorithm = build_algorithm(settings)
    if sessions_per_step is None or not isinstance(algorithm, PolicyAlgorithm):
        return algorithm
    group_size = algorithm.group_size
    if sessions_per_step % group_size:
        raise ConfigError(
            f"--sessions-per-step {sessions_per_step} is not a multiple of the group size {group_size}; the "
            "algorithm trains on whole groups"
        )
    return build_algorithm(settings | {"tasks_per_step": sessions_per_step // group_size})


def _check_given_once(option: str, value: object, name: str, settings: object, section: str = "") -> None:
    """Raise a ConfigError if an option and the setting that it stands for are both given."""
    if value is not None and isinstance(settings, Mapping) and name in settings:
        raise ConfigError(
            f"{option} sets algorithm.{section}{name}, which is given too; leave one of them out"
        )


class OnlineTrainer(Trainer):
    """A Trainer whose rollouts are sessions of agents outside the run.

    Args:
        sessions: settings of the sessions.
        api_key: the server's key, which opens sessions.
        arguments: a Trainer's.

    Raises:
        ConfigError: a setting is wrong.
    """

    def __init__(
        self, *, api_key: str, sessions: SessionConfig | JsonObject | None = None, **arguments: Any
    ) -> None:
        super().__init__(**arguments)
        if len(api_key) < MIN_KEY_LENGTH:
            raise ConfigError(
                f"the API key has {len(api_key)} characters; give at least {MIN_KEY_LENGTH} random ones, "
                "because the keys of sessions are derived from it, or none to have one generated"
            )
        if self.learner.kind == "local":
            raise ConfigError("a local learner serves no sessions; leave learner.kind out")
        if unread := [name for name in ("adapter", "llm_proxy") if arguments.get(name) is not None]:
            raise ConfigError(f"nothing reads {' and '.join(unread)}: agents outside the run open sessions")
        if self.group_reward is not None:
            raise ConfigError(
                "group_reward would replace the rewards that agents send for their sessions; leave it out"
            )
        self._sessions, self._api_key = SessionConfig.parse(sessions), api_key
        self._policy = _checked(self.algorithm)

    def serve(self, resume: Resume = False) -> JsonObject:
        """Serve sessions and train on them until Ctrl-C or the last step; return the summary.

        At the first Ctrl-C an update that has begun is completed, and a training state and the model are
        saved. Sessions that are open stay in the store.
        """
        with short_errors():
            run = self.plan_sessions(resume)
            with self._launched(run) as work:
                summary = run_blocking(until_lost(work, run.remedy), watch_loss(run.remedy), run.stop)
            return show_summary(run, summary, self.arguments)

    def plan_sessions(self, resume: Resume = False) -> OnlineRun:
        """Return the run that `serve` executes."""
        name, folder = self._name_run()
        settings = self._rollout_settings(
            self._sessions, self._api_key, self.initial_resources, name, folder / "store.db"
        )
        return OnlineRun.plan(settings, self._policy, self.run_settings, resume)


def _checked(algorithm: object) -> PolicyAlgorithm:
    """Return the algorithm.

    Raises:
        ConfigError: it cannot train on sessions.
    """
    if not isinstance(algorithm, PolicyAlgorithm):
        raise ConfigError(
            f"{type(algorithm).__name__} trains no policy; choose an algorithm such as ReinforcePlusPlus"
        )
    if algorithm.needs_greedy_rollouts:
        raise ConfigError(
            f"{type(algorithm).__name__} needs a greedy rollout of each task, which no session is; choose "
            "another algorithm, such as ReinforcePlusPlus"
        )
    if algorithm.max_staleness < 1 or algorithm.stale == "wait":
        raise ConfigError(
            "sessions go on while the weights are updated, and end in any order; set algorithm.max_staleness "
            "to 1 or more, and algorithm.stale to drop or mask"
        )
    if algorithm.patience is not None:
        raise ConfigError("nothing reads patience: sessions are not validated; leave it out")
    if algorithm.rollout.truncated == "fail":
        raise ConfigError(
            "a session that spent its budget ends with the reward that its agent gives; set "
            "algorithm.rollout.truncated to score or mask"
        )
    return algorithm
