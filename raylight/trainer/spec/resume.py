"""The point at which a run starts: fresh, or after a training state of an earlier run.

The store is the log of a run and a training state is a position in it. Steps after the state are replayed
with the groups of rollouts that the store has recorded for them, and later steps take the finished groups
that it has, so that no rollout is trained twice and no finished one is lost.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import secrets
import threading
from dataclasses import dataclass, field
from pathlib import Path

from raylight.config import LearnerConfig, LoraConfig
from raylight.errors import ConfigError, StoreError
from raylight.learner.state.checkpoints import TrainingStates, locate_state
from raylight.types import JsonObject

Resume = bool | str | Path
"""False starts fresh. True and "auto" continue the run in output_dir; "auto" starts fresh if there is none. A
string or path names a training state or a run directory."""

SAME_UPDATES = {
    "n_steps",
    "n_epochs",
    "val_every",
    "val_before_train",
    "val_samples",
    "val_sampling_parameters",
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
"""Settings of an algorithm that do not affect its updates."""
CHOICE_OF_TASKS = {"weights", "solved", "unsolved", "advance_at", "window"}
"""Settings of task sets that choose among the same tasks."""
NOT_COMPARED = {"name", "versions", "resources"}
"""Top-level keys of a run's configuration that may differ from the training state's."""
PROGRESS_KEYS = (
    "version",
    "groups",
    "tasks",
    "observed_step",
    "ledger",
    "steps_without_signal",
    "evaluation",
    "opponents",
)
"""Fields of a ResumePoint that are stored with a training state."""
ADDED_KEYS: JsonObject = {"opponents": {}}
"""Values of those that an older state lacks."""
STORE_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class ResumePoint:
    """The position at which a run starts.

    Attributes:
        lineage: prefix of the names of the run's rollouts. Two lineages share no rollouts.
        state_url: folder or URL of the training states that `step` is one of; "" for a fresh run.
        step: last completed step.
        version: weight version after that step.
        groups: groups of rollouts that were taken up to that step, as arguments of `TakenGroups`.
        tasks: state of the sampler of tasks after that step; in supervised training, the digest of the
            step's examples.
        observed_step: last step whose outcomes `tasks` includes. It is after `step` in a state that was saved
            while steps were taken again.
        ledger: result of `Ledger.state_dict` after that step.
        steps_without_signal: number of steps, up to that step, that in a row gave nothing to learn.
        evaluation: state of the Evaluator; None starts a fresh one.
        opponents: state of the OpponentPool after that step.
        parent_lineage: the lineage that was abandoned if this point starts a new one in the same run
            directory.
        same_run: True if the state belongs to the run in this directory, whose store has the rollouts after
            `step`.
        evaluated_steps: steps whose evaluation the resumed run had logged.
        notes: messages for the user.
    """

    lineage: str
    state_url: str = ""
    step: int = 0
    version: int = 0
    groups: JsonObject = field(default_factory=dict)
    tasks: JsonObject = field(default_factory=dict)
    observed_step: int = 0
    ledger: JsonObject = field(default_factory=dict)
    steps_without_signal: int = 0
    evaluation: JsonObject | None = None
    opponents: JsonObject = field(default_factory=dict)
    parent_lineage: str | None = None
    same_run: bool = False
    evaluated_steps: frozenset[int] = frozenset()
    notes: list[str] = field(default_factory=list)

    @property
    def is_fresh(self) -> bool:
        """True if the run does not start from a training state."""
        return not self.state_url

    @property
    def last_logged_step(self) -> int | None:
        """Last step whose metrics are kept; None if the run directory starts empty.

        The evaluation before the first step is repeated, so its metrics are dropped too.
        """
        return (self.step or -1) if self.same_run else None

    @property
    def starts_new_lineage(self) -> bool:
        """True if the run starts from a state but does not continue the state's lineage."""
        return not self.is_fresh and not (self.same_run and self.parent_lineage is None)


def fresh_start() -> ResumePoint:
    """Return the starting point of a run with a new lineage and without a training state."""
    return ResumePoint(secrets.token_hex(4))


