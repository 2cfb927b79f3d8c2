"""Checks of a chat request's schemas: its tools, and the format of its answer."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Mapping
from typing import Any

import msgspec
from cachetools import LRUCache

from raylight.http.errors import RequestError

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


def check_tools(tools: Any) -> None:
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
                f"{path}.name: {name!r:.200} is no name of a tool; it may have up to 128 letters, digits, "
                "underscores, hyphens and dots"
            )
        if (schema := function.get("parameters")) is not None:
            encoded = msgspec.json.encode(schema)
            checked += len(encoded)
            _check_parameters(f"{path}.parameters", name, schema, encoded if checked <= MAX_CHECKED else None)


def check_response_format(response_format: Any) -> None:
    """Check the schema of a request's answer.

    Raises:
        RequestError: 400, it is invalid.
    """
    schema = _schema_of(response_format)
    if not isinstance(schema, dict) or len(encoded := msgspec.json.encode(schema)) > MAX_CHECKED:
        return
    if problem := _problem_of(encoded):
        raise RequestError(f"response_format.json_schema.schema: it is no valid JSON schema: {problem}")


def _check_parameters(path: str, name: Any, schema: Any, encoded: bytes | None) -> None:
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
        raise RequestError(f"{path}: the schema of tool {name!r:.200} is no valid JSON schema: {problem}")


async def check_large_schemas(body: Mapping[str, Any]) -> None:
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


def _schema_of(response_format: Any) -> Any:
    json_schema = response_format.get("json_schema") if isinstance(response_format, dict) else None
    return json_schema.get("schema") if isinstance(json_schema, dict) else None


def _parameters_of(tool: Any) -> Any:
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
