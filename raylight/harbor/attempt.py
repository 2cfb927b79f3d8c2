"""One attempt at a Harbor task in a sandbox: its environment before the agent, its tests after it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import posixpath
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from raylight.errors import ConfigError, RewardError, SandboxError
from raylight.harbor.dockerfile import SANDBOX_PATH, BuildSteps, read_build_steps
from raylight.harbor.task_folder import PRIMARY, HarborTask, TaskEnvironment, resolve_variables
from raylight.sandboxes.file_bundle import FileBundle, pack
from raylight.sandboxes.sandbox import ExecResult, Sandbox

REWARDS = "/logs/verifier"
REWARD_FILES = ("reward.json", "reward.txt")
"""Files that may have the reward, in the order in which they are looked for."""
TESTS_HOME = "/logs/home"
"""Home folder of the tests in a sandbox without images."""
LOG_FOLDERS = (REWARDS, "/logs/agent", "/logs/artifacts")
_FINDS_FILES = re.compile(r"ENV|BASH_ENV|(LD_|PYTHON|PERL|RUBY|NODE_).*|.*(PATH|OPTIONS|OPTS|PRELOAD)")
_SWITCH = re.compile(r"PYTHON(UNBUFFERED|DONTWRITEBYTECODE|HASHSEED|FAULTHANDLER|UTF8|IOENCODING)|NODE_ENV")
_SYSTEM_FILE = r"/(usr|bin|sbin|lib|etc)(/[\w@%+~-][\w@%+~.-]*)*/?|/dev/null"
_ADDRESS = r"(https?|wss?|postgres(ql)?|mysql|rediss?|mongodb|amqps?)://(?!\S*:/)[^\s,;]+"
_ELSEWHERE = re.compile(rf"{_ADDRESS}|({_SYSTEM_FILE})(:({_SYSTEM_FILE}))*")
_ZONE = re.compile(r"\w+(/[\w+-]+)+")
PRINT_PATH = ["sh", "-c", 'printf %s "$PATH"']
SETUP = 'cd "$1" && "$(command -v bash || echo sh)" ./setup.sh'
"""Shell script that runs the setup of a step in the working directory, its argument."""
OUTPUT_LETTERS = 400
"""Length of the end of the tests' output that an error shows."""

RunSteps = Literal["error", "skip", "run"]
"""Handling of the RUN lines of a Dockerfile in a sandbox without images."""
TEST_FOLDERS = ("/tests", "/logs", "/solution")
"""Folders that the format puts at the root of the file system."""


def leads_to_files(name: str, value: str) -> bool:
    """Return True for a variable by which programs may find files of an agent to execute, such as PATH.

    A value with a slash does not if it is a time zone or an address in a network, or only names files of the
    system: an agent that can write these can change the programs of the tests in any case.
    """
    if _SWITCH.fullmatch(name) is None and _FINDS_FILES.fullmatch(name) is not None:
        return True
    is_zone = name == "TZ" and _ZONE.fullmatch(value) is not None
    return "/" in value and not is_zone and _ELSEWHERE.fullmatch(value) is None


