"""Answers of the server that the SDK hides, or never asks for."""

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from local_server import KEY, NAME

PROMPT = {"chunks": [{"tokens": [1, 2], "type": "encoded_text"}]}
PROTOBUF = {"content-type": "application/x-protobuf"}


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{url}/api/v1", headers={"x-api-key": KEY}, timeout=60) as client:
        yield client


@pytest.fixture
def session(http: httpx.Client) -> Iterator[str]:
    session_id = http.post("/create_session", json={"tags": [], "sdk_version": "0.38.0"}).json()["session_id"]
    yield session_id
    http.post(f"/sessions/{session_id}/finish", json={"reason": {"type": "success"}})


def create(http: httpx.Client, session: str, number: int, **changes: Any) -> httpx.Response:
    body = {"session_id": session, "model_seq_id": number, "base_model": NAME, "lora_config": {"rank": 2}}
    return http.post("/create_model", json=body | changes)


def result(http: httpx.Client, accepted: httpx.Response) -> Any:
    assert accepted.status_code == 200, accepted.text
    answer = http.post("/retrieve_future", json={"request_id": accepted.json()["request_id"]})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_repeated_request_is_done_once(http: httpx.Client, session: str) -> None:
    first, second = create(http, session, 0), create(http, session, 0)
    assert first.json() == second.json()
    model_id = result(http, first)["model_id"]
    save = {"model_id": model_id, "path": "once", "seq_id": 1}
    calls = [http.post("/save_weights", json=save) for _ in range(2)]
    assert [result(http, call)["path"] for call in calls] == [f"tinker://{model_id}/weights/once"] * 2
    again = http.post("/save_weights", json=save | {"seq_id": 2})
    assert "exists already" in result(http, again)["error"]
    over = http.post("/save_weights", json=save | {"seq_id": 3, "overwrite": True})
    assert "path" in result(http, over)


def test_models_beyond_the_limit_are_refused_until_a_session_ends(http: httpx.Client, session: str) -> None:
    for number in range(3):
        result(http, create(http, session, number))
    other = http.post("/create_session", json={}).json()["session_id"]
    refused = create(http, other, 0)
    assert (refused.status_code, refused.json()["category"]) == (429, "user")
    assert "--max-models" in refused.json()["error"]
    assert http.post(f"/sessions/{session}/finish", json={}).status_code == 204
    result(http, create(http, other, 0))
    gone = http.post("/get_info", json={"model_id": f"{session}:train:0"})
    assert gone.status_code == 404
    http.post(f"/sessions/{other}/finish", json={})


def test_the_oldest_weights_without_a_name_are_dropped(http: httpx.Client, session: str) -> None:
    model_id = result(http, create(http, session, 0))["model_id"]
    samplers = []
    for number in range(3):
        body = {"model_id": model_id, "seq_id": number + 1, "sampling_session_seq_id": number}
        answer = result(http, http.post("/save_weights_for_sampler", json=body))
        samplers.append(answer["sampling_session_id"])
    assert [http.get(f"/samplers/{name}").status_code for name in samplers] == [404, 200, 200]
    body = {"prompt": PROMPT, "sampling_params": {"max_tokens": 2}, "seq_id": 0}
    assert http.post("/asample", json=body | {"sampling_session_id": samplers[0]}).status_code == 404
    sampled = http.post("/asample", json=body | {"sampling_session_id": samplers[1]})
    answer = http.post("/retrieve_future", json={"request_id": sampled.json()["request_id"]})
    assert answer.headers["content-type"] == "application/x-protobuf"
    listed = http.get(f"/training_runs/{model_id}/checkpoints").json()["checkpoints"]
    assert len(listed) == 2
    http.post(f"/sessions/{session}/finish", json={})
    deadline = time.monotonic() + 60  # what the session had is freed after the answer
    while http.get(f"/samplers/{samplers[2]}").status_code != 404:
        assert time.monotonic() < deadline, "the weights of an ended session are still there"


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/retrieve_future", {"request_id": "none"}, 404, "there is no request 'none'"),
        ("/session_heartbeat", {"session_id": "none"}, 404, "there is no session 'none'"),
        ("/get_info", {"model_id": "none"}, 404, "there is no model 'none' in training"),
        ("/optim_step", {"model_id": "none", "adam_params": {}}, 404, "there is no model"),
        ("/optim_step", {"model_id": "x", "adam_params": {"beta1": 1}}, 422, "adam_params.beta1"),
        ("/optim_step", {"model_id": "x", "adam_params": {}, "unheard": 1}, 422, "unheard: Extra inputs"),
        ("/create_session", {"tags": 3}, 422, "tags: "),
        ("/asample", {"prompt": {"chunks": []}, "sampling_params": {}, "base_model": NAME}, 400, "0 tokens"),
        ("/asample", {"prompt": {"chunks": []}, "sampling_params": {}}, 400, "model_path: give it"),
        (
            "/asample",
            {"prompt": {"chunks": []}, "sampling_params": {}, "topk_prompt_logprobs": 3},
            422,
            "topk",
        ),
        (
            "/asample",
            {"prompt": PROMPT, "sampling_params": {}, "base_model": NAME, "record_stability_info": True},
            400,
            "--stable-reinforce",
        ),
        ("/load_weights", {"path": "tinker://a/weights/b", "optimizer": True}, 400, "model_id: give it"),
    ],
)
def test_what_is_wrong_is_named(
    http: httpx.Client, path: str, body: dict[str, Any], status: int, message: str
) -> None:
    answer = http.post(path, json=body)
    assert (answer.status_code, answer.json()["category"]) == (status, "user")
    assert message in answer.json()["error"]


def test_bodies_of_other_kinds_are_refused(http: httpx.Client, session: str) -> None:
    assert http.post("/forward_backward", json={}).status_code == 415
    broken = http.post("/forward_backward", content=b"\xff", headers=PROTOBUF)
    assert (broken.status_code, "ForwardBackwardRequest" in broken.text) == (400, True)
    rank = create(http, session, 0, lora_config={"rank": 17})
    assert (rank.status_code, "--max-rank" in rank.text) == (400, True)
    assert http.get("/healthz", headers={"x-api-key": "tml-other"}).status_code == 401
    assert http.get("/checkpoints?limit=x").status_code == 400