def find_resume_point(
    resume: Resume, state_url: str, config: JsonObject, highest_version: int
) -> ResumePoint:
    """Return the starting point that the user's `resume` asks for.

    Args:
        state_url: folder or URL of this run's training states.
        config: the run's resolved configuration, with the fingerprint of the training tasks as `tasks`.
        highest_version: highest weight version in the metrics of the run directory.

    Raises:
        ConfigError: there is no such training state, or it belongs to another model, algorithm or adapter.
    """
    if resume is False:
        return fresh_start()
    source, step = (state_url, None) if resume in (True, "auto") else locate_state(str(resume))
    states = TrainingStates(source)
    steps = states.steps()
    if not steps or (step is not None and step not in steps):
        if resume == "auto":
            return fresh_start()
        available = f"has only steps {steps}" if steps else "has none"
        raise ConfigError(
            f"no complete training state at {source if step is None else resume}: the folder {available}; "
            "name one of these, or pass resume='auto' to start fresh where there is none"
        )
    step = steps[-1] if step is None else step
    return resume_after(
        source, step, states.metadata(step), config, highest_version, same_run=source == state_url
    )


def resume_after(
    state_url: str,
    step: int,
    metadata: JsonObject,
    config: JsonObject,
    highest_version: int,
    same_run: bool = True,
) -> ResumePoint:
    """Return the starting point after a training state.

    A new lineage starts if the state comes from another run directory or if changed settings affect the
    updates: the rollouts after the state then cannot be replayed. Its weights get versions that were never
    used.

    Args:
        metadata: result of `state_metadata`, as stored with the state.
        same_run: True if the state is from the run in this directory, whose store has the rollouts after it.

    Raises:
        ConfigError: the state belongs to another model, algorithm or adapter, or was written by another
            version of raylight.
    """
    progress = _read_progress(metadata)
    changed = changed_settings(metadata["config"], config)
    if not same_run:
        progress["evaluation"] = None  # the best model so far is in the other run directory
    notes = [f"resuming after step {step}"]
    if changed:
        listed = "; ".join(f"{name}: {values}" for name, values in changed.items())
        notes.append(f"settings that differ from the training state's: {listed}")
    if any(map(_changes_tasks, changed)):
        progress["tasks"] = {}  # it names tasks by their positions in the former ones
    updates_differ = same_run and any(affects_updates(name, config) for name in changed)
    if same_run and not updates_differ:
        return ResumePoint(metadata["lineage"], state_url, step, **progress, same_run=True, notes=notes)
    if updates_differ:
        notes.append(
            "these settings affect the updates, so rollouts after the training state are not replayed"
        )
        if highest_version > progress["version"]:
            progress["version"] = highest_version + 2  # one more version may be published than logged
    return ResumePoint(
        fresh_start().lineage,
        state_url,
        step,
        **progress,
        parent_lineage=metadata["lineage"] if same_run else None,
        same_run=same_run,
        notes=notes,
    )


def resume_point_of(states: TrainingStates, step: int) -> ResumePoint:
    """Return the position of a training state that the current run wrote itself."""
    metadata = states.metadata(step)
    return ResumePoint(metadata["lineage"], states.url, step, **_read_progress(metadata), same_run=True)


def check_no_other_run(start: ResumePoint, state_url: str) -> None:
    """Raise a ConfigError if a new run would mix its training states with another run's."""
    if not start.same_run and TrainingStates(state_url).steps():
        raise ConfigError(
            f"checkpoint.path {state_url} has training states of another run; choose another folder, remove "
            "the states, or resume that run"
        )


def prepare_states(start: ResumePoint, state_url: str, config: JsonObject) -> None:
    """Remove training states after the starting point. For a run without any, write one that refers to the
    initial model."""
    states = TrainingStates(state_url)
    states.remove_after(start.step if start.same_run else -1)
    if start.step == 0 and (start.is_fresh or start.starts_new_lineage):
        progress = {name: getattr(start, name) for name in PROGRESS_KEYS}
        states.complete(0, state_metadata(start, config, **progress))


def state_metadata(start: ResumePoint, config: JsonObject, **progress: object) -> JsonObject:
    """Return the JSON that is stored with a training state.

    Args:
        progress: values of `PROGRESS_KEYS`.
    """
    return {"lineage": start.lineage, **progress, "config": config}