class HarborAttempt:
    """One attempt at a task.

    Args:
        task: the task.
        run_steps: what a sandbox without images does with the RUN lines of a Dockerfile: "error", "skip" them
            because the machine has what they install, or "run" them in the sandbox.
    """

    def __init__(self, task: HarborTask, run_steps: RunSteps = "error") -> None:
        self.task = task
        self._run_steps = run_steps

    async def prepare(self, sandbox: Sandbox, environment: TaskEnvironment | None = None) -> str:
        """Make an environment of the task in a started sandbox.

        Args:
            environment: the environment; by default the agent's.

        Returns:
            its working directory.

        Raises:
            ConfigError: the environment is an image, and the sandbox has none.
            SandboxError: a step of the environment failed.
        """
        environment = environment or self.task.environment
        paths = self._paths(sandbox, environment)
        workdir = self._workdir(sandbox, environment, paths)
        await self._run(sandbox, ["mkdir", "-p", *map(paths.path, LOG_FOLDERS), workdir])
        if sandbox.HAS_IMAGE:
            return workdir
        if environment.image is not None:
            raise ConfigError(
                f"the task {self.task.name} starts from the image {environment.image}, and this sandbox has "
                "no images; use one that has, such as podman"
            )
        steps = self._steps(environment)
        for file, place in steps.copies:
            await copy_file(sandbox, file, place, paths)
        await self._run_commands(sandbox, steps, paths)
        return workdir

    async def begin(self, sandbox: Sandbox) -> str:
        """Begin a step in the task's environment: remove the tests of the step before, and add its files.

        Returns:
            the working directory of the agent.

        Raises:
            SandboxError: the step's setup.sh failed.
        """
        environment, files = self.task.environment, self.task.files
        paths = self._paths(sandbox, environment)
        workdir = self._workdir(sandbox, environment, paths)
        await self._remove_tests(sandbox, paths)
        if files is not None:
            inside = workdir.removeprefix(sandbox.root)
            await copy_folder(sandbox, files, inside, paths)
            if (files / "setup.sh").is_file():
                env = await self.image_variables(sandbox)
                await self._run(sandbox, ["sh", "-c", SETUP, "sh", workdir], env)
        return workdir

    def prompt(self, sandbox: Sandbox) -> str:
        """Return the instruction, with the paths of the sandbox."""
        return self._paths(sandbox, self.task.environment).text(self.task.instruction)

    def environment_variables(self) -> dict[str, str]:
        """Return the variables of the agent's environment.

        Raises:
            DatasetError: one stands for a variable of this machine that is not set.
        """
        return resolve_variables(self.task.environment.env, os.environ)

    async def image_variables(
        self, sandbox: Sandbox, environment: TaskEnvironment | None = None
    ) -> dict[str, str]:
        """Return the variables of the image that a sandbox does not have: with images none.

        Args:
            environment: environment of the sandbox; by default the agent's.
        """
        environment = environment or self.task.environment
        if sandbox.HAS_IMAGE:
            return {}
        paths = self._paths(sandbox, environment)
        return await self._in_sandbox(sandbox, self._steps(environment).env, paths)

    async def judge(self, sandbox: Sandbox, tests_sandbox: Sandbox | None = None) -> float | dict[str, float]:
        """Run the tests after the agent has ended, and return their reward.

        Args:
            sandbox: the agent's.
            tests_sandbox: a started one for the tests, if the task has a separate environment for them.

        Raises:
            RewardError: the tests took too long, or wrote no reward.
            SandboxError: the tests could not be started.
        """
        environment = self.task.tests_environment
        if tests_sandbox is None or environment is None:
            environment, place = self.task.environment, sandbox
        else:
            place = tests_sandbox
            await self.prepare(place, environment)
            await self._carry_artifacts(sandbox, place)
        paths = self._paths(place, environment)
        if self.task.tests_folders:
            await self._remove_tests(place, paths)
        for folder in self.task.tests_folders:
            await copy_folder(place, folder, "/tests", paths)
        variables = await self.image_variables(place, environment)
        if place is sandbox:
            variables = await self._without_agents_programs(place, variables)
        if not place.HAS_IMAGE:  # an agent may have left modules of Python in its own home
            await self._run(place, ["mkdir", "-p", paths.path(TESTS_HOME)])
            variables["HOME"] = paths.path(TESTS_HOME)
        variables |= resolve_variables({**environment.env, **self.task.tests_env}, os.environ)
        ended = await place.exec(
            [paths.path("/tests/test.sh")],
            env=variables,
            cwd=self._workdir(place, environment, paths),
            timeout_s=self.task.tests_timeout_s,
        )
        return await self._read_reward(place, paths, ended)

    async def _without_agents_programs(self, place: Sandbox, variables: dict[str, str]) -> dict[str, str]:
        """Return variables of the image by which tests find no program of the agent in place of a program of
        the sandbox: its PATH comes first, and no other variable leads to files."""
        kept = {name: value for name, value in variables.items() if not leads_to_files(name, value)}
        if "PATH" in variables:
            kept["PATH"] = f"{await self._run(place, PRINT_PATH)}:{variables['PATH']}"
        return kept

    async def _remove_tests(self, place: Sandbox, paths: PathMap) -> None:
        """Remove files that the agent may have left at the paths of the tests and their reward."""
        left = ("/tests", TESTS_HOME, *(f"{REWARDS}/{name}" for name in REWARD_FILES))
        await self._run(place, ["rm", "-rf", *map(paths.path, left)])

    async def _read_reward(
        self, place: Sandbox, paths: PathMap, ended: ExecResult
    ) -> float | dict[str, float]:
        if ended.timed_out:
            reason = f"were ended after {self.task.tests_timeout_s:g} s ([verifier].timeout_sec)"
        else:
            for name in REWARD_FILES:
                with contextlib.suppress(FileNotFoundError):
                    return read_reward(name, await place.read(paths.path(f"{REWARDS}/{name}")))
            reason = f"ended with status {ended.status} and wrote no {REWARDS}/reward.json or reward.txt"
        raise RewardError(
            f"the tests of the task {self.task.name} {reason}. Their output ends: {_end_of(ended) or 'empty'}"
        )

    async def _run_commands(self, sandbox: Sandbox, steps: BuildSteps, paths: PathMap) -> None:
        if steps.commands and self._run_steps == "error":
            raise ConfigError(
                f"the Dockerfile of the task {self.task.name} runs {steps.commands[0][1]!r:.80}, and this "
                'sandbox has no images; use one that has, such as podman, or say with run_steps="skip" that '
                'the machine has all of it, or with run_steps="run" that it is run in the sandbox'
            )
        if not steps.commands or self._run_steps == "skip":
            return
        env = await self._in_sandbox(sandbox, {**steps.args, **steps.env}, paths)
        for folder, command in steps.commands:
            ended = await sandbox.exec(
                ["/bin/sh", "-c", paths.text(command)],
                env=env,
                cwd=paths.path(folder),
                timeout_s=self.task.environment.build_timeout_s,
            )
            if ended.status != 0:
                raise SandboxError(
                    f"a step of the Dockerfile of the task {self.task.name} ended with status "
                    f"{ended.status}: {command!r:.80}. Its output ends: {_end_of(ended)}"
                )

    async def _carry_artifacts(self, source: Sandbox, target: Sandbox) -> None:
        """Copy only the artifacts from the agent's sandbox to the tests' sandbox."""
        bundle, root = FileBundle(), target.root or "/"
        for path in ("/logs/artifacts", *self.task.artifacts):
            inner = posixpath.normpath(path.lstrip("/"))
            if (await source.exec(["test", "-e", f"{source.root}/{inner}"])).status != 0:
                continue  # an agent that made no artifact is judged without it
            archive = await pack(source, source.root or "/", inner)
            await asyncio.to_thread(bundle.add_archive, archive, root, inner)
        await bundle.extract(target, "/")

    async def _in_sandbox(self, sandbox: Sandbox, env: dict[str, str], paths: PathMap) -> dict[str, str]:
        """Return variables of a Dockerfile with the paths of the sandbox, and its PATH."""
        variables = {name: paths.text(value) for name, value in env.items()}
        if any(SANDBOX_PATH in value for value in variables.values()):
            path = await self._run(sandbox, PRINT_PATH)
            variables = {name: value.replace(SANDBOX_PATH, path) for name, value in variables.items()}
        return variables

    async def _run(self, sandbox: Sandbox, command: list[str], env: dict[str, str] | None = None) -> str:
        """Run a program of the preparation; return its output.

        Raises:
            SandboxError: it failed.
        """
        timeout_s = self.task.environment.build_timeout_s
        ended = await sandbox.exec(command, env=env, cwd="/", timeout_s=timeout_s)
        if ended.status != 0:
            raise SandboxError(
                f"the sandbox of the task {self.task.name} cannot be prepared: {' '.join(command):.80} "
                f"ended with status {ended.status}: {_end_of(ended)}"
            )
        return ended.stdout

    def _steps(self, environment: TaskEnvironment) -> BuildSteps:
        dockerfile = environment.dockerfile
        return BuildSteps() if dockerfile is None else read_build_steps(dockerfile)

    def _workdir(self, sandbox: Sandbox, environment: TaskEnvironment, paths: PathMap) -> str:
        """Return the working directory in the sandbox."""
        if environment.workdir is None and sandbox.HAS_IMAGE:
            return sandbox.workspace
        return paths.path(environment.workdir or self._steps(environment).workdir)

    def _paths(self, sandbox: Sandbox, environment: TaskEnvironment) -> PathMap:
        steps = self._steps(environment)
        named = [environment.workdir or "/", steps.workdir, *(place for _, place in steps.copies)]
        return PathMap(sandbox.root, [*TEST_FOLDERS, *named, *self.task.artifacts])


