"""Check of the schemas that constrain an answer, before vLLM gets them.

vLLM compiles a schema in its engine's process. One that does not compile there, or that allows no token, ends
its request with a status 500, and one that takes minutes delays all others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping

from cachetools import LRUCache
from vllm.v1.structured_output.backend_xgrammar import has_xgrammar_unsupported_json_features

from raylight.engines.grammar import Grammars
from raylight.http.errors import RequestError
from raylight.types import JsonObject

CHECKED = 4096
"""Schemas whose check is remembered."""


class SchemaCheck:
    """Compiles each new schema once, in a thread.

    Args:
        grammars: compiler with the model's tokenizer.
    """

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._problems: LRUCache[bytes, str | None] = LRUCache(CHECKED)

    async def check(self, body: Mapping[str, object]) -> None:
        """Check the schemas of a request.

        Raises:
            RequestError: 400, one of them cannot be compiled, is too expensive, or allows no value.
        """
        for field, schema in constraining_schemas(body):
            text = json.dumps(schema, sort_keys=True)
            key = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
            if key not in self._problems:
                self._problems[key] = await self._find_problem(schema)
            if (problem := self._problems[key]) is not None:
                raise RequestError(f"{field}: {problem}")

    async def _find_problem(self, schema: JsonObject) -> str | None:
        if has_xgrammar_unsupported_json_features(schema):
            return None  # vLLM constrains the answer with another library
        try:
            await self._grammars.compile_schema(schema, "schema")
        except RequestError as error:
            if error.status != 400:
                raise
            return error.message.removeprefix("schema: ")
        return None


def constraining_schemas(body: Mapping[str, object]) -> Iterator[tuple[str, JsonObject]]:
    """Yield the schemas that constrain an answer, each with its field."""
    formats = body.get("response_format"), body.get("structured_outputs")
    json_schema = formats[0].get("json_schema") if isinstance(formats[0], dict) else None
    if isinstance(json_schema, dict) and isinstance(schema := json_schema.get("schema"), dict):
        yield "response_format.json_schema.schema", schema
    if isinstance(formats[1], dict) and isinstance(schema := formats[1].get("json"), dict):
        yield "structured_outputs.json", schema
    tools, choice = body.get("tools"), body.get("tool_choice")
    forced = choice == "required" or isinstance(choice, dict)
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        function = tool.get("function") if isinstance(tool, dict) else None
        schema = function.get("parameters") if isinstance(function, dict) else None
        if isinstance(function, dict) and isinstance(schema, dict) and (forced or function.get("strict")):
            yield f"tools[{index}].function.parameters", schema
