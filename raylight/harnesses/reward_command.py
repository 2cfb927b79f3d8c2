"""Origins of a command's reward: its output, its exit status, a file, or another command after its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from raylight.agent.operations import operation
from raylight.errors import AgentSignatureError, RewardError
from raylight.harnesses.model_environment import home_environment
from raylight.sandboxes.file_bundle import ARCHIVE, FileBundle, FileSource, pack, resolve_files
from raylight.sandboxes.registry import SandboxPool, SandboxSpec
from raylight.sandboxes.sandbox import ExecResult, Sandbox
from raylight.types import JsonObject

MAX_REWARD_FILE = 64 * 1024
"""Largest size of a reward file in bytes."""
SPAN_LETTERS = 8000
"""Letters of an output that a span records: the last ones."""
REWARD_HOME = ".raylight-home"
"""Home folder of a reward command, in its sandbox's workspace."""
RewardSandbox = Literal["fresh", "agent"]
CANNOT_RUN, NOT_FOUND = 126, 127
"""Exit statuses with which shells and `env` report that a program cannot be started."""


@dataclass(frozen=True)
class RewardCommand:
    """Command that judges a workspace after the agent has ended, such as the tests of a repository.

    The agent's sandbox is stopped first. The command runs in a fresh one of the same kind, with a copy of the
    agent's working folder and an empty home folder, and without a way to the model. docs/sandboxes.md says
    which sandboxes an agent can leave, or change for those that follow.

    Raises:
        AgentSignatureError: the command, `reads` or `sandbox` has the wrong type.
    """

    command: Sequence[str]
    """Program and arguments."""
    files: FileSource | None = None
    """Files that enter the workspace only now and replace the agent's: a folder, a dict of paths and
    contents, or a function of the task that returns one."""
    reads: str = "exit_status"
    """Origin of the reward. "exit_status": 1.0 for status 0, else 0.0, as test runners report it. "stdout":
    the last line of the standard output. A path that ends in .json or .txt: that file."""
    timeout_s: float = 600.0
    """Seconds after which the command is ended. Then the reward is 0, because an agent can write code that
    never ends."""
    env: Mapping[str, str] | None = None
    """Further variables."""
    sandbox: RewardSandbox = "fresh"
    """Sandbox of the command. "fresh": one in which the agent has never been. "agent": the agent's,
    with all that it installed; such an agent can forge the reward. The command of an agent without a sandbox,
    or in a folder of the machine (`cwd`), runs there in any case."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "command", check_command(self.command, "RewardCommand"))
        if self.reads not in ("exit_status", "stdout") and not is_reward_file(self.reads):
            raise AgentSignatureError(
                f'RewardCommand: reads={self.reads!r:.80} is unknown; give "exit_status", "stdout" or the '
                "path of a .json or .txt file"
            )
        if self.sandbox not in get_args(RewardSandbox):
            raise AgentSignatureError(
                f'RewardCommand: sandbox={self.sandbox!r:.80} is unknown; give "fresh" or "agent"'
            )

    async def score(
        self, sandbox: Sandbox, workspace: str, task: object, spec: SandboxSpec | None = None
    ) -> Any:
        """Run the command and return the reward.

        Args:
            sandbox: the agent's, which is stopped unless the command runs in it.
            workspace: the agent's working folder.
            spec: description of a fresh sandbox. None: the command runs in the agent's.

        Raises:
            RewardError: the command cannot be run, or wrote no reward.
            CommandError: its files cannot be written, or the agent's cannot be read.
            SandboxError: the fresh sandbox cannot be started.
        """
        files = resolve_files(self.files, task)
        inner = posixpath.relpath(workspace, sandbox.workspace)
        is_inside = not inner.startswith("..")
        if spec is None or self.sandbox == "agent" or (sandbox.root and not is_inside):
            if files is not None:
                bundle = FileBundle()
                await asyncio.to_thread(bundle.add, files, "")
                await bundle.extract(sandbox, workspace)
            return await self._judge(sandbox, workspace, {})
        archive = await pack(sandbox, workspace)
        await sandbox.stop()
        async with SandboxPool().started(spec) as fresh:
            folder = posixpath.normpath(posixpath.join(fresh.workspace, inner)) if is_inside else workspace
            home = posixpath.join(fresh.workspace, REWARD_HOME)
            bundle = await asyncio.to_thread(self._collect, archive, files, folder, home)
            await bundle.extract(fresh, "/", replaces=folder)
            return await self._judge(fresh, folder, home_environment(home))

    def _collect(self, archive: bytes, files: Any, folder: str, home: str) -> FileBundle:
        """Return the files of a fresh sandbox: the agent's without a reward, and over them `files`."""
        bundle = FileBundle()
        bundle.add_folder(folder)
        bundle.add_archive(archive, folder)
        for path in (ARCHIVE, home, *([self.reads] if is_reward_file(self.reads) else [])):
            bundle.remove(posixpath.join(folder, path))
        bundle.add(files, folder)
        bundle.add_folder(home)
        return bundle

    async def _judge(self, sandbox: Sandbox, workspace: str, variables: Mapping[str, str]) -> object:
        """Run the command in a sandbox that has the files, and return the reward."""
        with operation(name="reward command") as span:
            span.set_input(command=list(self.command))
            ended = await sandbox.exec(
                self.command,
                env={"PWD": workspace, **variables, **(self.env or {})},
                cwd=workspace,
                timeout_s=self.timeout_s,
            )
            span.set_output(span_output(ended))
        if ended.timed_out:
            return 0.0
        if ended.status < 0 or ended.status in (CANNOT_RUN, NOT_FOUND):
            raise RewardError(
                f"the reward command {self.command[0]} ended with status {ended.status}: "
                f"{ended.stderr.strip()[-300:] or 'it wrote nothing to its standard error'}; correct "
                "CommandAgent(reward=...), and install the program in the sandbox"
            )
        if self.reads == "exit_status":
            return float(ended.status == 0)
        if self.reads == "stdout":
            return reward_in_output(self.command[0], ended.stdout)
        return await reward_in_file(sandbox, posixpath.normpath(posixpath.join(workspace, self.reads)))


