"""Decorated functions: declared resources, parameters filled by type, rejected signatures, and pickling."""

import functools
import logging
import re
import subprocess
import sys
from typing import Any

import pytest
from ray import cloudpickle
from unit_helpers import make_rollout

from raylight.agent.decorators import FunctionalLitAgent, llm_rollout, prompt_rollout, rollout
from raylight.agent.litagent import LitAgent
from raylight.agent.prompts import PromptTemplate
from raylight.agent.resources import LLM, ProxyLLM
from raylight.errors import AgentSignatureError, ConfigError

ROLLOUT = make_rollout("ro-1", task="t")
POLICY, JUDGE = LLM(name="policy"), LLM(name="judge", endpoint="http://judge/v1")
TOKENIZER = LLM(name="policy", tokenizer_only=True)
PROMPT = PromptTemplate(template="{x}")


def ask(agent: LitAgent, resources: dict[str, Any]) -> Any:
    return agent.call("t", resources, ROLLOUT)


# declared resources


def test_declared_resources_come_with_the_agent() -> None:
    @rollout(model=POLICY, tokenizer=TOKENIZER, trained_agents="^main")
    def agent(task: str, model: LLM, tokenizer: LLM) -> str:
        return f"{task} {model.name} {tokenizer.tokenizer_only}"

    assert agent.declared_resources == {"model": POLICY, "tokenizer": TOKENIZER}
    assert agent.trained_agents == "^main"
    agent.check(set())
    assert ask(agent, agent.declared_resources) == "t policy True"
    agent.declared_resources.clear()
    assert len(agent.declared_resources) == 2


def test_bare_and_empty_brackets_are_the_same() -> None:
    for decorate in (rollout, rollout()):
        agent = decorate(lambda task, llm: llm.name)
        assert isinstance(agent, FunctionalLitAgent)
        assert agent.declared_resources == {}
        assert agent.trained_agents is None
        assert ask(agent, {"llm": POLICY}) == "policy"


@pytest.mark.parametrize("name", ["task", "rollout", "resources"])
def test_a_reserved_name_is_not_declared(name: str) -> None:
    with pytest.raises(AgentSignatureError, match=f"cannot declare a resource {name}"):
        rollout(**{name: POLICY})(lambda task: None)


def test_resources_may_have_the_names_of_the_decorators_own_words() -> None:
    agent = rollout(function=1, declared=2, settings=3)(
        lambda task, function, declared, settings: (function, declared, settings)
    )
    assert ask(agent, agent.declared_resources) == (1, 2, 3)


# by name, else by kind


def test_the_llm_is_found_by_name_then_by_kind() -> None:
    agent = rollout(lambda task, llm: llm)
    assert ask(agent, {"judge": JUDGE, "llm": POLICY}) is POLICY
    assert ask(agent, {"prompt": PROMPT, "tok": TOKENIZER, "judge": JUDGE, "policy": POLICY}) is JUDGE


def test_the_prompt_and_the_tokenizer_are_found_so_too() -> None:
    agent = rollout(lambda task, prompt_template, tokenizer: (prompt_template, tokenizer))
    assert ask(agent, {"main_llm": POLICY, "tok": TOKENIZER, "p": PROMPT}) == (PROMPT, TOKENIZER)
    other = PromptTemplate(template="other")
    named = {"prompt_template": other, "tokenizer": "mine"}
    assert ask(agent, {"p": PROMPT, "tok": TOKENIZER, **named}) == (other, "mine")


def test_a_default_gives_way_to_a_resource_of_the_kind() -> None:
    agent = rollout(lambda task, llm=None, prompt_template=None: (llm, prompt_template))
    assert ask(agent, {"policy": POLICY}) == (POLICY, None)


