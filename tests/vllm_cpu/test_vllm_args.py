"""All arguments pass through to vLLM, and mistakes are reported before the start."""

import dataclasses
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from image_helpers import make_image
from tiny_models import build_qwen3_5
from tiny_vlms import build_vlm

from raylight.config import EngineConfig
from raylight.engines.families import FAMILIES
from raylight.engines.vllm import args
from raylight.engines.vllm.args import LORA_RANKS, known_args, model_style, vllm_args
from raylight.engines.vllm.placement import environment, place
from raylight.errors import ConfigError
from raylight.http.errors import RequestError
from raylight.tinker.serve import TinkerConfig, with_adapters
from raylight.trainer.spec.inputs import fixed_model


def build_args(path: str, args: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    defaults = {
        "dtype": "float32",
        "max_model_len": 512,
        "max_concurrent": 8,
        "max_waiting": 4,
        "seed": 5,
        "gpus": 0,
        "max_adapters": 0,
    }
    return vllm_args(path, args or {}, **defaults | settings)


def test_arguments_of_the_engine_and_of_its_frontend_pass_through(model_path: str) -> None:
    given = {
        "gpu_memory_utilization": 0.5,
        "enable_prefix_caching": False,
        "enable_prompt_tokens_details": True,
        "enforce_eager": False,
    }
    found = build_args(model_path, given)
    assert given.items() <= found.items()
    assert found["logprobs_mode"] == "processed_logprobs"
    assert (found["max_num_seqs"], found["max_num_queued_reqs"], found["seed"]) == (8, 12, 5)


def test_the_vision_part_is_left_out_where_only_the_text_is_trained(model_path: str, tmp_path: Path) -> None:
    assert build_args(build_qwen3_5(tmp_path))["language_model_only"] is True
    assert "language_model_only" not in build_args(model_path)


def test_gemma_3_with_images_needs_a_gpu(tmp_path: Path) -> None:
    path = build_vlm("gemma3", tmp_path)
    with pytest.raises(ConfigError, match=r"Gemma 3 with images .* engine={'kind': 'transformers'}"):
        build_args(path)
    (tmp_path / "preprocessor_config.json").unlink()
    build_args(path)  # reads text alone


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"max_lora_rnak": 8}, "no argument 'max_lora_rnak'; it has: max_lora_rank"),
        ({"xyzzy": 1}, "no argument 'xyzzy'$"),
        ({"max_model_len": 8}, "must be set as EngineConfig.max_model_len"),
        ({"api_key": ["k"]}, "vLLM's HTTP server"),
        ({"logprobs_mode": "raw_logprobs"}, "logprobs_mode must be 'processed_logprobs', not 'raw_logprobs'"),
        ({"worker_extension_cls": "a.B"}, "worker_extension_cls must be"),
    ],
)
def test_a_mistake_is_an_error(model_path: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_args(model_path, args)


def test_arguments_derived_from_the_model_and_the_settings(model_path: str) -> None:
    assert build_args(model_path, max_model_len=10**6)["max_model_len"] == 1024, "the model's own limit"
    assert build_args(model_path)["enforce_eager"]
    assert "enforce_eager" not in build_args(model_path, gpus=1)
    assert "enable_lora" not in build_args(model_path)
    for rank, limit in ((8, 8), (9, 16), (65, 128)):
        assert build_args(model_path, {"max_lora_rank": rank}, max_adapters=2)["max_lora_rank"] == limit
    with pytest.raises(ConfigError, match="up to rank 512, not 513"):
        build_args(model_path, {"max_lora_rank": 513}, max_adapters=2)
    with pytest.raises(ConfigError, match="up to rank 512, not 600: choose a lower --max-rank"):
        with_adapters(fixed_model(model_path, EngineConfig(kind="vllm")), TinkerConfig(max_rank=600))
    assert build_args(model_path)["tool_call_parser"] == "hermes"
    assert build_args(model_path, {"tool_call_parser": "xlam"})["tool_call_parser"] == "xlam"


def test_parsers_are_chosen_by_the_chat_template(
    model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    logged: list[str] = []  # an engine that ran in this process has ended the propagation of logs
    monkeypatch.setattr(args.logger, "warning", lambda text, *_: logged.append(text))
    chosen = {family.vllm_tools for family in FAMILIES} - {None}
    assert chosen <= set(ToolParserManager.list_registered())
    chosen = {family.vllm_reasoning for family in FAMILIES} - {None}
    assert chosen <= set(ReasoningParserManager.list_registered())
    assert model_style(model_path).vllm_tools == "hermes"
    template = "{% if tools %}[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS][THINK]{% endif %}{{ messages }}"
    (tmp_path / "t.jinja").write_text(template)
    built = build_args(model_path, {"chat_template": str(tmp_path / "t.jinja")})
    assert (built["tool_call_parser"], built["reasoning_parser"]) == ("mistral", "mistral")
    built = build_args(model_path, {"chat_template": template, "reasoning_parser": "qwen3"})
    assert built["reasoning_parser"] == "qwen3"
    assert logged == []
    built = build_args(model_path, {"chat_template": "{{ tools }}<tool_call>"})
    assert built.keys().isdisjoint({"tool_call_parser", "enable_auto_tool_choice", "reasoning_parser"})
    assert logged == [args.UNKNOWN_CALLS]


def test_names_and_ranks_read_without_an_import_are_those_of_vllm() -> None:
    from vllm.config.lora import MaxLoRARanks
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import FrontendArgs

    fields = {field.name for cls in (AsyncEngineArgs, FrontendArgs) for field in dataclasses.fields(cls)}
    assert known_args() == fields
    assert get_args(MaxLoRARanks) == LORA_RANKS


def test_a_driver_that_deploys_vllm_does_not_import_it() -> None:
    code = """
import sys
from raylight.config import EngineConfig
from raylight.engines.registry import choose_engine
from raylight.engines.vllm.placement import serve_options
config = EngineConfig(kind="vllm", num_gpus=1, args={"max_num_batched_tokens": 64})
assert choose_engine(config) == choose_engine(EngineConfig(num_gpus=1)) == "vllm"
serve_options(config, "m")
print(sorted({"torch", "vllm"} & sys.modules.keys()))
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


@pytest.mark.parametrize(
    ("args", "share", "executor"),
    [
        # one worker: vLLM's core runs it. Several: Ray's executor places them.
        ({}, 0.4, "mp"),
        ({}, 1, "mp"),
        ({"tensor_parallel_size": 2}, 0.4, "ray"),
        ({"distributed_executor_backend": "ray"}, 1, "ray"),
    ],
)
def test_who_runs_the_workers(model_path: str, args: dict, share: float, executor: str) -> None:
    from raylight.engines.vllm.start import llm_config

    config = EngineConfig(kind="vllm", num_gpus=share, args=args)
    built = build_args(model_path, args, gpus=share)
    llm = llm_config(model_path, "policy", built, place(config), environment(config, model_path))
    engine = llm.get_engine_config()
    assert engine.get_initialization_kwargs()["distributed_executor_backend"] == executor
    assert engine.placement_strategy == "STRICT_PACK"
    assert engine.runtime_env["env_vars"]["HF_HUB_OFFLINE"] == "1"


@pytest.mark.parametrize(
    ("device", "backend", "expected"),
    [("cuda", "mp", "uni"), ("cuda", "ray", "ray"), ("cpu", "mp", "mp")],
)
def test_the_core_runs_the_only_worker_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, device: str, backend: str, expected: str
) -> None:
    from ray.llm._internal.serve.engines.vllm.vllm_engine import VLLMEngine

    from raylight.engines.vllm import start as starting

    found: list[str] = []

    def start(self: Any, args: Any, config: Any, placement_group: Any) -> Any:
        found.append(config.parallel_config.distributed_executor_backend)

    monkeypatch.setattr(VLLMEngine, "_start_async_llm_engine", start)
    monkeypatch.setattr(starting, "VllmEngine", lambda *_: None)
    engine = object.__new__(starting.CapturingVLLMEngine)
    engine.llm_config = SimpleNamespace(model_id="policy")
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(distributed_executor_backend=backend),
        device_config=SimpleNamespace(device_type=device),
    )
    engine._start_async_llm_engine(None, config, None)
    assert found == [expected]


def test_fields_of_vllm_that_shape_an_answer_cannot_be_ignored() -> None:
    from raylight.engines.vllm.fields import KNOWN
    from raylight.types.request_fields import LABELS, PROTECTED

    harmless = {
        *("cache_salt", "ec_transfer_params", "include_reasoning", "modalities", "priority", "request_id"),
        *("reasoning_effort", "return_assistant_tokens_mask", "return_prompt_text", "return_token_offsets"),
        *("return_tokens_as_token_ids", "routed_experts_prompt_start", "session_id", "stream_interval"),
        "thinking_token_budget",
    }
    assert frozenset().union(*KNOWN.values()) - PROTECTED - LABELS == harmless


async def test_labels_of_other_types_reach_vllm_without_a_value() -> None:
    from raylight.engines.vllm.fields import KNOWN, RejectUnknownFields
    from raylight.http.request import JsonRequest, json_request

    received: list[Any] = []

    async def vllm(scope: Any, receive: Any, send: Any) -> None:
        received.append((await json_request(scope, receive)).fields)

    async def wait_forever() -> Any:
        raise AssertionError("the body has been read")

    async def fail(message: Any) -> None:
        raise AssertionError(message)

    app = RejectUnknownFields(vllm, None, 512)
    for path in KNOWN:
        for user, kept in (("me", "me"), (5, None), ({"id": 1}, None)):
            request = JsonRequest({"model": "m", "user": user, "metadata": 5}, wait_forever)
            scope = {"type": "http", "method": "POST", "path": path, "headers": []}
            await app(request.put_into(scope), wait_forever, fail)
            assert received.pop() == {"model": "m", "user": kept, "metadata": 5}


async def test_images_are_read_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    from raylight.engines.vllm import images

    threads: list[int] = []
    read = images.read_data_url
    monkeypatch.setattr(
        images, "read_data_url", lambda url: threads.append(threading.get_ident()) or read(url)
    )
    part = {"type": "image_url", "image_url": {"url": make_image().data_url}}
    body: dict[str, Any] = {"messages": [{"role": "user", "content": [part]}]}
    ids = {"prompt_token_ids": [1]}
    assert await images.take_images(body | {"kv_transfer_params": ids}) == {"kv_transfer_params": None}
    assert images._SHOWN.get() == ([make_image().sha256], [1])
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()
    body["messages"][0]["content"].append({"type": "image_url", "image_url": {"url": "data:x"}})
    with pytest.raises(RequestError, match=r"^messages\[0\]\.content\[1\]\.image_url: "):
        await images.take_images(body)


@pytest.mark.parametrize(("unparsed", "lines"), [(True, 1), (False, 0)])
async def test_an_answer_that_cannot_begin_with_reasoning_is_logged_once(
    unparsed: bool, lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from raylight.engines.vllm import fields
    from raylight.http.request import JsonRequest

    received: list[Any] = []
    logged: list[str] = []
    monkeypatch.setattr(fields.logger, "warning", logged.append)

    async def vllm(scope: Any, receive: Any, send: Any) -> None:
        received.append(scope)

    async def fail(*message: Any) -> None:
        raise AssertionError(message)

    app = fields.RejectUnknownFields(vllm, None, 512, unparsed_reasoning=unparsed)
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    await app(JsonRequest({"messages": [], "tools": [tool]}, fail).put_into(scope), fail, fail)
    assert logged == []
    for _ in range(2):
        body = {"messages": [], "tools": [tool], "tool_choice": "required"}
        await app(JsonRequest(body, fail).put_into(scope), fail, fail)
    assert logged == [fields.NO_THOUGHTS] * lines
    assert len(received) == 3
