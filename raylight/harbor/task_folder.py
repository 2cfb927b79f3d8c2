"""One task in Harbor's format, read from its folder.

    instruction.md        the prompt
    task.toml             limits, image, variables
    environment/          Dockerfile and the files that it copies
    tests/test.sh         writes /logs/verifier/reward.json or reward.txt
    solution/solve.sh     a solution, which an agent never sees
    steps/NAME/           in a task of several steps: instruction.md, tests/, and workdir/ with further files

Source: the format of Harbor 0.26 (schema 1.4, harborframework.com/docs/tasks).
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from raylight.errors import DatasetError, UnsupportedTaskError
from raylight.types import JsonObject

CANARY = re.compile(r"(<!--.*canary.*-->|#.*canary.*)", re.IGNORECASE)
"""A line of a benchmark's mark against training on it, which an agent must not see."""
VARIABLE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}")
PRIMARY = "reward"
"""Name of the reward that counts, of several."""
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([GMK])", re.IGNORECASE)
MB_OF_UNIT = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}
UNSUPPORTED_ENVIRONMENT = {
    "gpus": "GPUs",
    "tpu": "TPUs",
    "mcp_servers": "MCP servers",
    "healthcheck": "a health check",
    "skills_dir": "a folder of skills",
}


@dataclass(frozen=True)
class TaskEnvironment:
    """Environment of a task's agent, or of its tests."""

    image: str | None = None
    """Image to start; None: the one that `folder` describes."""
    folder: Path | None = None
    """Folder of a Dockerfile and its files."""
    workdir: str | None = None
    """Working directory; None: the image's."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables, as they are written: `${NAME}` and `${NAME:-default}` stand for the runner's own."""
    memory_mb: int | None = None
    storage_mb: int | None = None
    network: bool = True
    build_timeout_s: float = 600.0

    @property
    def dockerfile(self) -> Path | None:
        """The Dockerfile of an environment that has to be built."""
        path = self.folder / "Dockerfile" if self.folder is not None and self.image is None else None
        return path if path is not None and path.is_file() else None


@dataclass(frozen=True)
class HarborTask:
    """A task: what the agent is asked, in which environment, and how the result is judged."""

    folder: Path
    name: str
    instruction: str
    environment: TaskEnvironment
    agent_timeout_s: float | None = None
    tests_timeout_s: float = 600.0
    tests_env: Mapping[str, str] = field(default_factory=dict)
    tests_environment: TaskEnvironment | None = None
    """Environment of the tests; None: the agent's own, after the agent has ended."""
    tests_folders: tuple[Path, ...] = ()
    """Folders that are copied to /tests, a later one over an earlier. Empty: the image of `tests_environment`
    has the tests."""
    artifacts: tuple[str, ...] = ()
    """Paths that are copied from the agent's environment into the tests' one."""
    metadata: JsonObject = field(default_factory=dict)
    steps: tuple[HarborTask, ...] = ()
    """Steps of a task that has several, in their order, each with the environment of the task."""
    files: Path | None = None
    """Folder that is copied to the working directory before a step; its setup.sh is run there."""
    min_rewards: Mapping[str, float] = field(default_factory=dict)
    """Rewards by name without which the steps after this one are left out."""
    reward_strategy: str = "mean"
    """Reward of several steps: the mean over the steps that ran, or the last one's ("final")."""


def read_task(folder: str | os.PathLike[str]) -> HarborTask:
    """Read a task's folder.

    Raises:
        DatasetError: a file is missing or damaged. UnsupportedTaskError: the task needs what raylight does
            not have.
    """
    return _TaskReader(Path(folder).resolve()).read()


