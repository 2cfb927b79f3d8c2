"""Normal form of chat requests: each setting in the one spelling that engines read."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import operator
import re
import uuid
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import msgspec
from cachetools import LRUCache
from jinja2 import TemplateSyntaxError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from raylight.http.errors import RequestError
from raylight.types import JsonObject, Tokenizer
from raylight.types.request_fields import log_dropped

logger = logging.getLogger(__name__)

TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
"""Names that at least one provider accepts."""
CACHED_SCHEMAS = 4096
"""Schemas whose check is remembered: an agent sends the same ones with each request."""
CHECKED_AT_ONCE = 2**13
"""Bytes of schemas that are checked without a thread; they take some 15 ms."""
MAX_CHECKED = 2**18
"""Schemas of a request that are checked, in bytes of JSON; checking more would delay all requests."""

_PROBLEMS: LRUCache[bytes, str | None] = LRUCache(CACHED_SCHEMAS)
"""Faults of schemas, by their digests."""


def check_tools(tools: object) -> None:
    """Check the names and the schemas of a request's function tools. Engines check the rest of their form.

    Raises:
        RequestError: 400, a name or a schema is invalid.
    """
    checked = 0
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict):
            continue
        name, path = function.get("name"), f"tools[{index}].function"
        if isinstance(name, str) and not TOOL_NAME.fullmatch(name):
            raise RequestError(
                f"{path}.name: {name!r:.200} is not a name of a tool; it may have up to 128 letters, digits, "
                "underscores, hyphens and dots"
            )
        if (schema := function.get("parameters")) is not None:
            encoded = msgspec.json.encode(schema)
            checked += len(encoded)
            _check_parameters(f"{path}.parameters", name, schema, encoded if checked <= MAX_CHECKED else None)


def check_response_format(response_format: object) -> None:
    """Check the schema of a request's answer.

    Raises:
        RequestError: 400, it is invalid.
    """
    schema = _schema_of(response_format)
    if not isinstance(schema, dict) or len(encoded := msgspec.json.encode(schema)) > MAX_CHECKED:
        return
    if problem := _problem_of(encoded):
        raise RequestError(f"response_format.json_schema.schema: it is not a valid JSON schema: {problem}")


def _check_parameters(path: str, name: object, schema: object, encoded: bytes | None) -> None:
    if not isinstance(schema, dict):
        raise RequestError(
            f"{path}: the schema of tool {name!r:.200} must be an object, not {type(schema).__name__}"
        )
    if schema.get("type", "object") != "object":
        raise RequestError(
            f"{path}: the schema of tool {name!r:.200} must have the type 'object', not "
            f"{schema['type']!r:.100}; put a single value into an object with one property"
        )
    if encoded is not None and (problem := _problem_of(encoded)):
        raise RequestError(f"{path}: the schema of tool {name!r:.200} is not a valid JSON schema: {problem}")


async def check_large_schemas(body: Mapping[str, object]) -> None:
    """Check a request's schemas in a thread if they are large, so that the other checks find the results.

    Schemas of `MAX_CHECKED` bytes take half a second, during which other requests would wait.
    """
    tools, response_format = body.get("tools"), body.get("response_format")
    if not (tools or response_format):
        return
    schemas = [_parameters_of(tool) for tool in tools] if isinstance(tools, list) else []
    schemas.append(_schema_of(response_format))
    encoded = [msgspec.json.encode(schema) for schema in schemas if isinstance(schema, dict)]
    if sum(map(len, encoded)) <= CHECKED_AT_ONCE:
        return
    new = {key: one for one in encoded if len(one) <= MAX_CHECKED and (key := _key_of(one)) not in _PROBLEMS}
    if new:
        problems = await asyncio.to_thread(lambda: [_find_problem(one) for one in new.values()])
        _PROBLEMS.update(zip(new, problems, strict=True))


def _schema_of(response_format: object) -> object:
    json_schema = response_format.get("json_schema") if isinstance(response_format, dict) else None
    return json_schema.get("schema") if isinstance(json_schema, dict) else None


def _parameters_of(tool: object) -> object:
    function = tool.get("function") if isinstance(tool, dict) else None
    return function.get("parameters") if isinstance(function, dict) else None


def _problem_of(encoded: bytes) -> str | None:
    """Return what is wrong with a schema, from an earlier check if there was one."""
    key = _key_of(encoded)
    if key not in _PROBLEMS:
        _PROBLEMS[key] = _find_problem(encoded)
    return _PROBLEMS[key]


def _key_of(encoded: bytes) -> bytes:
    return hashlib.blake2b(encoded, digest_size=16).digest()


def _find_problem(encoded: bytes) -> str | None:
    """Return what is wrong with a schema, and where; None if it is valid.

    It is checked as one of draft 7, whose keywords later drafts have too; their check takes ten times longer.
    Formats are left out: a `pattern` is a regular expression of ECMAScript, which Python's `re` cannot judge.
    """
    from jsonschema import Draft7Validator, SchemaError

    schema = msgspec.json.decode(encoded)
    if "definitions" not in schema and "$defs" in schema:  # its newer name
        schema["definitions"] = schema["$defs"]
    try:
        Draft7Validator.check_schema(schema, format_checker=None)
    except SchemaError as error:
        where = ".".join(map(str, error.absolute_path))
        return f"{f'at {where}: ' if where else ''}{error.message:.300}"
    return None


FIRST, SECOND = (f"Zq{uuid.uuid4().hex}" for _ in range(2))
"""Words that are unique in a rendered text."""


class SystemMessages:
    """Puts the system messages of a chat where its template takes them. Not thread-safe.

    Messages of developers become messages of the system, the only name that most templates know. Where the
    template refuses or omits a system message that is not the first message, all of them are folded into the
    first, in their order, as other servers do. Where it takes them, they keep their places, because another
    first message is another prompt.

    Args:
        tokenizer: Hugging Face tokenizer with the chat template.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def place(self, messages: object) -> Any:
        """Return a request's messages with system messages in their places; the same list if they are."""
        if not isinstance(messages, list):
            return messages
        named = [
            {**message, "role": "system"}
            if isinstance(message, dict) and message.get("role") == "developer"
            else message
            for message in messages
        ]
        found = [index for index, message in enumerate(named) if _is_system(message)]
        if found not in ([], [0]) and not (
            self._takes_later if found != list(range(len(found))) else self._takes_several
        ):
            text = "\n\n".join(filter(None, (_text(named[index]) for index in found)))
            rest = [message for message in named if not _is_system(message)]
            return [{**named[found[0]], "content": text}, *rest]
        return messages if all(new is old for new, old in zip(named, messages, strict=True)) else named

    @functools.cached_property
    def _takes_later(self) -> bool:
        """True if the template shows a system message after an answer."""
        turns = [_message("user", "u"), _message("assistant", "a"), _message("system", SECOND)]
        return self._shows([_message("system", FIRST), *turns, _message("user", "u")])

    @functools.cached_property
    def _takes_several(self) -> bool:
        """True if the template shows two system messages at the start."""
        return self._shows([_message("system", FIRST), _message("system", SECOND), _message("user", "u")])

    def _shows(self, messages: list[JsonObject]) -> bool:
        """True if the template shows all system messages, or not even the first, which the engine reports."""
        text = rendered(self._tokenizer, messages)
        if FIRST in text and SECOND in text:
            return True
        return FIRST not in rendered(self._tokenizer, [_message("system", FIRST), _message("user", "u")])


