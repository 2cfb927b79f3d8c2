"""Serve a model folder during a run, with `raylight serve` in a process that ends with its parent."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import raylight as rl
from raylight.cli import main
from raylight.errors import EngineStartError

START_TIMEOUT_S = 900.0
STOP_TIMEOUT_S = 60.0


@contextlib.contextmanager
def served(model: str, max_model_len: int, arguments: Sequence[str], log: Path) -> Iterator[rl.LLM]:
    """Serve a model and yield it as a resource with traced calls.

    Args:
        arguments: arguments of the engine, each `name=value`.
        log: file for the server's output.

    Raises:
        EngineStartError: the server did not start.
    """
    key, name = secrets.token_hex(16), "served"
    command = [
        sys.executable,
        __file__,
        "serve",
        "--model",
        model,
        "--name",
        name,
        "--max-model-len",
        str(max_model_len),
        *(part for argument in arguments for part in ("--set", f"engine.args.{argument}")),
    ]
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            env={**os.environ, "RAYLIGHT_API_KEY": key},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert process.stdout
        deadline = threading.Timer(START_TIMEOUT_S, process.kill)
        deadline.start()
        draining = threading.Thread(target=_copy, args=(process.stdout, file), daemon=True)
        try:
            endpoint = _endpoint(process.stdout, file)
            deadline.cancel()
            if endpoint is None:
                raise EngineStartError(f"{model} could not be served; see {log}: {_last_line(log)}")
            draining.start()
            yield rl.LLM(endpoint=endpoint, model=name, api_key=key, traced=True)
        finally:
            deadline.cancel()
            _stop(process)
            if draining.is_alive():
                draining.join(STOP_TIMEOUT_S)


def _stop(process: subprocess.Popen[str]) -> None:
    """Interrupt the server as Ctrl-C does; kill it if it does not end."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _copy(output: IO[str], log: IO[str]) -> None:
    for line in output:
        log.write(line)


def _endpoint(output: IO[str], log: IO[str]) -> str | None:
    """Return the URL that the server prints; None if it ends before that."""
    for line in output:
        log.write(line)
        log.flush()
        if found := re.search(r"is served at (\S+/v1)", line):
            return found[1]
    return None


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text().splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"


def _end_with_input() -> None:
    """Interrupt the server when the process that started it has ended."""
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    threading.Thread(target=_end_with_input, daemon=True).start()
    main()