def test_what_nothing_fills_is_an_error_at_fit_time_and_when_called() -> None:
    agent = rollout(lambda task, llm: llm)
    with pytest.raises(AgentSignatureError, match=r"'llm'.*available: judge, resources, rollout, task"):
        agent.check({"judge"})  # by name alone, its kind is not known
    agent.check({"judge": JUDGE})
    for resources in ({"tok": TOKENIZER}, {"p": PROMPT}, {}):
        with pytest.raises(AgentSignatureError, match="needs 'llm'"):
            agent.check(resources)
        with pytest.raises(AgentSignatureError, match="needs 'llm'"):
            ask(agent, resources)


def test_a_declared_model_fills_llm() -> None:
    rollout(model=POLICY)(lambda task, llm: llm).check(set())


def test_a_choice_among_several_is_logged_at_fit_time(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "raylight"):
        rollout(lambda task, llm: llm).check({"a": POLICY, "b": JUDGE})
        assert re.search(r"'llm' of .* matches the resources 'a', 'b' and receives the first", caplog.text)
        caplog.clear()
        rollout(lambda task, llm: llm).check({"llm": POLICY, "b": JUDGE})
        assert caplog.text == ""


def test_what_an_algorithm_may_still_add_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    agent = rollout(lambda task, llm, table: table)
    agent.check({"llm": POLICY}, more_may_come=True)
    assert "needs 'table', but there is no such resource" in caplog.text
    assert "let the algorithm add it before it enqueues a rollout" in caplog.text
    with pytest.raises(AgentSignatureError, match="needs 'table'"):
        agent.check({"llm": POLICY})


def test_a_trained_and_a_fixed_model_in_one_rollout() -> None:
    @rollout
    def agent(task: str, llm: LLM, judge: LLM, resources: dict) -> list:
        return [llm.endpoint, judge.endpoint, sorted(resources)]

    resources = {"llm": LLM(endpoint="http://e/run", traced=True), "judge": JUDGE}
    scoped = {name: llm.for_attempt("ro-1", "at-1", "s") for name, llm in resources.items()}
    mine = "http://e/run/rollout/ro-1/attempt/at-1/v1"
    assert ask(agent, scoped) == [mine, "http://judge/v1", ["judge", "llm"]]


# llm_rollout and prompt_rollout


def test_llm_rollout_strips_the_proxy_unless_told_not_to() -> None:
    proxy = ProxyLLM(endpoint="http://p/v1", model="m")
    plain = ask(llm_rollout(lambda task, llm: llm), {"main": proxy})
    assert plain == LLM(endpoint="http://p/rollout/ro-1/attempt/at-1/v1", model="m")
    assert ask(llm_rollout(strip_proxy=False)(lambda task, llm: llm), {"main": proxy}) is proxy
    assert ask(rollout(lambda task, main: main), {"main": proxy}) == plain
    assert ask(llm_rollout()(lambda task, llm, rollout: (llm, rollout)), {"main": proxy}) == (plain, ROLLOUT)


def test_a_proxy_needs_an_attempt() -> None:
    queued = ROLLOUT.model_copy(update={"attempt": None})
    with pytest.raises(ConfigError, match="no attempt"):
        llm_rollout(lambda task, llm: llm).call("t", {"m": ProxyLLM()}, queued)


def test_prompt_rollout() -> None:
    for decorate in (prompt_rollout, prompt_rollout()):
        agent = decorate(lambda task, prompt_template: prompt_template.format(x=task))
        assert ask(agent, {"p": PROMPT}) == "t"


def test_they_want_their_parameter() -> None:
    with pytest.raises(AgentSignatureError, match=r"must take 'llm' .* it takes task, model"):
        llm_rollout(lambda task, model: None)
    with pytest.raises(AgentSignatureError, match="must take 'prompt_template'"):
        prompt_rollout(lambda task, llm: None)


# what is refused when it is decorated


class Service:
    def answer(self, task: str, llm: LLM) -> str:
        return task + llm.name

    async def answer_async(self, task: str, llm: LLM) -> str:
        return task + llm.name

    def __call__(self, task: str, llm: LLM) -> str:
        return self.answer(task, llm)


class AsyncService(Service):
    async def __call__(self, task: str, llm: LLM) -> str:  # type: ignore[override]
        return self.answer(task, llm)


