"""The design tasks and their reward: every task can earn the full reward, and only with correct numbers."""

import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx2
import pytest
from openai import AsyncOpenAI
from process_helpers import DEFINITIONS, look_up, serving, tool_call
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import raylight as rl
from examples.process_agent.design_reward import ANSWER, Grade, grade, read_answer
from examples.process_agent.design_tasks import load_tasks, make_tasks
from examples.process_agent.designer import MAX_CALLS, PROMPT, converse, design
from examples.process_agent.flowsheet_tools import Toolbox
from examples.process_agent.flowsheets.local import SimulatorUnavailableError, simulator

pytestmark = pytest.mark.framework("thermo")
TASKS = {task["id"]: task for split in ("train", "val", "test") for task in load_tasks(split)}  # type: ignore[arg-type]
EASY = "train-easy-flash"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with simulator() as found:
        yield found


@pytest.fixture
async def toolbox(url: str) -> AsyncIterator[Toolbox]:
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        yield Toolbox(client)


def graded(task: dict[str, Any], toolbox: Toolbox, answer: str) -> Grade:
    with rl.operation(name=ANSWER, kind=ANSWER) as op:
        op.set_output(answer)
    return grade(task, [*toolbox.spans, op.span()])


async def use(toolbox: Toolbox, name: str, **arguments: Any) -> Any:
    return json.loads(await toolbox.call(name, json.dumps(arguments)))


async def solved(toolbox: Toolbox, flowsheet: Any, asked: dict[str, str]) -> str:
    """Simulate a flowsheet, read all numbers, and return them as the answer."""
    run_id = (await use(toolbox, "run_simulation", flowsheet=flowsheet))["run_id"]
    results = await use(toolbox, "get_result", run_id=run_id)
    return json.dumps(
        {"run_id": run_id, "values": {name: look_up(results, path) for name, path in asked.items()}}
    )


def test_the_splits_have_the_documented_sizes() -> None:
    counts = Counter((task["split"], task["difficulty"]) for task in TASKS.values())
    assert {d: counts["train", d] for d in ("easy", "medium", "hard")} == {"easy": 3, "medium": 4, "hard": 3}
    assert (sum(n for (split, _), n in counts.items() if split == "val"), counts["test", "hard"]) == (5, 1)
    assert sum(counts.values()) == 18
    assert len(TASKS) == 18


def test_the_task_file_matches_the_references() -> None:
    """The simulator computed every target number."""
    made = {task["id"]: task for task in make_tasks()}
    assert made.keys() == TASKS.keys()
    for name, task in made.items():
        kept = TASKS[name]
        assert {key: task[key] for key in ("text", "package", "feeds", "budget")} == {
            key: kept[key] for key in ("text", "package", "feeds", "budget")
        }
        for part in ("specs", "asked"):
            assert kept[part] == pytest.approx(task[part], rel=1e-5, abs=1e-7)
        assert "<" not in task["text"]
        assert "reference" not in kept


@pytest.mark.parametrize("name", TASKS)
async def test_the_reference_earns_the_full_reward(name: str, toolbox: Toolbox) -> None:
    definition = DEFINITIONS[name]
    await use(toolbox, "get_schema")
    answer = await solved(toolbox, definition["reference"], definition["asked"])
    found = graded(TASKS[name], toolbox, f"Here it is:\n```json\n{answer}\n```")
    assert found == Grade(1.0, 1.0, 1.0, calls=3, failed=0)
    assert found.reward == pytest.approx(1.0)


async def test_words_earn_nothing(toolbox: Toolbox) -> None:
    task = TASKS[EASY]
    praise = (
        "converged completed success get_schema run_simulation get_result flash 265 K 15 bar optimal "
        "design, all specs met"
    )
    assert graded(task, toolbox, f"{praise} {task['text']}").reward == 0.0
    await use(toolbox, "get_schema")
    assert graded(task, toolbox, praise).reward == 0.0


async def test_numbers_that_were_not_read_complete_nothing(toolbox: Toolbox) -> None:
    task = TASKS[EASY]
    run = await use(toolbox, "run_simulation", flowsheet=DEFINITIONS[EASY]["reference"])
    values = json.dumps({"run_id": run["run_id"], "values": task["asked"]})
    found = graded(task, toolbox, values)
    assert (found.completion, found.efficiency, found.quality) == (0.0, 1.0, 1.0)
    await use(toolbox, "get_result", run_id=run["run_id"], paths=list(task["specs"])[:2])
    assert graded(task, toolbox, values).completion == pytest.approx(2 / 3)


async def test_another_feed_is_another_task(toolbox: Toolbox) -> None:
    task, definition = TASKS[EASY], DEFINITIONS[EASY]
    changed = json.loads(json.dumps(definition["reference"]))
    changed["feeds"]["feed"]["T_K"] += 5
    answer = await solved(toolbox, changed, definition["asked"])
    found = graded(task, toolbox, answer)
    assert (found.completion, found.efficiency) == (0.0, 0.0)


async def test_a_simulation_of_something_else_earns_nothing(toolbox: Toolbox) -> None:
    """The schema's example always converges, but solves no task."""
    example = (await use(toolbox, "get_schema"))["example"]
    answer = await solved(toolbox, example, {"gas_kmol_h": "streams.gas.flow_kmol_h"})
    assert graded(TASKS[EASY], toolbox, answer).reward == pytest.approx(0.0, abs=1e-6)


