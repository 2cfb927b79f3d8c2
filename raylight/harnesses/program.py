"""Program of one rollout in its sandbox: its start, its span, and the errors of its end."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field

from raylight.agent.operations import operation
from raylight.errors import CommandError, CommandUnavailableError, SandboxError, SandboxUnavailableError
from raylight.harnesses.reward_command import NOT_FOUND, redact, span_output
from raylight.sandboxes.sandbox import Sandbox

MESSAGE_LINES, MESSAGE_LETTERS = 3, 400
TRACE_LINES, TRACE_LETTERS = 30, 4000
"""Limits of the part of the standard error that a failure's message and its trace show."""


@dataclass(frozen=True)
class CommandResult:
    """Output of a command that has ended, and its workspace."""

    stdout: str
    """The last 4 MiB of the standard output."""
    stderr: str
    """The last 64 KiB of the standard error."""
    status: int = 0
    """Exit status; other than 0 only with `scores_failures`."""
    timed_out: bool = False
    """True if the command was ended by `timeout_s`; only with `scores_failures`."""
    seconds: float = field(default=0.0, compare=False)
    workspace: str = ""
    """Working folder of the command, as programs in the sandbox see it."""
    sandbox: Sandbox | None = field(default=None, compare=False, repr=False)
    """Sandbox of the command. A reward may read files and run commands in it until it returns."""


@dataclass(frozen=True)
class HarnessProgram:
    """A program, ready to run.

    Attributes:
        env: variables; None removes one that the sandbox has.
        hidden: keys that no message and no span may show.
        install: command line that installs the program.
    """

    sandbox: Sandbox
    command: list[str]
    env: Mapping[str, str | None]
    cwd: str
    stdin: bytes
    hidden: tuple[str, ...] = ()
    install: str | None = None

    async def run(self, timeout_s: float | None) -> CommandResult:
        """Run the program to its end and record a span.

        Raises:
            CommandError: it cannot be started. SandboxUnavailableError: the sandbox failed.
        """
        removed = [part for name, value in self.env.items() if value is None for part in ("-u", name)]
        command = ["env", *removed, *self.command] if removed else self.command
        # OpenCode works in the folder that PWD names; the runner's own would be inherited
        env = {"PWD": self.cwd} | {name: value for name, value in self.env.items() if value is not None}
        with operation(name="command") as span:
            span.set_input(program=self.command[0], workspace=self.cwd)
            try:
                ended = await self.sandbox.exec(
                    command, env=env, cwd=self.cwd, stdin=self.stdin, timeout_s=timeout_s
                )
            except SandboxUnavailableError:
                raise
            except SandboxError as error:
                raise CommandError(
                    f"the agent's command {self.command[0]} cannot be started: {error}. {self._remedy()}"
                ) from None
            span.set_output(span_output(ended, self.hidden))
        return CommandResult(
            ended.stdout, ended.stderr, ended.status, ended.timed_out, ended.seconds, self.cwd, self.sandbox
        )

    def check(self, result: CommandResult) -> None:
        """Check that the program ended by itself, with status 0.

        Raises:
            CommandError: it did not. CommandUnavailableError: with the status of a failed service.
        """
        if result.timed_out:
            raise CommandError(
                f"the agent's command {self.command[0]} was ended after {result.seconds:.0f} s; raise "
                "CommandAgent(timeout_s=...), or score what it left with scores_failures=True"
            )
        if result.status == 0:
            return
        status, stderr = result.status, redact(result.stderr.strip(), self.hidden)
        reason = f"exit status {status}" if status >= 0 else f"signal {_signal_name(-status)}"
        lines = _last_lines(stderr, MESSAGE_LINES, MESSAGE_LETTERS)
        message = f"the agent's command {self.command[0]} ended with {reason}. " + (
            f"Its standard error ends: {lines}" if lines else "It wrote nothing to its standard error"
        )
        if status == NOT_FOUND:
            message += f". {self._remedy()}"
        error = CommandUnavailableError(message) if status == os.EX_TEMPFAIL else CommandError(message)
        if stderr:
            shown = _last_lines(stderr, TRACE_LINES, TRACE_LETTERS)
            error.add_note(f"standard error of {self.command[0]}:\n{shown}")
        raise error

    def _remedy(self) -> str:
        if self.install is not None:
            return f"Install it in the sandbox, or on every machine with runners: {self.install}"
        return "Correct CommandAgent(cwd=...), or give the full path of the program or a name in PATH"


def _last_lines(text: str, count: int, letters: int) -> str:
    return "\n".join(text.splitlines()[-count:])[-letters:]


def _signal_name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return str(number)
