"""Environment classes in TRL's form: the conversation, tools of every kind, rewards, and bad classes."""

import asyncio
import functools
import os
import pickle
import threading
from typing import Any, ClassVar

import cloudpickle
import pytest
from scripted_client import ScriptedClient, bad_request, tool_calls

import raylight as rl
from raylight.environments import live_environment
from raylight.errors import (
    AgentSignatureError,
    ConfigError,
    DatasetError,
    EnvironmentUnavailableError,
    RewardError,
    RewardTypeError,
    ToolTimeoutError,
)
from raylight.traces.context import AttemptTrace, tracing

DONE = {"content": "done"}


class Counter:
    """An environment as TRL's documentation writes it."""

    closed: ClassVar[list[Any]] = []

    def __init__(self) -> None:
        self.reward = 0.0
        self.threads = {threading.get_ident()}

    def reset(self, target: int = 3, **row: Any) -> str | None:
        self.row, self.target, self.count = row, target, 0
        return f"Count to {target}."

    def increment(self, step: int) -> int:
        """
        Increment the counter.

        Args:
            step: The number to add.

        Returns:
            The new count.
        """
        self.threads.add(threading.get_ident())
        self.count += step
        self.reward = float(self.count == self.target)
        return self.count

    async def peek(self) -> str:
        """Return the count later."""
        await asyncio.sleep(0)
        return f"it is {self.count}"

    def fail(self) -> str:
        """Fail."""
        raise KeyError("lost")

    def leave(self) -> None:
        """Leave the process."""
        raise SystemExit(3)

    def flood(self, size: int) -> str:
        """Return a long text.

        Args:
            size: Its length.
        """
        return "x" * size

    def parts(self) -> list[dict[str, str]]:
        """Return content parts."""
        return [{"type": "text", "text": "a part"}]

    def numbers(self) -> list[int]:
        """Return a list."""
        return [self.count]

    def away(self) -> str:
        """Lose the server."""
        raise EnvironmentUnavailableError("gone")

    def _hidden(self) -> None:
        pass

    def close(self) -> None:
        Counter.closed.append(self)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that sets the model's answers and returns its client."""

    def answers(*given: Any) -> ScriptedClient:
        client = ScriptedClient(*given)
        monkeypatch.setattr(rl.LLM, "client", lambda llm: client)
        return client

    Counter.closed = []
    return answers


LLM = rl.LLM(endpoint="http://model/v1", model="m", sampling_parameters={"max_tokens": 7})


async def run(factory: Any, row: Any = None, **options: Any) -> dict[str, float]:
    return await rl.environments.environment(factory, **options)({} if row is None else row, LLM)


async def result_of(model: Any, name: str, arguments: Any, **options: Any) -> Any:
    """Return what the model reads after one call of a tool."""
    client = model(tool_calls((name, arguments)), DONE)
    await run(Counter, **options)
    return client.requests[-1]["messages"][-1]["content"]


async def test_a_class_of_trl_runs_unchanged(model: Any) -> None:
    client = model(tool_calls(("increment", {"step": 2})), tool_calls(("increment", {"step": 1})), DONE)
    prompt = [{"role": "system", "content": "Play."}, {"role": "user", "content": "Go! "}]
    row = {"prompt": prompt, "target": 3, "other": 1}
    assert await run(Counter, row) == {"primary": 1.0}
    first, second, third = client.requests
    assert first["messages"] == [prompt[0], {"role": "user", "content": "Go! Count to 3."}]
    assert row["prompt"][1]["content"] == "Go! ", "the row stays as it is"
    assert second["messages"][2]["tool_calls"][0]["function"]["name"] == "increment"
    assert third["messages"][-1] == {"role": "tool", "tool_call_id": "c1", "content": "3"}
    names = [tool["function"]["name"] for tool in first["tools"]]
    assert names == ["away", "fail", "flood", "increment", "leave", "numbers", "parts", "peek"]
    increment = first["tools"][3]["function"]
    assert increment["description"] == "Increment the counter."
    assert increment["parameters"]["required"] == ["step"]
    assert set(increment) == {"name", "description", "parameters"}, "the form of OpenAI's API"
    assert (first["temperature"], first["max_tokens"], first["model"]) == (1.0, 7, "m")
    (instance,) = Counter.closed
    assert instance.row == {"prompt": prompt, "other": 1}
    assert len(instance.threads) == 1, "all synchronous code runs in one thread"
    assert threading.get_ident() not in instance.threads