def generator(task: str) -> Any:
    yield 1.0


async def async_generator(task: str) -> Any:
    yield 1.0


@pytest.mark.parametrize(
    ("thing", "message"),
    [
        (Service, "of type type"),
        (rollout(lambda task: 1), "of type FunctionalLitAgent"),
        (Service.answer, "is a method"),
        (generator, "yields"),
        (async_generator, "yields"),
        (functools.partial(generator), "yields"),
    ],
)
def test_what_is_no_rollout_function_is_refused(thing: Any, message: str) -> None:
    with pytest.raises(AgentSignatureError, match=message):
        rollout(thing)


def test_a_bad_pattern_is_refused() -> None:
    with pytest.raises(AgentSignatureError, match="is not a regular expression"):
        rollout(trained_agents="(")(lambda task: None)


# callables of all sorts


@pytest.mark.parametrize("thing", [Service().answer, Service(), functools.partial(Service().answer)])
def test_synchronous_callables(thing: Any) -> None:
    agent = cloudpickle.loads(cloudpickle.dumps(rollout(thing)))
    assert not agent.is_async_for("train")
    assert ask(agent, {"llm": POLICY}) == "tpolicy"


ASYNCHRONOUS = [Service().answer_async, AsyncService()]


@pytest.mark.parametrize("thing", [*ASYNCHRONOUS, *map(functools.partial, ASYNCHRONOUS)])
async def test_asynchronous_callables(thing: Any) -> None:
    agent = cloudpickle.loads(cloudpickle.dumps(rollout(thing)))
    assert agent.is_async_for("train")
    assert agent.is_async_for(None)
    assert await agent.call_async("t", {"llm": POLICY}, ROLLOUT) == "tpolicy"


def test_the_attributes_of_a_callable_do_not_overwrite_the_agents_own() -> None:
    class Odd:
        _function = _names = _name = _declared = None

        def __init__(self) -> None:
            self._function = self._names = self._declared = 3

        def __call__(self, task: str) -> str:
            return task

    assert ask(rollout(Odd()), {}) == "t"


async def test_the_wrong_way_of_calling_is_named() -> None:
    async def run(task: str) -> None: ...

    with pytest.raises(AgentSignatureError, match="run is asynchronous; await rollout_async"):
        rollout(run).rollout("t", {}, ROLLOUT)
    with pytest.raises(AgentSignatureError, match="not asynchronous; call rollout"):
        await rollout(lambda task: 1.0).rollout_async("t", {}, ROLLOUT)


def test_a_synchronous_function_that_gives_a_coroutine_is_found_out() -> None:
    async def run(task: str) -> float:
        return 1.0

    with pytest.raises(AgentSignatureError, match=r"<lambda> returns an awaitable; make it `async def`"):
        ask(rollout(lambda task: run(task)), {})


# travelling


def test_settings_travel_with_the_function() -> None:
    agent = rollout(model=POLICY, trained_agents="a")(lambda task, model: model)
    copy = cloudpickle.loads(cloudpickle.dumps(agent))
    assert copy.declared_resources == {"model": POLICY}
    assert copy.trained_agents == "a"
    proxy = ProxyLLM(endpoint="http://p")
    kept = cloudpickle.loads(cloudpickle.dumps(llm_rollout(strip_proxy=False)(lambda task, llm: llm)))
    assert ask(kept, {"llm": proxy}) is proxy


def test_a_function_of_the_main_script_travels_to_a_process_that_does_not_have_it(tmp_path: Any) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, cloudpickle, raylight as agl\n"
        "BONUS = 2\n"
        "@agl.rollout(model=agl.LLM(name='m'))\n"
        "def agent(task, model): return len(model.name) + task + BONUS\n"
        "sys.stdout.buffer.write(cloudpickle.dumps(agent))\n"
    )
    data = subprocess.run([sys.executable, str(script)], check=True, capture_output=True, cwd=tmp_path).stdout
    agent = cloudpickle.loads(data)
    assert agent.call(1, agent.declared_resources, ROLLOUT) == 4
