"""Models as resources: names, the URLs of attempts and agents, and the routing of a proxy."""

import pickle
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit_helpers import make_rollout

from raylight.agent.attempt_keys import attempt_key
from raylight.agent.resources import LLM, ProxyLLM
from raylight.errors import ConfigError

TRACED = LLM(endpoint="http://e:8000/run", model="policy", traced=True)
TOKENIZER = LLM(name="m", tokenizer_only=True, sampling_parameters={"top_p": 0.5})
ROUTE = "http://e:8000/run/rollout/ro-1/attempt/at-1"


def test_name_is_another_word_for_model() -> None:
    assert LLM(name="x") == LLM(model="x") == LLM(name="x", model="x")
    assert LLM(name="x").name == LLM(model="x").model == "x"
    assert LLM(name="x").model_copy(update={"model": "y"}).name == "y"
    with pytest.raises(ConfigError, match="model and name mean the same; give one of them"):
        LLM(name="x", model="y")


def test_kinds_are_told_apart_by_agent_lightnings_words() -> None:
    assert (LLM().resource_type, ProxyLLM().resource_type) == ("llm", "proxy_llm")
    with pytest.raises(ConfigError):
        LLM(resource_type="proxy_llm")


@pytest.mark.parametrize("llm", [TOKENIZER, ProxyLLM(endpoint="http://p/v1")])
def test_a_model_travels(llm: LLM) -> None:
    assert pickle.loads(pickle.dumps(llm)) == llm
    assert type(llm).model_validate_json(llm.model_dump_json()) == llm


def test_a_key_is_not_shown() -> None:
    assert "secret" not in repr(LLM(api_key="secret")) + str(LLM(api_key="secret"))
    assert LLM(api_key=None).api_key is None


def test_base_url_takes_ids_of_any_model() -> None:
    llm = LLM(endpoint="http://judge/v1")
    for ids in ((), ("ro-1", "at-1"), (None, None)):
        assert llm.get_base_url(*ids) == "http://judge/v1"
    assert llm.for_attempt("ro-1", "at-1", "secret") is llm
    assert llm.with_attempted_rollout(make_rollout()) is llm


def test_an_attempt_replaces_another_ones_address() -> None:
    first = TRACED.for_attempt("ro-0", "at-0", "s")
    second = first.for_attempt("ro-1", "at-1", "s")
    assert second == TRACED.for_attempt("ro-1", "at-1", "s")
    assert (second.endpoint, second.model) == (f"{ROUTE}/v1", "policy")
    assert second.api_key == attempt_key("s", "ro-1", "at-1")
    assert (TRACED.endpoint, TRACED.api_key) == ("http://e:8000/run", "unused")


@pytest.mark.parametrize(
    "endpoint", ["http://e:8000/run", "http://e:8000/run/", "http://e:8000/run/v1", "http://e:8000/run/v1/"]
)
def test_the_version_stands_once_and_last(endpoint: str) -> None:
    llm = LLM(endpoint=endpoint, traced=True)
    assert llm.for_attempt("ro-1", "at-1", "s").endpoint == f"{ROUTE}/v1"


# agents


def test_an_agent_is_named_in_the_address_before_or_after_the_attempt_is_known() -> None:
    before = TRACED.for_agent("planner").for_attempt("ro-1", "at-1", "s")
    after = TRACED.for_attempt("ro-1", "at-1", "s").for_agent("planner")
    assert before == after
    assert after.get_base_url() == f"{ROUTE}/agent/planner/v1"
    assert after.api_key == attempt_key("s", "ro-1", "at-1")
    assert TRACED.agent_id is None


def test_the_last_agent_counts() -> None:
    scoped = TRACED.for_attempt("ro-1", "at-1", "s")
    assert scoped.for_agent("a").for_agent("b").endpoint == f"{ROUTE}/agent/b/v1"
    before = TRACED.for_agent("a").for_agent("b")
    assert before.for_attempt("ro-1", "at-1", "s").endpoint == f"{ROUTE}/agent/b/v1"


def test_a_fixed_model_is_the_same_for_every_agent() -> None:
    llm = LLM(endpoint="http://judge/v1")
    assert llm.for_agent("planner") is llm


@pytest.mark.parametrize("agent_id", ["", ".", "..", "half \ud800"])
def test_an_agent_has_a_name_that_a_url_can_hold(agent_id: str) -> None:
    with pytest.raises(ConfigError, match="cannot be part of a URL"):
        TRACED.for_agent(agent_id)


@given(st.text(min_size=1, max_size=20).filter(lambda text: text not in (".", "..")))
def test_any_agent_id_is_one_segment_of_the_address(agent_id: str) -> None:
    url = TRACED.for_attempt("ro-1", "at-1", "s").for_agent(agent_id).endpoint
    inner = url.removeprefix(f"{ROUTE}/agent/").removesuffix("/v1")
    assert "/" not in inner
    assert unquote(inner) == agent_id
    assert LLM(endpoint=url, traced=True).for_agent("other").endpoint == f"{ROUTE}/agent/other/v1"


# proxies


def test_a_proxy_puts_the_attempt_before_the_version() -> None:
    proxy = ProxyLLM(endpoint="http://p:1/v1", model="m", api_key="k", sampling_parameters={"temperature": 0})
    url = "http://p:1/rollout/ro-1/attempt/at-1/v1"
    assert proxy.get_base_url("ro-1", "at-1") == url
    plain = proxy.with_attempted_rollout(make_rollout("ro-1"))
    assert plain == LLM(endpoint=url, model="m", api_key="k", sampling_parameters={"temperature": 0})
    assert type(plain) is LLM
    assert proxy.endpoint == "http://p:1/v1"


def test_a_proxy_without_version_gets_none() -> None:
    assert ProxyLLM(endpoint="http://p:1/").get_base_url("r", "a") == "http://p:1/rollout/r/attempt/a"


def test_a_proxy_of_the_attempt_stays_so_whatever_is_asked_of_it() -> None:
    proxy = ProxyLLM(endpoint="http://p:1/v1", api_key="k").for_attempt("ro-1", "at-1", "s")
    assert proxy.endpoint == proxy.get_base_url() == proxy.get_base_url("ro-1", "at-1")
    assert proxy.with_attempted_rollout(make_rollout("ro-1")).endpoint == proxy.endpoint
    assert proxy.api_key == "k"
    assert proxy.for_agent("a b").endpoint == "http://p:1/rollout/ro-1/attempt/at-1/agent/a%20b/v1"


def test_a_traced_proxy_gets_the_attempts_key() -> None:
    proxy = ProxyLLM(endpoint="http://p:1", traced=True).for_attempt("ro-1", "at-1", "s")
    assert proxy.endpoint == "http://p:1/rollout/ro-1/attempt/at-1/v1"
    assert proxy.api_key == attempt_key("s", "ro-1", "at-1")


def test_a_proxy_refuses_half_an_address() -> None:
    for rollout_id, attempt_id in (("ro-1", None), (None, "at-1"), (1, "at-1"), ("ro-1", 2)):
        with pytest.raises(ConfigError, match="must be strings or all be empty") as caught:
            ProxyLLM(endpoint="http://p").get_base_url(rollout_id, attempt_id)  # type: ignore[arg-type]
        assert isinstance(caught.value, ValueError)
    with pytest.raises(ConfigError, match="ro-1 has no attempt"):
        ProxyLLM().with_attempted_rollout(make_rollout("ro-1").model_copy(update={"attempt": None}))