def rendered(tokenizer: Tokenizer, messages: list[JsonObject], **variables: Any) -> str:
    """Return the text that a tokenizer's chat template makes of messages; "" if the template raises."""
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **variables))
    except Exception:  # a template is the model authors' program and may raise anything
        return ""


def _message(role: str, content: str) -> JsonObject:
    return {"role": role, "content": content}


def _is_system(message: object) -> bool:
    return isinstance(message, dict) and message.get("role") == "system"


def _text(message: JsonObject) -> str:
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return "\n".join(text for text in texts if isinstance(text, str))


HINTS = frozenset({"reasoning_effort", "reasoning", "verbosity", "thinking", "enable_thinking"})
"""Settings of a model's style and reasoning, by their names in chat requests."""
VARIABLES = frozenset({"reasoning_effort", "verbosity", "enable_thinking", "thinking"})
"""Variables under which chat templates read them."""
GENERATION_TAG = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
"""Tag of transformers around the assistant's text, which jinja2 alone does not parse."""
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Efforts of reasoning, from the least."""
UNREAD = "this model's chat template does not read"
CACHE_HINT = "cache_control"
"""Hint for a provider's prompt cache."""
Places: TypeAlias = Mapping[str, "Places"]
HINTED: Places = {"messages": {"content": {}}, "tools": {"function": {}}}
"""Fields of a request whose objects may have such a hint, and fields of these objects."""


