"""Where a run begins: anew, or after the last training state of a run that ended before its time.

The store is the log of a run, and a training state a place in it: the steps after it are taken again with the rollouts that they
had, which the store knows by name, so that none is trained twice and none that was finished is lost.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import secrets
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raylight.errors import ConfigError, StoreError
from raylight.experience.checkpoints import TrainingStates, locate_state

Resume = bool | str | Path
"""False begins anew; True and "auto" continue the run in the output_dir, the latter only if there is one; or where a state is."""

SAME_UPDATES = {
    "n_steps",
    "n_epochs",
    "val_every",
    "val_before_train",
    "val_samples",
    "pass_reward",
    "best",
    "best_mode",
    "patience",
    "min_delta",
    "max_steps_without_signal",
    "sync_timeout_s",
    "rollout",
    "warn_logprob_mismatch",
    "max_logprob_mismatch",
}
"""Settings of an algorithm that leave its updates as they are."""
NOT_COMPARED = {"name", "versions", "resources"}
PLACE = ("version", "taken", "without_signal", "evaluation")
STORE_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class ResumePoint:
    """Where a run begins.

    Attributes:
        lineage: begins the names of the run's rollouts. Another one is another history: it shares no rollouts with the one before.
        url: where the states are that `step` is one of; "" for a run that begins anew.
        step: the last one that is done.
        version: of the weights then.
        taken: training tasks that were taken until then.
        without_signal: steps in a row until then from which there was nothing to learn.
        evaluation: the Evaluator's state; None begins anew.
        before: the lineage that was left, if another one begins here.
        own: the store in the run directory is this run's, with the rollouts of the steps after `step`.
        notes: for the user.
    """

    lineage: str
    url: str = ""
    step: int = 0
    version: int = 0
    taken: int = 0
    without_signal: int = 0
    evaluation: dict[str, Any] | None = None
    before: str | None = None
    own: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def is_new(self) -> bool:
        return not self.url

    @property
    def after(self) -> int | None:
        """The last step whose metrics stay; None if all is begun anew. What comes before the first step is measured again."""
        return (self.step or -1) if self.own else None

    @property
    def is_another(self) -> bool:
        """Whether another history begins here than that of the state."""
        return not self.is_new and not (self.own and self.before is None)


def new_start() -> ResumePoint:
    return ResumePoint(secrets.token_hex(4))


def find_start(resume: Resume, url: str, now: dict[str, Any], highest: int) -> ResumePoint:
    """Where to begin.

    Args:
        url: where this run's states are.
        now: the run's resolved configuration, with what `describe_tasks` says as `tasks`.
        highest: version of weights that the run in this folder reached, as far as its metrics tell.

    Raises:
        ConfigError: there is nothing to resume from, or it is of another model, algorithm or adapter.
    """
    if resume is False:
        return new_start()
    source, step = (url, None) if resume in (True, "auto") else locate_state(str(resume))
    steps = TrainingStates(source).steps()
    if not steps or (step is not None and step not in steps):
        if resume == "auto":
            return new_start()
        found = f"only of steps {steps}" if steps else "none"
        raise ConfigError(
            f"no complete training state at {source if step is None else resume}: there is {found}"
        )
    step = steps[-1] if step is None else step
    return start_after(source, step, TrainingStates(source).metadata(step), now, highest, own=source == url)


def start_after(
    url: str, step: int, about: dict[str, Any], now: dict[str, Any], highest: int, own: bool = True
) -> ResumePoint:
    """Begin after a state.

    Args:
        about: what was written with it, by `describe`.
        own: it is a state of the run in this folder, whose store has the rollouts of the steps after it.

    Raises:
        ConfigError: it is of another model, algorithm or adapter.
    """
    changed = changes(about["config"], now)
    place = {name: about[name] for name in PLACE}
    if not own:
        place["evaluation"] = None  # the best model so far is in the other folder
    notes = [f"going on after step {step}"]
    if changed:
        notes.append(
            "settings that differ from then: "
            + "; ".join(f"{name}: {text}" for name, text in changed.items())
        )
    updates_differ = own and any(changes_updates(name, now) for name in changed)
    if own and not updates_differ:
        return ResumePoint(about["lineage"], url, step, **place, own=True, notes=notes)
    if updates_differ:
        notes.append(
            "with these, steps come out otherwise, so that what was rolled out after the state is left out"
        )
    if updates_differ and highest > place["version"]:
        place["version"] = highest + 2  # one more may have been published than was reported
    return ResumePoint(
        new_start().lineage,
        url,
        step,
        **place,
        before=about["lineage"] if own else None,
        own=own,
        notes=notes,
    )


def place_of(states: TrainingStates, step: int) -> ResumePoint:
    """Where a state of this very run is."""
    about = states.metadata(step)
    return ResumePoint(about["lineage"], states.url, step, **{name: about[name] for name in PLACE}, own=True)


def prepare_states(start: ResumePoint, url: str, config: dict[str, Any]) -> None:
    """Leave in the folder of states what the run begins with, which is the model's own files if it begins anew."""
    states = TrainingStates(url)
    states.remove_after(start.step if start.own else -1)
    if start.step == 0 and (start.is_new or start.is_another):
        states.write(0, describe(start, config, **{name: getattr(start, name) for name in PLACE}))