@pytest.mark.parametrize(
    ("name", "arguments", "content"),
    [
        ("peek", {}, "it is 0"),
        ("peek", "", "it is 0"),
        ("numbers", {}, "[0]"),
        ("parts", {}, [{"type": "text", "text": "a part"}]),
        ("flood", {"size": 50}, "x" * 40 + "\n[cut: 50 characters, 40 shown]"),
    ],
)
async def test_the_model_reads_results_of_every_kind(
    name: str, arguments: Any, content: Any, model: Any
) -> None:
    assert await result_of(model, name, arguments, max_result=40) == content


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("fail", {}, "error: KeyError: 'lost'"),
        ("leave", {}, "error: RuntimeError: SystemExit(3) was raised in an environment"),
        ("increment", {"steps": 1}, "error: TypeError: Counter.increment() got an unexpected keyword"),
        ("increment", {"self": 1}, "error: TypeError"),
        ("increment", {}, "error: TypeError"),
        ("increment", '{"step": 1', "error: the arguments are not JSON"),
        ("increment", "[" * 100_000, "error: the arguments are not JSON"),
        ("increment", "[1]", "error: the arguments are not a JSON object"),
        ("reset", {}, "error: there is no tool 'reset'; the tools are: away, fail, flood, increment"),
        ("_hidden", {}, "error: there is no tool '_hidden'"),
        ("close", {}, "error: there is no tool 'close'"),
    ],
)
async def test_the_model_reads_its_mistakes_and_the_errors_of_tools(
    name: str, arguments: Any, error: str, model: Any
) -> None:
    assert (await result_of(model, name, arguments)).startswith(error)


async def test_a_tool_may_have_arguments_of_any_name(model: Any) -> None:
    class Names(Rewarded):
        def call(self, function: str, name: str) -> str:
            """Call a function.

            Args:
                function: its name.
                name: another name.
            """
            return function + name

    client = model(tool_calls(("call", {"function": "f", "name": "n"})), DONE)
    await run(Names)
    assert client.requests[-1]["messages"][-1]["content"] == "fn"


@pytest.mark.parametrize(
    ("kind", "content"), [("text", "caf? for a?"), ("parts", [{"type": "text", "text": "caf? for a?"}])]
)
async def test_halves_of_characters_are_replaced(kind: str, content: Any, model: Any) -> None:
    # a request that has one cannot be encoded
    class Files(Rewarded):
        def list(self, kind: str, folder: str) -> object:
            """List files.

            Args:
                kind: kind of result.
                folder: folder.
            """
            text = os.fsdecode(b"caf\xe9") + f" for {folder}"
            return text if kind == "text" else [{"type": "text", "text": text}]

    client = model(tool_calls(("list", f'{{"kind": "{kind}", "folder": "a\\ud83d"}}')), DONE)
    await run(Files)
    assert client.requests[-1]["messages"][-1]["content"] == content


async def test_a_result_is_read_before_the_next_call_changes_it(model: Any) -> None:
    class Board(Rewarded):
        cells: ClassVar[dict[str, int]] = {}

        def put(self, cell: str) -> dict[str, int]:
            """Occupy a cell.

            Args:
                cell: its name.
            """
            self.cells[cell] = 1
            return self.cells

    client = model(tool_calls(("put", {"cell": "a"}), ("put", {"cell": "b"})), DONE)
    await run(Board)
    contents = [message["content"] for message in client.requests[-1]["messages"][-2:]]
    assert contents == ["{'a': 1}", "{'a': 1, 'b': 1}"]


async def test_calls_of_one_message_run_in_order_and_asynchronous_ones_last(model: Any) -> None:
    calls = [("peek", {}), ("increment", {"step": 1}), ("increment", {"step": 1}), ("peek", {})]
    client = model(tool_calls(*calls), DONE)
    await run(Counter)
    contents = [message["content"] for message in client.requests[-1]["messages"][-4:]]
    assert contents == ["it is 2", "1", "2", "it is 2"]