class ChatNormalizer:
    """Rewrites chat requests, translated ones included, before they are captured.

    - `cache_control` is dropped: a hint that moves from message to message would change earlier turns.
    - A `tool_choice` of type `allowed_tools` leaves only those tools in the request.
    - An empty list of tools, and a `tool_choice` without tools that requires none, are dropped.
    - Messages of developers become messages of the system, in places where the template takes them.
    - `reasoning_effort` (also as `reasoning.effort`), `verbosity`, `thinking` and `enable_thinking` reach the
      chat template under the name that it reads. A setting that it does not read is dropped, which is
      logged once. The effort `none`, and any effort of a template that reads none, sets `enable_thinking`.
      An effort that the template refuses becomes the nearest that it takes, which is logged once.
    - `thinking.budget_tokens` becomes `thinking_token_budget`, which engines read.

    Args:
        template: the model's chat template. None: the model runs elsewhere, and gets these settings as the
            agent sent them.
        tokenizer: tokenizer with this template; None leaves messages as they are.
    """

    def __init__(self, template: str | None, tokenizer: Tokenizer | None = None) -> None:
        self._template, self._tokenizer = template, tokenizer
        self._system = None if tokenizer is None else SystemMessages(tokenizer)
        self._read = _variables(template or "")

    def normalize(self, body: JsonObject, client_name: Callable[[str], str] = str) -> JsonObject:
        """Return a request in normal form; the same object if it is in it already.

        Args:
            client_name: returns the agent's name of a field of a chat request, for messages to people.

        Raises:
            RequestError: 400, a tool, a choice of tools, or the schema of the answer is invalid.
        """
        body = _without_cache_hints(body, HINTED)
        check_tools(body.get("tools"))
        check_response_format(body.get("response_format"))
        body = _without_empty_tools(_resolve_allowed_tools(body))
        if self._system is not None:
            messages = self._system.place(body.get("messages"))
            body = body if messages is body.get("messages") else body | {"messages": messages}
        return body if self._template is None else self._resolve_hints(body, client_name)

    def _resolve_hints(self, body: JsonObject, client_name: Callable[[str], str]) -> JsonObject:
        given = body.get("chat_template_kwargs")
        variables = dict(given) if isinstance(given, dict) else {}
        if HINTS.isdisjoint(body) and "enable_thinking" not in variables:
            return body
        kept = {name: value for name, value in body.items() if not _is_hint(name, value)}
        thinking = {
            "chat_template_kwargs.enable_thinking": variables.pop("enable_thinking", None),
            "enable_thinking": _is_enabled(body.get("enable_thinking")),
            "thinking": _is_enabled(body.get("thinking")),
        }
        for field, enabled in thinking.items():
            if enabled is not None and not self._set(variables, ("enable_thinking", "thinking"), enabled):
                log_dropped(client_name(field), UNREAD)
        for field, effort in _efforts(body).items():
            is_read = effort is not None and "reasoning_effort" in self._read
            as_switch = effort == "none" or (effort is not None and not is_read)
            if as_switch and self._set(variables, ("enable_thinking",), effort != "none"):
                continue
            if not is_read:
                log_dropped(client_name(field), UNREAD)
                continue
            if (nearest := self._nearest_effort(effort)) != effort:
                _log_replaced(client_name(field), effort, nearest)
            kept.setdefault("reasoning_effort", nearest)  # engines have a field for it
        if (budget := _thinking_budget(body)) is not None:
            kept.setdefault("thinking_token_budget", budget)
        verbosity = body.get("verbosity")
        if verbosity is not None and not self._set(variables, ("verbosity",), verbosity):
            log_dropped(client_name("verbosity"), UNREAD)
        if isinstance(given, dict):
            kept.pop("chat_template_kwargs")
        return kept | ({"chat_template_kwargs": variables} if variables else {})

    @functools.cached_property
    def _taken_efforts(self) -> tuple[str, ...]:
        """Efforts that the template takes; all if no template can be rendered."""
        if (tokenizer := self._tokenizer) is None:
            return EFFORTS
        fixed = {"add_generation_prompt": True}
        fixed |= {"enable_thinking": True} if "enable_thinking" in self._read else {}
        asked = [_message("user", "u")]
        return tuple(e for e in EFFORTS if rendered(tokenizer, asked, reasoning_effort=e, **fixed)) or EFFORTS

    def _nearest_effort(self, effort: object) -> object:
        """Return an effort that the template takes, of two the higher one; the same for an unknown effort."""
        taken = self._taken_efforts
        if not isinstance(effort, str) or effort not in EFFORTS or effort in taken:
            return effort
        place = EFFORTS.index
        reasoning = [one for one in taken if one != "none"]
        return min(reasoning or [effort], key=lambda one: (abs(place(one) - place(effort)), -place(one)))

    def _set(self, variables: JsonObject, names: tuple[str, ...], value: object) -> bool:
        """Set the first of some variables that the template reads; return False if it reads none of them."""
        name = next((name for name in names if name in self._read), None)
        if name is not None:
            variables.setdefault(name, value)
        return name is not None