def changed_settings(before: JsonObject, now: JsonObject) -> dict[str, str]:
    """Return the settings that differ, by dotted name, each as `old -> new`.

    Raises:
        ConfigError: a setting differs that determines the model or the kind of training.
    """
    reward = now.get("group_reward")
    names = reward if isinstance(reward, dict) else ()
    if "group_reward" in now and before.get("group_reward", reward) in (reward, *names):
        before = before | {"group_reward": reward}  # earlier versions wrote only its name, or nothing
    old, new = flatten(before), flatten(now)
    lora = LoraConfig() if "learner.lora.rank" in old else None
    added = flatten({"learner": LearnerConfig(lora=lora).model_dump(mode="json")})
    # a version that did not have a setting yet did what its default does now
    old = {name: value for name, value in added.items() if new.get(name, "-") == value} | old
    new = {name: value for name, value in new.items() if name in old or value not in (None, {})}
    changed = {
        name: f"{old.get(name, '-')!r} -> {new.get(name, '-')!r}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name, "-") != new.get(name, "-") and name.split(".")[0] not in NOT_COMPARED
    }
    if incompatible := "; ".join(f"{name}: {text}" for name, text in changed.items() if _is_fixed(name)):
        raise ConfigError(
            f"the training state belongs to another run: {incompatible}. Restore these settings, or start "
            "fresh in another output_dir"
        )
    return changed


def _changes_tasks(name: str) -> bool:
    """Return True if a setting tells other training tasks, and not how they are chosen."""
    section, *parts = name.split(".")
    return section == "tasks" and not CHOICE_OF_TASKS & set(parts)


def _read_progress(metadata: JsonObject) -> JsonObject:
    """Return the values of `PROGRESS_KEYS`; raise ConfigError if another version wrote other keys."""
    metadata = ADDED_KEYS | metadata
    if missing := [name for name in PROGRESS_KEYS if name not in metadata]:
        raise ConfigError(
            f"the training state was written by another version of raylight: it has no {', '.join(missing)}; "
            "resume with that version, or start fresh in another output_dir"
        )
    return {name: metadata[name] for name in PROGRESS_KEYS}


def _is_fixed(name: str) -> bool:
    """Return True if a run cannot resume with another value of this setting."""
    fixed = ("algorithm.name", "algorithm.model", "algorithm.critic", "algorithm.critic.model")
    return name in fixed or (name.startswith("learner.lora") and name != "learner.lora.serve")


def affects_updates(name: str, config: JsonObject) -> bool:
    """Return True if a setting affects the weights after a step, or which rollouts a step has."""
    section, _, rest = name.partition(".")
    if name == "total_steps":
        schedules = [config["algorithm"], config["algorithm"].get("critic") or {}]
        return any(settings.get("lr_schedule", "constant") != "constant" for settings in schedules)
    if section == "algorithm":
        return rest.split(".")[0] not in SAME_UPDATES
    sections = ("seed", "tasks", "trained_agents", "group_reward")
    return section in sections or name in ("learner.long_rows", "learner.max_row_tokens")


def highest_logged_version(metrics: Path) -> int:
    """Return the highest weight version in a metrics.jsonl; 0 if the file does not exist."""
    return max((int(row.get("weights/version") or 0) for row in _logged_rows(metrics)), default=0)


def logged_evaluations(metrics: Path) -> frozenset[int]:
    """Return the steps whose evaluation is in a metrics.jsonl; none if the file does not exist."""
    rows = [row for row in _logged_rows(metrics) if "val/rollouts" in row]
    return frozenset(int(row["val/step" if "val/step" in row else "step"]) for row in rows)


def _logged_rows(metrics: Path) -> list[JsonObject]:
    if not metrics.exists():
        return []
    complete_lines = metrics.read_text().split("\n")[:-1]  # a kill may have cut off the last one
    return [json.loads(line) for line in complete_lines]


def flatten(config: JsonObject, prefix: str = "") -> JsonObject:
    """Return nested settings by dotted name."""
    flat: JsonObject = {}
    for name, value in config.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


async def wait_for_store(path: Path, timeout: float = STORE_TIMEOUT_S) -> None:
    """Wait until the store process of a killed run has released its file.

    Raises:
        StoreError: another process still holds the file's lock after `timeout` seconds.
    """
    released, loop = asyncio.Event(), asyncio.get_running_loop()

    def wait() -> None:
        if not path.exists():
            loop.call_soon_threadsafe(released.set)
            return
        with open(f"{path}-lock", "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not loop.is_closed():
            loop.call_soon_threadsafe(released.set)

    threading.Thread(target=wait, name="store-lock", daemon=True).start()
    try:
        await asyncio.wait_for(released.wait(), timeout)
    except TimeoutError:
        raise StoreError(
            f"another process still has {path} open after {timeout:g} s: stop the run that is to be resumed "
            "first"
        ) from None