async def test_a_call_that_is_no_function_call_is_answered(model: Any) -> None:
    custom = {"id": "c1", "type": "custom", "custom": {"name": "increment", "input": "1"}}
    client = model({"tool_calls": [custom]}, DONE)
    await run(Counter)
    assert client.requests[-1]["messages"][-1]["content"].startswith("error: a tool call of type 'custom'")


async def test_calls_of_the_last_turn_count_and_no_further_turn_follows(model: Any) -> None:
    call = tool_calls(("increment", {"step": 1}))
    client = model(call, call, call, call)
    assert await run(Counter, max_turns=3) == {"primary": 1.0}
    assert len(client.requests) == 3


async def test_a_model_that_never_calls_a_tool_gets_the_reward_of_the_start(model: Any) -> None:
    client = model(DONE)
    assert await run(Counter) == {"primary": 0.0}
    assert len(client.requests) == 1
    assert len(Counter.closed) == 1


async def test_a_conversation_longer_than_the_context_ends_with_the_reward_so_far(model: Any) -> None:
    overflow = bad_request("context_length_exceeded")
    model(tool_calls(("increment", {"step": 3})), overflow)
    assert await run(Counter) == {"primary": 1.0}
    model(overflow)
    with pytest.raises(type(overflow)):
        await run(Counter)
    model(tool_calls(("increment", {"step": 3})), bad_request("invalid_value"))
    with pytest.raises(type(overflow)):
        await run(Counter)
    assert len(Counter.closed) == 3


async def test_a_lost_server_of_a_tool_ends_the_attempt(model: Any) -> None:
    model(tool_calls(("away", {}), ("peek", {})))
    with pytest.raises(EnvironmentUnavailableError):
        await run(Counter)
    assert len(Counter.closed) == 1


async def test_tool_calls_are_recorded_as_spans(model: Any) -> None:
    model(tool_calls(("increment", {"step": 2}), ("fail", {})), DONE)
    trace = AttemptTrace("rollout", "attempt")
    with tracing(trace):
        await run(Counter)
    first, second = sorted(trace.spans, key=lambda span: span.status.status_code, reverse=True)
    assert first.attributes["agentlightning.operation.name"] == "increment"
    assert first.attributes["agentlightning.operation.input.arguments.step"] == 2
    assert first.attributes["agentlightning.operation.output"] == "2"
    assert second.status.status_code == "ERROR"


class Asynchronous:
    async def reset(self) -> None:
        self.open = True

    async def look(self) -> str:
        """Look around."""
        return "a wall"

    async def get_reward(self) -> float:
        return 0.25

    async def close(self) -> None:
        self.open = False


async def test_all_methods_may_be_asynchronous_and_tasks_need_no_prompt(model: Any) -> None:
    client = model(tool_calls(("look", {})), DONE)
    assert await run(Asynchronous) == {"primary": 0.25}
    assert client.requests[0]["messages"] == [{"role": "user", "content": ""}]


class Rewarded:
    """No tools: the model is called once."""

    result: Any = 1

    def reset(self, **row: Any) -> Any:
        return "Hello."

    def get_reward(self) -> Any:
        return self.result


async def test_a_class_without_tools_is_one_turn(model: Any) -> None:
    client = model(DONE)
    assert await run(Rewarded, {"prompt": "Say: "}) == {"primary": 1.0}
    (request,) = client.requests
    assert request["messages"] == [{"role": "user", "content": "Say: Hello."}]
    assert "tools" not in request


class MethodReward(Rewarded):
    get_reward = None

    async def reward(self) -> dict[str, float]:
        return {"score": 0.5, "speed": 2}


class PropertyReward(Rewarded):
    get_reward = None

    @property
    def reward(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("factory", "options", "rewards"),
    [
        (Rewarded, {}, {"primary": 1.0}),
        (MethodReward, {}, {"score": 0.5, "speed": 2.0}),
        (PropertyReward, {}, {"primary": 1.0}),
        (
            Rewarded,
            {"reward": lambda played, messages: played.result + len(messages)},
            {"primary": 3.0},
        ),
    ],
)
async def test_rewards_of_every_kind(factory: Any, options: Any, rewards: Any, model: Any) -> None:
    client = model(DONE)
    assert await run(factory, **options) == rewards
    assert "tools" not in client.requests[0]