class _TaskReader:
    """Reader of one task's folder. All methods raise the errors of `read_task`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._settings = _read_toml(folder / "task.toml")

    def read(self) -> HarborTask:
        agent, tests = self._table(self._settings, "agent"), self._table(self._settings, "verifier")
        name = str(self._table(self._settings, "task").get("name", self._folder.name))
        entries = self._settings.get("steps")
        if not entries:
            return self._read_part(name, self._folder, agent, tests)
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise self._error(f"steps is {entries!r:.80}; write a [[steps]] table for each")
        steps = tuple(self._read_step(entry, agent, tests) for entry in entries)
        strategy = self._settings.get("multi_step_reward_strategy", "mean")
        if strategy not in ("mean", "final"):
            raise self._error(f"multi_step_reward_strategy is {strategy!r}; give mean or final")
        return replace(steps[0], name=name, files=None, min_rewards={}, steps=steps, reward_strategy=strategy)

    def _read_step(self, entry: JsonObject, agent: JsonObject, tests: JsonObject) -> HarborTask:
        """Read a step, whose settings precede the task's."""
        name = entry.get("name")
        place = self._folder / "steps" / str(name)
        if not isinstance(name, str) or Path(name).name != name or not place.is_dir():
            raise DatasetError(
                f"the task {self._folder} has no folder of the step {name!r:.80}; add steps/NAME"
            )
        own_agent, own_tests = self._table(entry, "agent"), self._table(entry, "verifier")
        tests = {**tests, **own_tests, "env": {**self._variables(tests), **self._variables(own_tests)}}
        if entry.get("healthcheck"):
            raise self._unsupported("a health check of a step")
        if tests.get("environment") is not None or tests.get("environment_mode") == "separate":
            raise self._unsupported("steps whose tests have a separate environment")
        step = self._read_part(name, place, {**agent, **own_agent}, tests)
        files = place / "workdir"
        least = self._min_rewards(entry.get("min_reward"))
        return replace(step, files=files if files.is_dir() else None, min_rewards=least)

    def _min_rewards(self, value: Any) -> dict[str, float]:
        """Return the smallest rewards of a step by name: a number stands for the reward that counts."""
        least = {} if value is None else value if isinstance(value, dict) else {PRIMARY: value}
        for reward in least.values():
            if isinstance(reward, bool) or not isinstance(reward, int | float):
                raise self._error(
                    f"min_reward of a step is {value!r:.80}; give a number, or a number for each name of a "
                    "reward"
                )
        return least

    def _read_part(self, name: str, place: Path, agent: JsonObject, tests: JsonObject) -> HarborTask:
        """Read a task of one step, or a step.

        Args:
            place: folder of the instruction and of tests that precede the task's.
        """
        folder, table = self._folder, self._table(self._settings, "environment")
        instruction = _read_text(place / "instruction.md")
        environment = self._environment(table, folder / "environment", agent)
        if environment.image is None and environment.folder is None:
            raise DatasetError(
                f"the task {folder} has neither environment/ nor [environment].docker_image; add one"
            )
        for phase, section in ((agent, "agent"), (tests, "verifier")):
            if phase.get("user") not in (None, "root", 0):
                raise self._unsupported(f"[{section}].user = {phase['user']!r}")
        if tests.get("collect"):
            raise self._unsupported("[[verifier.collect]]")
        tests_environment, bundled = self._tests_environment(tests, environment)
        if tests_environment is None and self._network(table, tests) != environment.network:
            raise self._unsupported("tests with another network than the agent's in one environment")
        folders = tuple(dict.fromkeys(path for path in (folder / "tests", place / "tests") if path.is_dir()))
        if not bundled and not any((path / "test.sh").is_file() for path in folders):
            raise DatasetError(
                f"the task {folder} has no tests/test.sh; write the script that judges the result"
            )
        return HarborTask(
            folder=folder,
            name=name,
            instruction=strip_canary(instruction),
            environment=environment,
            agent_timeout_s=self._seconds(agent, "timeout_sec", None),
            tests_timeout_s=self._seconds(tests, "timeout_sec", 600.0) or 600.0,
            tests_env=self._variables(tests),
            tests_environment=tests_environment,
            tests_folders=() if bundled else folders,
            artifacts=self._artifacts(),
            metadata=self._table(self._settings, "metadata"),
        )

    def _environment(self, table: JsonObject, files: Path, phase: JsonObject) -> TaskEnvironment:
        for key, thing in UNSUPPORTED_ENVIRONMENT.items():
            if table.get(key):
                raise self._unsupported(f"{thing} ([environment].{key})")
        if str(table.get("os", "linux")).lower() != "linux":
            raise self._unsupported(f"the operating system {table['os']!r}")
        if any((files / name).exists() for name in ("docker-compose.yaml", "docker-compose.yml")):
            raise self._unsupported("several containers (docker-compose.yaml)")
        image = table.get("docker_image")
        if image is not None and not isinstance(image, str):
            raise self._error(f"docker_image is {image!r:.80}; give the name of an image")
        return TaskEnvironment(
            image=image or None,
            folder=files if files.is_dir() else None,
            workdir=table.get("workdir"),
            env=self._variables(table),
            memory_mb=self._megabytes(table, "memory"),
            storage_mb=self._megabytes(table, "storage"),
            network=self._network(table, phase),
            build_timeout_s=self._seconds(table, "build_timeout_sec", 600.0) or 600.0,
        )

    def _tests_environment(
        self, tests: JsonObject, agents: TaskEnvironment
    ) -> tuple[TaskEnvironment | None, bool]:
        """Return the environment of tests that do not run in the agent's, and True if its image has them."""
        own = tests.get("environment")
        mode = tests.get("environment_mode") or ("separate" if own is not None else "shared")
        if mode not in ("shared", "separate") or (mode == "shared" and own is not None):
            raise self._error(
                f"environment_mode is {mode!r}; give shared or separate, and separate with "
                "[verifier.environment]"
            )
        if mode == "shared":
            return None, False
        table = self._table(self._settings, "environment") if own is None else own
        has_image = own is not None and bool(own.get("docker_image"))
        if has_image or (self._folder / "tests" / "Dockerfile").is_file():
            table = dict(table) if has_image else {**table, "docker_image": None}
            return self._environment(table, self._folder / "tests", tests), True
        environment = self._environment(table, self._folder / "environment", tests)
        return replace(environment, image=agents.image, folder=agents.folder), False

    def _network(self, table: Mapping[str, object], phase: Mapping[str, object]) -> bool:
        mode = phase.get("network_mode") or table.get("network_mode")
        if mode is None and table.get("allow_internet") is not None:
            mode = "public" if table["allow_internet"] else "no-network"
        if mode == "allowlist":
            raise self._unsupported('network_mode = "allowlist"')
        if mode not in (None, "public", "no-network"):
            raise self._error(f"network_mode is {mode!r}; give public or no-network")
        return mode != "no-network"

    def _artifacts(self) -> tuple[str, ...]:
        paths = []
        for entry in self._settings.get("artifacts", []):
            source = entry.get("source") if isinstance(entry, dict) else entry
            if not isinstance(source, str) or ".." in Path(source).parts:
                raise self._error(f"the artifact {entry!r:.80} is not a path without '..'")
            if isinstance(entry, dict) and entry.get("service") not in (None, "main"):
                raise self._unsupported("artifacts of another container")
            paths.append(source)
        return tuple(paths)

    def _megabytes(self, table: Mapping[str, object], name: str) -> int | None:
        value = table.get(f"{name}_mb")
        if value is None and (text := table.get(name)) is not None:  # the older form, such as "2G"
            match = SIZE.fullmatch(str(text).strip())
            if match is None:
                raise self._error(f"{name} is {text!r}; give a size such as 512M or 2G")
            value = float(match[1]) * MB_OF_UNIT[match[2].upper()]
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise self._error(f"{name}_mb is {value!r}; give megabytes above 0")
        return int(value)

    def _seconds(self, table: Mapping[str, object], key: str, default: float | None) -> float | None:
        value = table.get(key, default)
        if value is not None and (
            not isinstance(value, int | float) or isinstance(value, bool) or value <= 0
        ):
            raise self._error(f"{key} is {value!r}; give seconds above 0")
        return None if value is None else float(value)

    def _variables(self, table: Mapping[str, object]) -> dict[str, str]:
        env = table.get("env", {})
        if not isinstance(env, dict) or not all(isinstance(value, str) for value in env.values()):
            raise self._error(f"env is {env!r:.80}; give a table of texts")
        return env

    def _table(self, settings: Mapping[str, object], name: str) -> JsonObject:
        table = settings.get(name, {})
        if not isinstance(table, dict):
            raise self._error(f"[{name}] of task.toml is {table!r:.80}; make it a table")
        return table

    def _unsupported(self, thing: str) -> UnsupportedTaskError:
        return UnsupportedTaskError(
            f"the task {self._folder} needs {thing}, which raylight does not support; leave it out by "
            "HarborTasks(..., skip_unsupported=True)"
        )

    def _error(self, problem: str) -> DatasetError:
        return DatasetError(f"the task {self._folder}: {problem}")


