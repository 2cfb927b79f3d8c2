"""Gateway over a scripted model that calls a harness's shell once with a command, and then ends the work."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

from engine_server import MODEL, SECRET, EngineServer
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from unit_helpers import make_context

import raylight as rl
from raylight.agent.resources import LLM
from raylight.engines.protocol import Engine
from raylight.engines.upstream import UpstreamEngine
from raylight.http.errors import ContextLengthError, error_response
from raylight.runner.execute import execute
from raylight.types import FinishedRollout, Span

TIMEOUT_S = 240
"""Limit of a rollout; importing a harness takes seconds on a busy machine."""
SHELLS = ("exec_command", "bash", "Bash", "run_shell_command", "exec")
"""Names of the tools with which harnesses run a command."""
SCRIPT = "text(await tools.exec_command({cmd: %s}))"
"""Command for the tool `exec` of Codex, which runs JavaScript."""
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


class HarnessServer(EngineServer):
    """Gateway whose model is called by harnesses.

    Attributes:
        requests: requests of the last rollout, as the model received them, if it records them.
    """

    def __init__(self, kind: str, model_path: str) -> None:
        self.requests: list[dict[str, Any]] = []
        super().__init__(kind, model_path)

    def roll_out(
        self, task: Any, agent: rl.CommandAgent, **limits: Any
    ) -> tuple[list[Span], FinishedRollout]:
        """Run one rollout as a runner does. Return the agent's own spans, and what the store recorded."""
        self.requests.clear()
        config = rl.RolloutConfig(timeout_seconds=TIMEOUT_S, **limits)
        rollout = self.call(self.store.start_rollout(task, mode="train", config=config))
        model = LLM(endpoint=f"http://127.0.0.1:{self.port}/v1", model=MODEL, traced=True)
        context = replace(make_context(agent), secret=SECRET)
        with context.tracer.attempt(rollout) as trace:
            outcome = asyncio.run(execute(context, rollout, {"llm": model}, trace))
        self.call(self.store.finish_attempt(rollout, outcome.status, failure=outcome.failure))
        (finished,) = self.call(self.store.collect([rollout.rollout_id], with_spans=True))
        assert outcome.status == "succeeded", outcome.failure
        return trace.spans, finished


class RepairServer(HarnessServer):
    """Gateway whose model answers by a script.

    Attributes:
        command: the shell command that the model runs.
        proxy: URL of a proxy that refuses connections.
        proxied: what it was asked to connect to.
        silence_s: seconds in which a stream is silent.
        silent_at: number of events before that.
        fits: returns False for messages that are longer than the model's context.
    """

    def __init__(self, command: str) -> None:
        self.command = command
        self.proxied: list[str] = []
        self.silence_s, self.silent_at = 0.0, 1
        self.fits: Callable[[list[dict[str, Any]]], bool] = lambda messages: True
        super().__init__("upstream", "")
        self.proxy = self.call(self._serve_proxy())

    async def _engine(self, path: str) -> Engine:
        app = Starlette(routes=[Route("/v1/chat/completions", self._answer, methods=["POST"])])
        return UpstreamEngine(f"http://127.0.0.1:{await self._serve(app)}/v1", "up-key", MODEL)

    async def _serve_proxy(self) -> str:
        async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.proxied.append((await reader.readline()).decode())
            writer.write(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n")
            writer.close()

        server = await asyncio.start_server(refuse, "127.0.0.1", 0)
        self._stack.callback(server.close)
        return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _answer(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append(body)
        if not self.fits(body["messages"]):
            return error_response(ContextLengthError(2048, 9000))
        message = self.message(body)
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        common = {"id": "chatcmpl-1", "created": 1, "model": body["model"]}
        usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
        if not body.get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": reason}
            completion = {**common, "object": "chat.completion", "choices": [choice], "usage": usage}
            return JSONResponse(completion)
        calls = [{**call, "index": i} for i, call in enumerate(message.get("tool_calls", []))]
        deltas = [{**message, **({"tool_calls": calls} if calls else {})}, {}]
        chunk = {**common, "object": "chat.completion.chunk"}
        lines = [
            {**chunk, "choices": [{"index": 0, "delta": delta, "finish_reason": end}]}
            for delta, end in zip(deltas, (None, reason), strict=True)
        ]
        lines.append({**chunk, "choices": [], "usage": usage})
        events = [f"data: {json.dumps(line)}\n\n" for line in lines]
        return StreamingResponse(self._send(*events, "data: [DONE]\n\n"), media_type="text/event-stream")

    async def _send(self, *events: str) -> AsyncIterator[str]:
        for index, event in enumerate(events):
            if index == self.silent_at:
                await asyncio.sleep(self.silence_s)
            yield event

    def message(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a request: the command, then the end of the work."""
        tools = [tool["function"] for tool in body.get("tools") or []]
        shell = next((tool for tool in tools if tool["name"] in SHELLS), None)
        ran = body["messages"][-1]["role"] == "tool"
        if shell is None:
            return {"role": "assistant", "content": "A title"}
        only_tool = len(tools) == 1  # mini-swe-agent ends by a command
        if ran and not only_tool:
            return {"role": "assistant", "content": "All done."}
        call = {
            "name": shell["name"],
            "arguments": json.dumps(self._arguments(shell, SUBMIT if ran else self.command)),
        }
        calls = [{"id": f"call_{len(self.requests)}", "type": "function", "function": call}]
        return {"role": "assistant", "content": "I run it.", "tool_calls": calls}

    def _arguments(self, tool: dict[str, Any], command: str) -> dict[str, Any]:
        known = {"cmd": command, "command": command, "input": SCRIPT % json.dumps(command)}
        fields = tool["parameters"]["properties"]
        chosen = {name: value for name, value in known.items() if name in fields}
        defaults = {"string": "Repair it", "boolean": False, "integer": 1, "number": 1}
        for name in tool["parameters"].get("required", ()):
            chosen.setdefault(name, defaults[fields[name]["type"]])
        return chosen
