"""A program in a container or on another machine, reached by a command of this machine such as `podman exec`.

The end of that command does not end the program, so the program's processes carry a mark in their environment
by which they are found and ended.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from raylight.sandboxes.local_program import TERMINATE_GRACE_S
from raylight.sandboxes.process import inherited_environment, run_here
from raylight.sandboxes.sandbox import ExecResult, SandboxProgram

MARK_VARIABLE = "RAYLIGHT_REMOTE_PROGRAM"
"""Variable of the mark. It differs from the mark of local programs, whose processes end with the command."""
PAUSE = "sleep 0.0$s; n=$((n+s)); [ $s -gt 7 ] || s=$((2*s))"
"""Pause in a shell's loop: 10 ms, then 20, 40 and 80. It begins with n=0 and s=1; n is the sum in 10 ms."""
END_MARKED = f"""
marked() {{ grep -ls "{MARK_VARIABLE}=$1" /proc/[0-9]*/environ; }}
send() {{ for f in $(marked "$2"); do p=${{f#/proc/}}; kill "$1" "${{p%/environ}}" 2>/dev/null; done; }}
send -TERM "$1"
n=0; s=1
while [ $n -lt {int(TERMINATE_GRACE_S * 100)} ] && [ -n "$(marked "$1")" ]; do {PAUSE}; done
send -KILL "$1"
"""
"""Shell script that ends all processes with the mark that is its argument: SIGTERM, after 3 s SIGKILL."""
READ_BY_TOOLS = re.compile(
    r"HOME|PATH|TMPDIR|(XDG|LD)_\w+|STORAGE_(DRIVER|OPTS)|CONTAINERS_\w*CONF\w*|"
    r"CONTAINER_(HOST|CONNECTION|SSHKEY)|DOCKER_(API_VERSION|HOST|CONFIG|CONTEXT|CERT_PATH|TLS\w*)"
)
"""Variables that podman and docker read themselves, such as the folder of the containers; no keys."""
END_S = 30.0
"""Time that ending a program may take."""


async def run_remote_program(
    wrap: Callable[[Sequence[str], Mapping[str, str]], list[str]],
    program: SandboxProgram,
    *,
    env_prefix: str = "",
    ends_children: bool = False,
) -> ExecResult:
    """Run a program by a command of this machine; it and what it started end at its limit or when cancelled.

    Args:
        wrap: returns the command of this machine for a program and its variables. Their values reach it by
            its environment, never by its arguments, which all users can read, but `READ_BY_TOOLS` without a
            prefix by these only.
        program: the program; its `cwd` is left to `wrap`.
        env_prefix: prefix of the names of its variables in the environment of the command of this machine.
        ends_children: end what the program left behind.

    Raises:
        SandboxError: the command of this machine cannot be started.
    """
    mark = secrets.token_hex(16)
    variables = {**program.env, MARK_VARIABLE: mark}

    async def run(command: Sequence[str], given: Mapping[str, str], **more: Any) -> ExecResult:
        variables = {
            f"{env_prefix}{name}": value
            for name, value in given.items()
            if env_prefix or READ_BY_TOOLS.fullmatch(name) is None
        }
        return await run_here(wrap(command, given), env=inherited_environment() | variables, **more)

    async def end() -> None:
        await run(["sh", "-c", END_MARKED, "sh", mark], {}, timeout_s=END_S)

    try:
        ended = await run(program.command, variables, stdin=program.stdin, timeout_s=program.timeout_s)
    except asyncio.CancelledError:
        await asyncio.shield(end())
        raise
    if ended.timed_out:
        await end()
        return replace(ended, status=-signal.SIGTERM)
    if ends_children:
        await end()
    return ended