def describe(start: ResumePoint, config: dict[str, Any], **place: Any) -> dict[str, Any]:
    """What is written with a training state, as JSON.

    Args:
        place: `version`, `taken`, `without_signal` and `evaluation`, as in `ResumePoint`.
    """
    return {"lineage": start.lineage, **place, "config": config}


def changes(before: dict[str, Any], now: dict[str, Any]) -> dict[str, str]:
    """Settings that differ, by dotted name, each with both values.

    Raises:
        ConfigError: they make another model or another kind of training of it.
    """
    old, new = _flat(before), _flat(now)
    differing = {
        name: f"{old.get(name, '-')!r} -> {new.get(name, '-')!r}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name, "-") != new.get(name, "-") and name.split(".")[0] not in NOT_COMPARED
    }
    fatal = {name: text for name, text in differing.items() if _is_fatal(name)}
    if fatal:
        raise ConfigError(
            f"the training state is of another run: {'; '.join(f'{name}: {text}' for name, text in fatal.items())}. Give what it "
            "was given, or begin anew in another output_dir"
        )
    return differing


def _is_fatal(name: str) -> bool:
    critic = name == "algorithm.critic" or name == "algorithm.critic.model"
    return name in ("algorithm.name", "algorithm.model") or critic or name.startswith("learner.lora")


def changes_updates(name: str, now: dict[str, Any]) -> bool:
    """Whether a setting has a say in what a step makes of the weights, or which rollouts it has."""
    room, _, rest = name.partition(".")
    if name == "total_steps":
        schedules = [now["algorithm"], now["algorithm"].get("critic") or {}]
        return any(settings.get("lr_schedule", "constant") != "constant" for settings in schedules)
    if room == "algorithm":
        return rest.split(".")[0] not in SAME_UPDATES
    return room in ("seed", "tasks", "trained_agents") or name in (
        "learner.long_rows",
        "learner.max_row_tokens",
    )


def describe_tasks(tasks: list[Any]) -> dict[str, Any]:
    """What tells training tasks from others: their number, and a digest where they are plain data."""
    try:
        text = json.dumps(tasks, sort_keys=True)
    except (TypeError, ValueError):
        return {"number": len(tasks), "digest": None}
    return {"number": len(tasks), "digest": hashlib.sha256(text.encode()).hexdigest()[:16]}


def highest_version(metrics: Path) -> int:
    """Highest version of weights in the rows of a metrics.jsonl; 0 without one."""
    if not metrics.exists():
        return 0
    rows = [
        json.loads(line) for line in metrics.read_text().split("\n")[:-1]
    ]  # the last may have been cut off
    return max((int(row.get("weights/version") or 0) for row in rows), default=0)


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


async def wait_for_store(path: Path, timeout: float = STORE_TIMEOUT_S) -> None:
    """Wait until the store of a run that was killed has let go of its file.

    Raises:
        StoreError: another process still has it after `timeout` seconds.
    """
    free, loop = asyncio.Event(), asyncio.get_running_loop()

    def wait() -> None:
        if not path.exists():
            loop.call_soon_threadsafe(free.set)
            return
        with open(f"{path}-lock", "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not loop.is_closed():
            loop.call_soon_threadsafe(free.set)

    threading.Thread(target=wait, name="store-lock", daemon=True).start()
    try:
        await asyncio.wait_for(free.wait(), timeout)
    except TimeoutError:
        raise StoreError(
            f"another process still has {path} open: is the run that is to be resumed still alive?"
        ) from None