def _end_of(ended: ExecResult) -> str:
    """Return the end of a program's output."""
    return (ended.stdout + ended.stderr).strip()[-OUTPUT_LETTERS:]


class PathMap:
    """Absolute paths of a task in a sandbox.

    A sandbox of plain processes shares the machine's file system, so `/tests` of a task is the folder `tests`
    of its workspace, and texts that name `/tests` have to name that one.

    Args:
        root: `Sandbox.root`.
        folders: absolute paths that the texts may name.
    """

    def __init__(self, root: str, folders: Iterable[str]) -> None:
        self._root = root.rstrip("/")
        tops = {posixpath.join("/", path.lstrip("/").split("/")[0]) for path in folders} - {"/"}
        names = "|".join(re.escape(top) for top in sorted(tops, reverse=True))
        # a path begins after a space, a quotation mark or an operator, and not within another path
        self._pattern = re.compile(rf"(?<![\w./~$}}-])({names})(?![\w.-])") if names else None

    def path(self, absolute: str) -> str:
        """Return the place of an absolute path."""
        return f"{self._root}{absolute}" if self._root else absolute

    def text(self, text: str) -> str:
        """Return a text with the sandbox's paths."""
        if not self._root or self._pattern is None:
            return text
        return self._pattern.sub(lambda match: self._root + match[1], text)

    def content(self, content: bytes) -> bytes:
        """Return the content of a file with the sandbox's paths; a binary one as it is."""
        try:
            return self.text(content.decode()).encode()
        except UnicodeDecodeError:
            return content


