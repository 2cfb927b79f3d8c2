"""Program that runs tasks of a taskset of verifiers, many at once, and writes the rewards of their traces.

Rollouts are lines of JSON on its standard input, answers are lines on its standard output, and it ends with
its input. It runs with the Python of another environment, so it imports nothing but the standard library and
verifiers.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from typing import Any

SERVICE_ERRORS = ("ProviderError", "InterceptionError", "TunnelError")
"""Errors of a trace that report a service that failed; the rollout is run again."""
LONGEST_ERROR = 2000
"""Characters of an error that are written."""
LONGEST_LINE = 16 * 1024**2


class Program:
    """A taskset, and the rollouts that run on it.

    Args:
        settings: `taskset`, `config`, `harness` and `max_turns`.
        write: writes an answer.
    """

    def __init__(self, settings: dict[str, Any], write: Callable[[dict[str, Any]], None]) -> None:
        try:
            import verifiers.v1 as vf
        except ImportError as error:
            sys.exit(
                f"{sys.executable} has no verifiers 0.4 ({error}): pip install verifiers in its environment"
            )
        self._vf: Any = vf
        self._settings = settings
        self._write = write
        self._running: dict[int, asyncio.Task[None]] = {}
        name, self._harness = settings["taskset"], settings["harness"]
        self._tasks = vf.load_taskset(vf.taskset_config_type(name)(id=name, **settings["config"]))
        vf.harness_config_type(self._harness)

    async def serve(self, lines: asyncio.StreamReader) -> None:
        """Run the rollouts of the input until it ends, and cancel those that then run."""
        self._write({"ready": True})
        async for line in lines:
            request = json.loads(line)
            if "cancel" in request:
                if (found := self._running.get(request["cancel"])) is not None:
                    found.cancel()
            else:
                self._running[request["id"]] = asyncio.create_task(self._answer(request))
        for running in self._running.values():
            running.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _answer(self, request: dict[str, Any]) -> None:
        number = request["id"]
        key = f"RAYLIGHT_API_KEY_{number}"  # verifiers reads the key of a client from a variable
        if request["api_key"] is not None:
            os.environ[key] = request["api_key"]
        try:
            answer = await self._run(request, key if request["api_key"] is not None else "OPENAI_API_KEY")
        except Exception as error:  # of the taskset's code
            answer = {"error": f"{type(error).__name__}: {error}"[:LONGEST_ERROR], "service": False}
        finally:
            os.environ.pop(key, None)
            del self._running[number]
        self._write({"id": number, **answer})

    async def _run(self, request: dict[str, Any], key: str) -> dict[str, Any]:
        """Return the answer to a rollout: its reward, or the error of its trace."""
        task, vf, settings = request["task"], self._vf, self._settings
        if not isinstance(task, dict) or not isinstance(task.get("idx"), int):
            raise ValueError(
                f'the task {task!r:.80} is not {{"idx": NUMBER}}, the position of a task in the taskset'
            )
        found = next(iter(self._tasks.include(idx=[task["idx"]])), None)
        if found is None:
            raise ValueError(f"the taskset {settings['taskset']} has no task {task['idx']}")
        agent = vf.make_agent(
            vf.AgentConfig(
                harness=vf.harness_config_type(self._harness)(id=self._harness),
                runtime=vf.SubprocessConfig(),
                model=request["model"],
                client=vf.EvalClientConfig(base_url=request["base_url"], api_key_var=key),
                sampling=vf.SamplingConfig(**request["sampling"]),
                max_turns=settings["max_turns"],
            )
        )
        trace = await agent.run(found)
        if trace.ok:
            return {"reward": trace.reward}
        last = trace.errors[-1]
        message = f"{last.type}: {last.message}"
        return {"error": message[:LONGEST_ERROR], "service": last.type in SERVICE_ERRORS}


async def main() -> None:
    """Answer the lines of the standard input."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a taskset prints is not an answer
    sys.stdout = sys.stderr  # nor held back, in case the process dies

    def write(answer: dict[str, object]) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    program = Program(json.loads(os.environ["RAYLIGHT_VERIFIERS"]), write)
    lines = asyncio.StreamReader(LONGEST_LINE)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    await program.serve(lines)


if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())
    asyncio.run(main())