@pytest.mark.parametrize(
    ("result", "error"),
    [(None, RewardTypeError), ("1.0", RewardTypeError), (float("nan"), RewardError), ({}, RewardError)],
)
async def test_a_result_that_is_no_reward_is_a_typed_error(
    result: Any, error: type[Exception], model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model(DONE)
    monkeypatch.setattr(Rewarded, "result", result)
    with pytest.raises(error, match="reward"):
        await run(Rewarded)


async def test_a_class_without_a_reward_is_a_typed_error(model: Any) -> None:
    class Unrewarded:
        def reset(self) -> None: ...

    model(DONE)
    with pytest.raises(AgentSignatureError, match=r"Unrewarded has no reward.*define get_reward"):
        await run(Unrewarded)


async def test_several_environments_by_name(model: Any) -> None:
    client = model(DONE, DONE)
    both = {"counter": Counter, "reward": Rewarded}
    assert await run(both, {"environment": "reward"}) == {"primary": 1.0}
    assert await run(both, {"environment": "counter", "target": 5}) == {"primary": 0.0}
    assert "tools" not in client.requests[0]
    assert client.requests[1]["messages"][0]["content"] == "Count to 5."
    with pytest.raises(DatasetError, match=r"'environment' of a task is 'chess'; .* has 'counter', 'reward'"):
        await run(both, {"environment": "chess"})


@pytest.mark.parametrize(
    ("row", "error"),
    [
        (3, "tasks are dicts"),
        ({1: 2}, "tasks are dicts"),
        ({"prompt": []}, "'prompt' of a task is"),
        ({"prompt": 3}, "'prompt' of a task is"),
        ({"prompt": ["text"]}, "'prompt' of a task is"),
    ],
)
async def test_a_bad_task_is_a_typed_error(row: Any, error: str, model: Any) -> None:
    model()
    with pytest.raises(DatasetError, match=error):
        await run(Counter, row)


async def test_a_reset_that_raises_or_returns_a_number_fails_the_rollout(model: Any) -> None:
    class Broken(Counter):
        def reset(self, number: int = 0) -> Any:
            if number:
                return number
            raise LookupError("no such level")

    model()
    with pytest.raises(LookupError, match="no such level"):
        await run(Broken)
    with pytest.raises(AgentSignatureError, match="reset returned 4 of type int"):
        await run(Broken, {"number": 4})
    assert len(Counter.closed) == 2


async def test_an_observation_of_parts_is_appended_to_the_prompt(model: Any) -> None:
    class Parts(Rewarded):
        def reset(self, **row: Any) -> Any:
            return [{"type": "text", "text": "b"}]

    client = model(DONE)
    await run(Parts, {"prompt": "a"})
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert client.requests[0]["messages"][0]["content"] == parts


class Blocking(Rewarded):
    begun, release = threading.Event(), threading.Event()

    def block(self) -> str:
        """Block."""
        self.begun.set()
        self.release.wait(60)
        return "late"

    async def sleep(self) -> str:
        """Sleep."""
        await asyncio.sleep(60)
        return "late"

    def timeout(self) -> str:
        """Raise what a tool's own limit raises."""
        raise TimeoutError("its own")

    def close(self) -> None:
        if self.release.is_set():
            raise OSError("cannot close")


async def test_a_blocked_tool_ends_the_attempt_and_a_sleeping_one_is_cancelled(model: Any) -> None:
    Blocking.begun.clear()
    Blocking.release.clear()
    model(tool_calls(("block", {})))
    with pytest.raises(ToolTimeoutError, match=r"Blocking\.block did not return within 0\.05 s"):
        await run(Blocking, tool_timeout_s=0.05)
    client = model(tool_calls(("sleep", {}), ("timeout", {})), DONE)
    assert await run(Blocking, tool_timeout_s=0.05) == {"primary": 1.0}
    contents = [message["content"] for message in client.requests[-1]["messages"][-2:]]
    assert contents == ["error: the tool did not finish within 0.05 s", "error: TimeoutError: its own"]
    Blocking.release.set()


async def test_other_rollouts_go_on_while_a_tool_blocks(model: Any) -> None:
    Blocking.begun.clear()
    Blocking.release.clear()
    model(tool_calls(("block", {})), DONE, DONE)
    blocked = asyncio.create_task(run(Blocking))
    await asyncio.to_thread(Blocking.begun.wait, 30)
    assert await run(Rewarded) == {"primary": 1.0}
    Blocking.release.set()
    assert await blocked == {"primary": 1.0}


async def test_a_cancelled_rollout_ends_while_its_tool_blocks(model: Any) -> None:
    Blocking.begun.clear()
    Blocking.release.clear()
    model(tool_calls(("block", {})))
    task = asyncio.create_task(run(Blocking))
    await asyncio.to_thread(Blocking.begun.wait, 30)
    task.cancel()
    async with asyncio.timeout(30):
        with pytest.raises(asyncio.CancelledError):
            await task
    Blocking.release.set()


async def test_a_close_that_raises_is_logged(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    Blocking.release.set()
    model(DONE)
    assert await run(Blocking) == {"primary": 1.0}
    assert "Blocking.close failed: OSError: cannot close" in caplog.text
    assert live_environment.CLOSE_S < 60


async def test_no_thread_is_left(model: Any) -> None:
    model(tool_calls(("increment", {"step": 1})), DONE)
    before = {thread for thread in threading.enumerate() if thread.name == "environment"}
    await run(Counter)
    for thread in threading.enumerate():
        if thread.name == "environment" and thread not in before:
            thread.join(10)
            assert not thread.is_alive()


class NoDocstring(Rewarded):
    def move(self, direction: str) -> str:
        return direction


class NoHint(Rewarded):
    def move(self, direction) -> str:  # type: ignore[no-untyped-def]
        """Move.

        Args:
            direction: left or right.
        """
        return direction


class NoDescription(Rewarded):
    def move(self, direction: str) -> str:
        """Move."""
        return direction


class NoReset:
    reward = 1.0


class NeedsArgument(Rewarded):
    def __init__(self, level: int) -> None:
        self.level = level


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (NoDocstring, r"tool NoDocstring\.move cannot be described.*no docstring"),
        (NoHint, r"tool NoHint\.move cannot be described.*type hint"),
        (NoDescription, r"tool NoDescription\.move cannot be described.*no description"),
        (NoReset, "NoReset has no method reset"),
        (lambda: NoReset(), "NoReset has no method reset"),
        (NeedsArgument, "NeedsArgument without arguments.*missing a required argument: 'level'"),
        (Rewarded(), "takes a class or a function"),
        ({}, "empty dict"),
        ({"a": Rewarded, "b": NoReset}, "NoReset has no method reset"),
    ],
)
def test_a_class_that_cannot_be_used_is_rejected_before_the_run(factory: Any, message: str) -> None:
    with pytest.raises(AgentSignatureError, match=message):
        rl.environments.environment(factory)


@pytest.mark.parametrize(
    "options",
    [
        {"max_turns": 0},
        {"max_turns": 1.5},
        {"max_turns": True},
        {"tool_timeout_s": 0},
        {"tool_timeout_s": "1"},
        {"max_result": -1},
        {"sampling": {"temperature": -1}},
    ],
)
def test_settings_out_of_range_are_rejected(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        rl.environments.environment(Counter, **options)


async def test_factories_and_pickled_agents(model: Any) -> None:
    model(DONE, DONE)
    assert await run(functools.partial(NeedsArgument, 3)) == {"primary": 1.0}
    agent = pickle.loads(cloudpickle.dumps(rl.environments.environment(Counter, trained_agents="x")))
    assert agent.trained_agents == "x"
    assert agent.display_name == "rollout function environment(Counter)"
    agent.check({"llm": LLM}, ["train", "val"])
    assert await agent({"target": 0}, LLM) == {"primary": 0.0}