@functools.cache
def _log_replaced(field: str, effort: object, nearest: object) -> None:
    """Log, once for each process, an effort that the template refuses."""
    logger.warning(
        "a request has %s=%r, which this model's chat template refuses; it gets %r", field, effort, nearest
    )


def effort_as_variable(body: JsonObject) -> JsonObject:
    """Return a request with its effort as a variable of the template, as vLLM's `/tokenize` reads it."""
    if "reasoning_effort" not in body:
        return body
    kept = {name: value for name, value in body.items() if name != "reasoning_effort"}
    variables = {"reasoning_effort": body["reasoning_effort"]} | body.get("chat_template_kwargs", {})
    return kept | {"chat_template_kwargs": variables}


def _variables(template: str) -> frozenset[str]:
    """Return the names of `VARIABLES` that a template reads; none if it is not a valid template."""
    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    try:
        read = meta.find_undeclared_variables(environment.parse(GENERATION_TAG.sub("", template)))
    except TemplateSyntaxError:
        return frozenset()  # the engine rejects every request that renders it
    return VARIABLES & read


def _is_hint(name: str, value: object) -> bool:
    """Return True if a field is a hint in a form that is understood; others are left to the engine."""
    forms = {"reasoning": dict, "thinking": dict | bool, "enable_thinking": bool}
    return name in HINTS and (value is None or isinstance(value, forms.get(name, object)))


def _efforts(body: Mapping[str, object]) -> JsonObject:
    """Return the efforts of reasoning that a request asks for; None if its `reasoning` names none."""
    efforts = {}
    if body.get("reasoning_effort") is not None:
        efforts["reasoning_effort"] = body["reasoning_effort"]
    if isinstance(reasoning := body.get("reasoning"), dict):
        efforts["reasoning"] = reasoning.get("effort")
    return efforts


def _is_enabled(thinking: object) -> bool | None:
    """Return True if a `thinking` setting, in the form of Anthropic and LiteLLM, allows thinking."""
    if isinstance(thinking, dict):
        return thinking.get("type") != "disabled"
    return thinking if isinstance(thinking, bool) else None


def _thinking_budget(body: Mapping[str, object]) -> int | None:
    """Return the tokens of thinking that a `thinking` setting allows; None if it states none, or 0."""
    thinking = body.get("thinking")
    if not isinstance(thinking, dict) or thinking.get("type") == "disabled":
        return None
    budget = thinking.get("budget_tokens")
    return budget if type(budget) is int and budget > 0 else None


def _without_cache_hints(value: object, places: Places) -> Any:
    """Return an object, or a list of them, without hints; the same one if it has none."""
    if isinstance(value, list):
        entries = [_without_cache_hints(entry, places) for entry in value]
        return entries if any(map(operator.is_not, entries, value)) else value
    if not isinstance(value, dict):
        return value
    inner = {
        name: _without_cache_hints(entry, below)
        for name, below in places.items()
        if isinstance(entry := value.get(name), list | dict)
    }
    if CACHE_HINT not in value and all(new is value[name] for name, new in inner.items()):
        return value
    return {name: entry for name, entry in (value | inner).items() if name != CACHE_HINT}


def _resolve_allowed_tools(body: JsonObject) -> JsonObject:
    """Return a request whose `tool_choice` of type `allowed_tools` has become its tools and a mode.

    Raises:
        RequestError: 400, the choice is incomplete or names a tool that the request does not have.
    """
    choice = body.get("tool_choice")
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return body
    path, tools = "tool_choice.allowed_tools", body.get("tools")
    allowed = choice.get("allowed_tools")
    if not isinstance(allowed, dict) or allowed.get("mode") not in ("auto", "required"):
        raise RequestError(f"{path}.mode: it must be 'auto' or 'required'")
    entries = allowed.get("tools")
    if not isinstance(entries, list) or not entries:
        raise RequestError(
            f"{path}.tools: it is empty; name at least one tool, or use the tool_choice 'none'"
        )
    known = {_tool_name(tool): tool for tool in tools} if isinstance(tools, list) else {}
    names = [_tool_name(entry) for entry in entries]
    for index, name in enumerate(names):
        if name is None or name not in known:
            raise RequestError(f"{path}.tools[{index}]: the request has no tool {name!r:.200}")
    kept = [tool for name, tool in known.items() if name in names]
    return {**body, "tools": kept, "tool_choice": allowed["mode"]}


def _without_empty_tools(body: JsonObject) -> JsonObject:
    if body.get("tools"):
        return body
    empty = ("tools", "tool_choice") if body.get("tool_choice") in ("auto", "none") else ("tools",)
    return body if body.keys().isdisjoint(empty) else {k: v for k, v in body.items() if k not in empty}


def _tool_name(tool: object) -> str | None:
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None
