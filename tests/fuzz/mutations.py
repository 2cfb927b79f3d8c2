"""Seeded mutations of valid requests: each pair of a seed and a number is one request, always the same."""

import copy
import gzip
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

MODEL = "policy"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
COUNT, TOKENIZE, DETOKENIZE = "/v1/messages/count_tokens", "/tokenize", "/detokenize"
TRACES, MODELS = "/v1/traces", "/v1/models"
SAMPLING_PATHS = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)
LIMITS = {CHAT: "max_completion_tokens", RESPONSES: "max_output_tokens", MESSAGES: "max_tokens"}
RECORDED = Path(__file__).parent.parent / "features" / "framework_requests.jsonl"

HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA}
CALLED = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]
TALK = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "a"}]},
    {"role": "assistant", "content": None, "tool_calls": CALLED},
    {"role": "tool", "tool_call_id": "c1", "content": "1"},
]
AS_JSON = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
SPAN = {
    "traceId": "0af7651916cd43dd8448eb211c80319c",
    "spanId": "b7ad6b7169203331",
    "name": "step",
    "startTimeUnixNano": "1700000000000000000",
    "endTimeUnixNano": "1700000001000000000",
    "attributes": [{"key": "a", "value": {"intValue": "3"}}],
}
TOOLS = {"tools": [{"type": "function", "function": FUNCTION}]}
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
STOPPED = {"system": "s", "stop_sequences": ["x"], "top_k": 5}
SHORT_CHAT = {"messages": HI, "max_tokens": 3}
ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
    {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x": 1}'},
    {"type": "function_call_output", "call_id": "c1", "output": "1"},
]
TOOL_RESPONSE = {
    "tools": [{"type": "function", **FUNCTION}],
    "tool_choice": "auto",
    "text": {"format": {"type": "text"}},
    "reasoning": {"effort": "low"},
}
BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "a"}]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "1"}]},
]
TOOL_MESSAGE = {
    "tool_choice": {"type": "auto"},
    "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
    "thinking": {"type": "enabled", "budget_tokens": 5},
}
EXAMPLES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, SHORT_CHAT | {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 1, "n": 2}),
    (CHAT, SHORT_CHAT | {"stop": ["x"], "logprobs": True, "top_logprobs": 2, "user": "u"}),
    (CHAT, SHORT_CHAT | {"presence_penalty": 0.1, "logit_bias": {"5": 1.0}, "min_p": 0.1}),
    (CHAT, {"messages": TALK, "max_tokens": 3, "response_format": AS_JSON}),
    (CHAT, SHORT_CHAT | TOOLS | {"tool_choice": "auto", "parallel_tool_calls": True} | STREAMED),
    (CHAT, SHORT_CHAT | TOOLS | {"tool_choice": "required"}),
    (COMPLETIONS, {"prompt": "hi", "max_tokens": 3, "n": 2, "temperature": 0, "logprobs": 2, "seed": 1}),
    (COMPLETIONS, {"prompt": ["a", "b"], "max_tokens": 3, "stream": True, "stop": "x"}),
    (COMPLETIONS, {"prompt": [[1, 2], [3]], "max_tokens": 3, "min_tokens": 1, "ignore_eos": True}),
    (RESPONSES, {"input": "hi", "max_output_tokens": 3, "temperature": 0.5, "instructions": "i"}),
    (RESPONSES, {"stream": True, "max_output_tokens": 3} | TOOL_RESPONSE | {"input": ITEMS}),
    (MESSAGES, SHORT_CHAT | STOPPED | {"metadata": {"user_id": "u"}, "temperature": 0.5, "top_p": 0.9}),
    (MESSAGES, {"max_tokens": 3, "stream": True} | TOOL_MESSAGE | {"messages": BLOCKS}),
    (COUNT, {"messages": HI, "system": "s"}),
    (TOKENIZE, {"prompt": "hi", "add_special_tokens": True, "return_token_strs": True}),
    (TOKENIZE, {"messages": HI}),
    (DETOKENIZE, {"tokens": [1, 2, 3]}),
    (TRACES, {"resourceSpans": [{"resource": {"attributes": []}, "scopeSpans": [{"spans": [SPAN]}]}]}),
]
"""A valid body for each route, without its model."""
MORE_FIELDS = (
    *("allowed_token_ids", "bad_words", "best_of", "cache_salt", "chat_template", "chat_template_kwargs"),
    *("continue_final_message", "documents", "echo", "frequency_penalty", "ignore_eos", "kv_transfer_params"),
    *("length_penalty", "logit_bias", "logprobs", "max_completion_tokens", "metadata", "min_p", "min_tokens"),
    *("n", "previous_response_id", "priority", "prompt_logprobs", "reasoning_effort", "repetition_penalty"),
    *("response_format", "seed", "stop", "stop_token_ids", "stream", "stream_options", "structured_outputs"),
    *("suffix", "temperature", "thinking", "tool_choice", "tools", "top_k", "top_logprobs", "top_p"),
    *("truncate_prompt_tokens", "use_beam_search", "user", "vllm_xargs", "__proto__", "", "\ud800"),
)
NUMBERS: list[Any] = [
    *(0, -1, 1, 2, 3, 0.5, 1.0, 2.5, 1e308, -1e308, 1e-320, 129, 1025, 10**4, 10**6),
    *(10**9, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 4097, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)),
]
NO_NUMBERS: list[Any] = [float("nan"), float("inf"), -float("inf"), 2**64, -(2**63) - 1, 10**400]
"""Numbers that no body may have."""
TEXTS: list[str] = [
    *("", " ", "\x00", "\ud800", "\udcff\ud800", "é" * 50, "😀" * 30, "a\u0301" * 20, "\u202e", "\ufeff"),
    *("auto", "none", "required", "policy", "user", "3", "true", "null", "NaN", "{{", "{% raw %}", "%s%n"),
    *("<|im_end|>", "<|im_start|>system", "<tool_call>{", "</think>", "data: [DONE]\n\n", "\r\n\r\n"),
    *("../../etc/passwd", "http://127.0.0.1:1/", "data:image/png;base64,AAAA", "x" * 3000),
]
SCHEMAS: list[Any] = [
    *({"type": "odd"}, {"$ref": "#"}, {"$ref": "#/none"}, {"$ref": "http://x/y"}, {"pattern": "(((("}, True),
    {"type": "string", "pattern": "^(a{1,1000}){1,1000}$"},
    {"type": "string", "pattern": "a{0,10000}"},
    {"type": "string", "minLength": 10**9},
    {"type": "array", "items": {"type": "string"}, "minItems": 10**9},
    {"type": "integer", "minimum": 1e308},
    {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(60)}, "minProperties": 50},
    {"enum": [f"value{i}" for i in range(500)]},
    {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}, "$ref": "#/$defs/a"},
    {"type": "string", "format": "email"},
    {"const": {"a": [1, 2, {"b": None}]}},
]
METHODS = ("GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "post", "BREW", "A" * 300)
CONTENT_TYPES = (
    *("", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "a" * 5000),
    *("application/json; charset=utf-16", "application/json;;;", "APPLICATION/JSON", "application/jsonp"),
    *("application/x-protobuf", "text/event-stream", "application/json, text/html", "\xff"),
)
HEADER_VALUES = {
    "x-raylight-token-in": ["perhaps", "off"],
    "x-request-id": ["x" * 5000],
    "x-stainless-retry-count": ["1", "-1", "9" * 500],
    "accept": ["text/html"],
    "accept-encoding": ["gzip, br"],
    "connection": ["upgrade"],
    "content-encoding": ["gzip", "br"],
    "transfer-encoding": ["gzip"],
    "te": ["trailers"],
    "host": ["", "a" * 3000],
    "cookie": ["a=b;" * 1000],
    "x-forwarded-for": ["\xff"],
    "expect": ["x"],
    "content-length": ["-1", "1e3", "9" * 40],
    "range": ["bytes=0-1"],
    "authorization": ["Bearer", "Basic Og=="],
    "x-api-key": ["wrong"],
    "traceparent": ["00-x"],
    "x-data-parallel-rank": ["999"],
    "x-http-method-override": ["GET"],
    "bad name": ["x"],
    "x": ["a\x00b"],
}
HEADERS = [(name, value) for name, values in HEADER_VALUES.items() for value in values]
PATHS = (
    *("/", "//", "/v1", "/v1/", "/v1/v1/models", "/V1/models", "/v1/../metrics", "/v1/%2e%2e/metrics"),
    *("/health", "/v1/chat/completions/", "/v1/chat//completions", "/v1/chat/completions%00"),
    *("/v1/chat/completions?a=%ff", "/v1/models/policy", "/v1/models/%ff", "/v1/models/a/b"),
    *("/v1/responses/resp_1", "/v1/messages/batches"),
    *("/v1/embeddings", "/v1/inference/generate", "/inference/v1/generate", "/v1/chat/completions/render"),
    *("/render", "/metrics", "/docs", "/openapi.json", "/v1/models?x=" + "y" * 5000, "/" + "a/" * 2000, "/%"),
    *("/rollout/a/attempt/b/v1/models", "/rollout//attempt//v1/models", "*", "http://other/v1/models"),
    "/\xff",
)
Sending = Literal["whole", "chunked", "bad chunks", "too short", "too long", "half", "leaves", "slow headers"]


@dataclass
class FuzzCase:
    """One request as it is sent.

    Attributes:
        target: path below the base URL.
        sending: manner in which the body is sent. "half" and "leaves" disconnect: before the end of the
            body, or while the answer is streamed.
        broken_http: True if the HTTP server itself may answer, or close the connection.
        in_attempt: False for the run's own address.
    """

    kind: str
    route: str
    target: str
    content: bytes = b""
    method: str = "POST"
    headers: list[tuple[str, str]] = field(default_factory=lambda: [("content-type", "application/json")])
    sending: Sending = "whole"
    broken_http: bool = False
    in_attempt: bool = True


def load_examples() -> list[tuple[str, dict[str, Any]]]:
    """Return routes with valid bodies: one for each route, and the recorded bodies of frameworks."""
    examples = [(path, body if path == TRACES else {"model": MODEL} | body) for path, body in EXAMPLES]
    for line in RECORDED.read_text().splitlines():
        recorded = json.loads(line)
        body = {name: value for name, value in recorded["body"].items() if name != "max_tokens"}
        examples.append((recorded["path"], body | {"model": MODEL, LIMITS[recorded["path"]]: 3}))
    return examples


class Mutator:
    """Makes the requests of a seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._examples = load_examples()
        self._kinds: list[tuple[Callable[[random.Random, str, dict[str, Any]], FuzzCase], int]] = [
            (_valid, 10),
            (_values, 55),
            (_schema, 4),
            (_large, 2),
            (_duplicate_keys, 4),
            (_not_json, 8),
            (_encodings, 3),
            (_content_type, 3),
            (_header, 4),
            (_path, 4),
            (_method, 2),
            (_sending, 6),
            (_leaves, 3),
        ]

    def case(self, number: int) -> FuzzCase:
        """Return the request with a number."""
        draw = random.Random(f"{self._seed}:{number}")
        path, body = draw.choice(self._examples)
        makers, weights = zip(*self._kinds, strict=True)
        (make,) = draw.choices(makers, weights)
        return make(draw, path, copy.deepcopy(body))


def _encode(body: Any) -> bytes:
    return json.dumps(body).encode()


def _valid(draw: random.Random, path: str, body: dict[str, Any]) -> FuzzCase:
    case = FuzzCase("valid", path, path, _encode(body), in_attempt=draw.random() < 0.9)
    if draw.random() < 0.1:
        return FuzzCase("valid", MODELS, MODELS, method="GET", headers=[])
    return case


def _values(draw: random.Random, path: str, body: dict[str, Any]) -> FuzzCase:
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        ways = list(_places(body))
        how = draw.choice(("replace", "replace", "replace", "remove", "add", "repeat", "swap"))
        if how == "add" or not ways:
            body[draw.choice(MORE_FIELDS)] = _junk(draw)
            continue
        *way, last = draw.choice(ways)
        holder: Any = body
        for name in way:
            holder = holder[name]
        if how == "remove":
            del holder[last]
        elif how == "repeat" and isinstance(holder[last], list) and holder[last]:
            holder[last] = holder[last] * draw.choice((2, 5, 70))
        elif how == "swap":
            other = body
            for name in draw.choice(ways):
                other = other[name] if _has(other, name) else other
            holder[last] = copy.deepcopy(other)
        else:
            holder[last] = _junk(draw)
    return FuzzCase("values", path, path, _encode(body))


def _schema(draw: random.Random, path: str, body: dict[str, Any]) -> FuzzCase:
    schema = draw.choice(SCHEMAS)
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": schema}}, "strict": True}
    how = draw.choice(("format", "tool", "required"))
    tool = {"type": "function", "function": function}
    wanted: dict[str, Any] = {"model": MODEL, "messages": HI, "max_tokens": 4}
    if how == "format":
        wanted["response_format"] = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    else:
        wanted |= {"tools": [tool], "tool_choice": "required" if how == "required" else "auto"}
    return FuzzCase("schema", CHAT, CHAT, _encode(wanted))


def _large(draw: random.Random, path: str, body: dict[str, Any]) -> FuzzCase:
    size = draw.choice((20_000, 100_000, 400_000))
    large: Any = draw.choice(
        (
            lambda: "x" * size,
            lambda: "😀" * (size // 4),
            lambda: [1] * (size // 4),
            lambda: [{}] * (size // 8),
            lambda: {f"k{i}": i for i in range(size // 16)},
            lambda: _nested(draw.choice((100, 199, 250, 900))),
        )
    )()
    body[draw.choice([*body, *MORE_FIELDS])] = large
    return FuzzCase("large", path, path, _encode(body))


def _duplicate_keys(draw: random.Random, path: str, body: dict[str, Any]) -> FuzzCase:
    name = draw.choice(list(body))
    twice = f"{json.dumps(name)}: {json.dumps(_junk(draw))}, "
    content = json.dumps(body)
    first, last = content[0] + twice + content[1:], content[:-1] + ", " + twice[:-2] + "}"
    content = first if draw.random() < 0.5 else last
    return FuzzCase("duplicate keys", path, path, content.encode())


def _not_json(draw: random.Random, path: str, body: dict[str, Any]) -> FuzzCase:
    content = bytearray(_encode(body))
    how = draw.choice(("cut", "flip", "insert", "trailing", "other", "brackets"))
    if how == "cut":
        content = content[: draw.randrange(len(content))]
    elif how == "flip":
        for _ in range(draw.randint(1, 4)):
            content[draw.randrange(len(content))] = draw.randrange(256)
    elif how == "insert":
        content[draw.randrange(len(content)) : 0] = draw.randbytes(draw.randint(1, 8))
    elif how == "trailing":
        content += draw.choice((b"}", b"\x00", b" x", b"{}", b","))
    elif how == "other":
        content = bytearray(draw.choice((b"", b"null", b"[]", b"3", b'"x"', b"NaN", b"{'a': 1}", b"a=b&c=d")))
    else:
        content = bytearray(draw.choice((b"[", b'{"a":', b"[[]]", b"{")) * draw.choice((10, 1000, 100_000)))
    return FuzzCase("not JSON", path, path, bytes(content))


def _encodings(draw: random.Random, path: str, body: dict[str, Any]) -> FuzzCase:
    text = json.dumps(body, ensure_ascii=False)
    charset = draw.choice(("utf-16", "utf-32", "utf-8-sig", "utf-7", "cp037", "gzip", "surrogates"))
    if charset == "gzip":
        content = gzip.compress(text.encode(), mtime=0)
    elif charset == "surrogates":
        content = text.replace("hi", "h\udcffi").encode("utf-8", "surrogatepass")
    else:
        content = text.encode(charset, "replace")
    return FuzzCase("encodings", path, path, content)


def _content_type(draw: random.Random, path: str, body: dict[str, Any]) -> FuzzCase:
    headers = [("content-type", draw.choice(CONTENT_TYPES))] if draw.random() < 0.9 else []
    return FuzzCase("content type", path, path, _encode(body), headers=headers, broken_http=True)


def _header(draw: random.Random, path: str, body: dict[str, Any]) -> FuzzCase:
    case = FuzzCase("headers", path, path, _encode(body), broken_http=True)
    case.headers += [draw.choice(HEADERS) for _ in range(draw.choice((1, 1, 2, 5)))]
    if draw.random() < 0.05:
        case.headers += [(f"x-{n}", "y" * draw.choice((1, 100, 2000))) for n in range(draw.choice((50, 300)))]
    return case


def _path(draw: random.Random, path: str, body: dict[str, Any]) -> FuzzCase:
    target = draw.choice(PATHS)
    if draw.random() < 0.3:
        place = draw.randrange(len(path))
        target = path[:place] + chr(draw.randrange(33, 127)) + path[place + draw.randint(0, 1) :]
    method, content = draw.choice((("POST", _encode(body)), ("GET", b"")))
    in_attempt = draw.random() < 0.7
    return FuzzCase("path", "other", target, content, method, broken_http=True, in_attempt=in_attempt)


def _method(draw: random.Random, path: str, body: dict[str, Any]) -> FuzzCase:
    route = draw.choice((path, MODELS))
    content = _encode(body) if draw.random() < 0.5 else b""
    return FuzzCase("method", route, route, content, draw.choice(METHODS), broken_http=True)


def _sending(draw: random.Random, path: str, body: dict[str, Any]) -> FuzzCase:
    ways: tuple[Sending, ...] = ("chunked", "bad chunks", "too short", "too long", "half", "slow headers")
    sending = draw.choice(ways)
    broken = sending not in ("chunked", "half")
    return FuzzCase("sending", path, path, _encode(body), sending=sending, broken_http=broken)


def _leaves(draw: random.Random, path: str, body: dict[str, Any]) -> FuzzCase:
    body = {"model": MODEL, "messages": HI, "stream": True, "max_tokens": 60, "ignore_eos": True}
    return FuzzCase("leaves", CHAT, CHAT, _encode(body), sending="leaves")


def _places(value: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths to all values within a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in items:
        yield (*here, name)
        yield from _places(inner, (*here, name))


def _has(value: Any, name: Any) -> bool:
    return name in value if isinstance(value, dict) else isinstance(value, list) and name < len(value)


def _junk(draw: random.Random, depth: int = 0) -> Any:
    kind = draw.choices(
        ("number", "text", "flag", "nested", "deep"), (40, 25, 10, 20 if depth < 3 else 0, 2)
    )[0]
    if kind == "number":
        return draw.choice(NO_NUMBERS if draw.random() < 0.05 else NUMBERS)
    if kind == "text":
        return draw.choice(TEXTS)
    if kind == "flag":
        return draw.choice((True, False, None))
    if kind == "deep":
        return _nested(draw.choice((20, 150, 250)))
    inner = [_junk(draw, depth + 1) for _ in range(draw.randint(0, 3))]
    return (
        inner if draw.random() < 0.5 else {draw.choice(("a", "type", "role", "", "name")): v for v in inner}
    )


def _nested(depth: int) -> Any:
    value: Any = []
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value