async def test_the_design_is_the_one_that_the_answer_names(toolbox: Toolbox) -> None:
    task, definition = TASKS[EASY], DEFINITIONS[EASY]
    answer = await solved(toolbox, definition["reference"], definition["asked"])
    other = json.loads(json.dumps(definition["reference"]))
    other["units"]["drum"]["T_K"] = 270
    worse = await solved(toolbox, other, definition["asked"])
    assert graded(task, toolbox, answer).completion == 1.0
    assert graded(task, toolbox, worse).completion == pytest.approx(1 / 3)
    unnamed = json.dumps({"values": json.loads(answer)["values"]})
    assert graded(task, toolbox, unnamed).completion == pytest.approx(1 / 3)  # the last that converged


async def test_calls_beyond_the_budget_cost_and_failed_ones_twice(toolbox: Toolbox) -> None:
    task, definition = TASKS[EASY], DEFINITIONS[EASY]
    answer = await solved(toolbox, definition["reference"], definition["asked"])
    assert task["budget"] == 4
    for name, arguments in (
        ("get_schema", {}),
        ("get_schema", {}),
        ("run_simulation", {"flowsheet": {}}),
        ("invent", {}),
    ):
        await use(toolbox, name, **arguments)
    found = graded(task, toolbox, answer)
    assert (found.calls, found.failed) == (6, 2)
    assert found.efficiency == pytest.approx(4 / 8)
    assert found.reward == pytest.approx(0.4 + 0.3 * 0.5 + 0.3)


@pytest.mark.parametrize(
    ("factor", "quality"), [(1.009, 1.0), (1.055, 0.5), (1.11, 0.0), (float("nan"), 0.0), (float("inf"), 0.0)]
)
async def test_quality_falls_with_the_error_of_the_answer(
    factor: float, quality: float, toolbox: Toolbox
) -> None:
    values = {name: value * factor for name, value in TASKS[EASY]["asked"].items()}
    assert graded(TASKS[EASY], toolbox, json.dumps({"values": values})).quality == pytest.approx(
        quality, abs=1e-6
    )


@pytest.mark.parametrize(
    "values", [None, [], "high", {"gas_kmol_h": "29.85", "methane_in_gas": True}, {"gas_kmol_h": 10**400}]
)
async def test_an_answer_of_another_shape_has_no_quality(values: Any, toolbox: Toolbox) -> None:
    assert graded(TASKS[EASY], toolbox, json.dumps({"run_id": 3, "values": values})).reward == 0.0


def test_the_last_object_of_a_message_is_the_answer() -> None:
    assert read_answer('first {"a": 1}, then {"b": {"c": 2}} }{') == {"b": {"c": 2}}
    assert read_answer("{nothing} here {") == {}


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("run_simulation", "{", "the arguments are not JSON"),
        ("run_simulation", "[]", "must be a JSON object"),
        ("run_simulation", "{}", "takes flowsheet"),
        ("get_result", "{}", "takes run_id"),
        ("run_simulation", '{"flowsheet": {"feeds": NaN, "units": "\\ud800"}}', "feeds"),
        ("get_result", '{"run_id": "../schema"}', "knows no"),
        ("get_result", '{"run_id": "a b\\u0000"}', "there is no simulation"),
        ("get_result", '{"run_id": "\\ud800"}', "takes run_id"),
        ("get_result", '{"run_id": "run-none"}', "there is no simulation 'run-none'"),
        ("get_result", f'{{"run_id": "{"x" * 100_000}"}}', "cannot be asked for"),
        ("get_result", f'{{"run_id": "x", "paths": ["{"x" * 100_000}"]}}', "cannot be asked for"),
        ("get_result", f'{{"run_id": "x", "paths": ["{"x" * 60_000}"]}}', "there is no simulation"),
        ("shell", "{}", "there is no tool 'shell'"),
    ],
)
async def test_the_model_receives_errors_of_bad_calls(
    name: str, arguments: str, says: str, toolbox: Toolbox
) -> None:
    assert says in json.loads(await toolbox.call(name, arguments))["error"]["message"]
    assert graded(TASKS[EASY], toolbox, "").failed == 1


async def test_a_flowsheet_written_as_text_is_read(toolbox: Toolbox) -> None:
    definition = DEFINITIONS[EASY]
    answer = await solved(toolbox, json.dumps(definition["reference"]), definition["asked"])
    assert graded(TASKS[EASY], toolbox, answer).reward == pytest.approx(1.0)


async def test_parallel_calls_stay_within_the_limit(toolbox: Toolbox) -> None:
    heard: list[Any] = []

    async def respond(request: Request) -> JSONResponse:
        body = await request.json()
        heard.append(body)
        calls = [tool_call("get_schema", {}, i)["tool_calls"][0] for i in range(MAX_CALLS + 5)]
        done = body["tool_choice"] == "none"
        message = {"role": "assistant", "content": "done" if done else None} | (
            {} if done else {"tool_calls": calls}
        )
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return JSONResponse(
            {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        )

    with serving(Route("/v1/chat/completions", respond, methods=["POST"])) as url:
        async with AsyncOpenAI(base_url=url, api_key="key") as client:
            answer = await converse(client, rl.LLM(endpoint=url, model="m"), [], toolbox)
    assert answer == "done"
    assert len(toolbox.spans) == MAX_CALLS
    assert (
        sum(
            "no_calls_left" in message["content"]
            for message in heard[1]["messages"]
            if message["role"] == "tool"
        )
        == 5
    )


async def test_an_unavailable_simulator_is_not_the_fault_of_the_model() -> None:
    async with httpx2.AsyncClient(base_url="http://127.0.0.1:9") as client:
        with pytest.raises(SimulatorUnavailableError, match="simulator at http://127"):
            await Toolbox(client).call("get_schema", "{}")


def test_the_prompt_keeps_its_placeholder_and_the_agent_declares_it() -> None:
    assert design.declared_resources["system_prompt"].placeholders() == {"max_calls"}
    assert "run_id" in rl.PromptTemplate(template=PROMPT).format(max_calls=3)