def files_in(folder: Path) -> list[Path]:
    """Return all files of a folder.

    Raises:
        SandboxError: a link leads out of the folder.
    """
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    for file in files:
        if not file.resolve().is_relative_to(folder.resolve()):
            raise SandboxError(f"{file} leads out of {folder}; replace the link by the file")
    return files


async def copy_folder(sandbox: Sandbox, folder: Path, target: str, paths: PathMap) -> None:
    """Copy a folder's files into a sandbox; those that can be executed stay so.

    Raises:
        SandboxError: a file cannot be read, or a link leads out of the folder.
    """
    for file in files_in(folder):
        place = posixpath.join(target, file.relative_to(folder).as_posix())
        await copy_file(sandbox, file, place, paths)


async def copy_file(sandbox: Sandbox, file: Path, place: str, paths: PathMap) -> None:
    try:
        content = await asyncio.to_thread(file.read_bytes)
    except OSError as error:
        raise SandboxError(f"a file of the task cannot be read: {error}") from None
    executable = os.access(file, os.X_OK) or file.suffix == ".sh"
    await sandbox.write(paths.path(place), paths.content(content), executable=executable)


def read_reward(name: str, content: bytes) -> float | dict[str, float]:
    """Return the number of a reward file, or in JSON the numbers by name with the primary one first.

    Raises:
        RewardError: it has another content, or a value that is not a finite number.
    """
    is_json = name.endswith(".json")
    try:
        value = json.loads(content) if is_json else float(content)
    except ValueError:
        raise RewardError(
            f"{name} of the tests is not {'JSON' if is_json else 'a number'}; it has {content[:80]!r}; "
            "write a number"
        ) from None
    if not isinstance(value, dict):
        return _number(value, name)
    if not value:
        raise RewardError(
            f'{name} of the tests is empty; write a number, or an object such as {{"reward": 1}}'
        )
    names = sorted(value, key=lambda key: key != PRIMARY)  # the order of the file otherwise
    return {key: _number(value[key], f"{key} in {name}") for key in names}


def mean_rewards(rewards: Sequence[float | dict[str, float]]) -> float | dict[str, float]:
    """Return the mean rewards of several steps, by name if one has names. A missing one counts as 0."""
    if not any(isinstance(reward, dict) for reward in rewards):
        return math.fsum(rewards) / len(rewards)  # type: ignore[arg-type]
    named = [reward if isinstance(reward, dict) else {PRIMARY: reward} for reward in rewards]
    names = sorted(dict.fromkeys(name for step in named for name in step), key=lambda name: name != PRIMARY)
    return {name: math.fsum(step.get(name, 0.0) for step in named) / len(named) for name in names}


def _number(value: object, place: str) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise RewardError(f"the reward of the tests, {place}, is {value!r:.80}; write a finite number")
    return float(value)