def strip_canary(text: str) -> str:
    """Remove the canary lines at a text's beginning, and the empty lines after them."""
    lines = text.split("\n")
    start = 0
    while start < len(lines) and CANARY.fullmatch(lines[start].strip()):
        start += 1
    while start < len(lines) and not lines[start].strip():
        start += 1
    return "\n".join(lines[start:])


def resolve_variables(variables: Mapping[str, str], source: Mapping[str, str]) -> dict[str, str]:
    """Replace `${NAME}` and `${NAME:-default}` by values of `source`.

    Raises:
        DatasetError: a variable without a default is not set.
    """
    resolved = {}
    for name, value in variables.items():
        match = VARIABLE.fullmatch(value)
        if match is None:
            resolved[name] = value
        elif (found := source.get(match[1], match[2])) is not None:
            resolved[name] = found
        else:
            raise DatasetError(
                f"the task's variable {name} needs {match[1]}, which is not set; set it on every machine "
                "with runners"
            )
    return resolved


def _read_toml(path: Path) -> JsonObject:
    try:
        return tomllib.loads(_read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise DatasetError(f"{path} is not TOML: {error}") from None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DatasetError(
            f"the task {path.parent} has no {path.name}; add it, or leave the task out"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"{path} cannot be read: {error}") from None