def is_reward_file(value: object) -> bool:
    """Return True for the path of a reward file."""
    return isinstance(value, str) and value.endswith((".json", ".txt"))


async def reward_in_file(sandbox: Sandbox, path: str) -> object:
    """Return the reward in a file of a sandbox: JSON, or in a .txt one number.

    Raises:
        RewardError: the file is missing, too large or holds no reward.
    """
    ended = await sandbox.exec(["head", "-c", str(MAX_REWARD_FILE + 1), path])
    if ended.status != 0:
        raise RewardError(
            f"there is no reward file {path}: {ended.stderr.strip()[-300:]}; the agent or its "
            "tests must write it"
        )
    with contextlib.suppress(ValueError):
        reward = json.loads(ended.stdout) if path.endswith(".json") else float(ended.stdout)
        if isinstance(reward, bool | int | float | dict):
            return reward
    raise RewardError(
        f"the reward file {path} holds {ended.stdout[:200]!r}; write a number, or in a .json file an object "
        "of named rewards"
    )


def reward_in_output(program: str, stdout: str) -> object:
    """Return the reward in the last line of a standard output.

    Raises:
        RewardError: there is none.
    """
    last = stdout.rstrip().rpartition("\n")[2].strip()
    with contextlib.suppress(ValueError):
        reward = json.loads(last)
        if reward is None or isinstance(reward, bool | int | float | dict):
            return reward
    found = f"is {last!r:.200}" if last else "is missing, because it printed nothing"
    raise RewardError(
        f"the last line of the standard output of {program} {found}; print the reward there as a JSON "
        'number, an object of named rewards, or null. CommandAgent(reward="exit_status" or a function) reads '
        "it elsewhere"
    )


def check_command(command: object, owner: str) -> list[str]:
    """Return a command as a list of strings.

    Raises:
        AgentSignatureError: it is none.
    """
    if isinstance(command, str | bytes) or not isinstance(command, Sequence) or not command:
        raise AgentSignatureError(
            f"{owner}: the command is {command!r:.80}; give a list of the program and its arguments, "
            'such as ["node", "agent.mjs"]'
        )
    for part in command:
        if not isinstance(part, str | os.PathLike):
            raise AgentSignatureError(
                f"{owner}: {part!r:.80} in the command is of type {type(part).__name__}; give strings"
            )
    return [os.fspath(part) for part in command]


def span_output(ended: ExecResult, hidden: Sequence[str] = ()) -> JsonObject:
    """Return what a span records of an ended program: status, seconds, and the ends of its outputs.

    Args:
        hidden: keys, which are replaced by ***.
    """
    return {
        "exit_code": ended.status,
        "timed_out": ended.timed_out,
        "seconds": round(ended.seconds, 3),
        "stdout": redact(ended.stdout, hidden)[-SPAN_LETTERS:],
        "stderr": redact(ended.stderr, hidden)[-SPAN_LETTERS:],
    }


def redact(text: str, hidden: Sequence[str]) -> str:
    """Return a text with keys replaced by ***."""
    for key in hidden:
        text = text.replace(key, "***")
    return text
