"""Responses constrained to a JSON schema, by masking the logits with xgrammar.

xgrammar is imported with the first constrained request, not before.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import json
import logging
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from cachetools import LRUCache

from raylight.http.errors import RequestError
from raylight.types import JsonObject, Tokenizer

MISSING = (
    "an answer can be constrained to a schema only with xgrammar, which is not installed on this server: "
    "pip install xgrammar there, or send no schema, no strict tools and tool_choice auto"
)
NOT_IN_REASON = re.compile(r"^\[[\d:]+\] \S+\.(?:cc|h):\d+: (?:Check failed: .*? is false: )?")
"""Time and source line at the start of xgrammar's messages."""
COMPILING = 4
"""Grammars compiled concurrently. Their threads do no other work, which would wait for them."""
REFUSED = 1_024
"""Schemas that did not compile and are remembered."""
MAX_COMPILED_BYTES = 64 * 2**20
"""Memory of the compiled grammars that are kept for later requests."""
logger = logging.getLogger(__name__)
# xgrammar compiles most schemas in milliseconds, and a few short ones for minutes: the bounds keep each below
# some seconds. A schema that constrains no answer, as of a tool without `strict`, is not bounded.
MAX_SCHEMA = 2**16
"""Longest schema, in characters of JSON."""
MAX_PROPERTIES = 1_000
"""Most properties of an object."""
MAX_COUNTED_PROPERTIES = 100
"""Most properties of an object that limits their number."""
MAX_PATTERN = 1_000
"""Longest regular expression."""
MAX_COUNT = 1_000
"""Largest count in a regular expression: xgrammar's time grows with its square."""
MAX_REPETITIONS = 100_000
"""Largest product of the counts in a regular expression, because repetitions may be nested."""

_COUNT = re.compile(r"\{(\d+)(?:,(\d*))?\}")
_COUNTS = ("minProperties", "maxProperties")
MAX_WHITE_SPACE = 16
"""Most characters of white space in a row."""


class UselessSchema(Exception):
    """A schema that cannot be compiled, or that no value fits."""


class Grammars:
    """Compiler of grammars for one tokenizer.

    Args:
        vocab_size: width of the logits.
        stop_ids: tokens that end a response.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, stop_ids: Iterable[int]) -> None:
        self._tokenizer, self._vocab_size, self._stop_ids = tokenizer, vocab_size, list(stop_ids)
        self._compiler: object = None
        self._threads = ThreadPoolExecutor(COMPILING, "grammar")
        self._problems: LRUCache[bytes, str] = LRUCache(REFUSED)
        """Faults of schemas that did not compile. Finding one may take as long as a compilation."""
        self._warned = False

    @property
    def available(self) -> bool:
        """True if xgrammar is installed."""
        return importlib.util.find_spec("xgrammar") is not None

    def skip(self, what: str) -> bool:
        """True if xgrammar is not installed, so that a request's optional constraint must be left out. The
        first one is logged.

        Args:
            what: the request's field.
        """
        if self.available:
            return False
        if not self._warned:
            self._warned = True
            logger.warning(
                "%s is not enforced, because xgrammar is not installed: pip install xgrammar", what
            )
        return True

    async def compile_schema(
        self, schema: JsonObject, field: str = "response_format.json_schema.schema"
    ) -> object:
        """Compile a grammar of the JSON values that fit a schema.

        Args:
            field: the request's field, for errors.

        Raises:
            RequestError: the schema is invalid, too expensive or without a value (400), or xgrammar is not
                installed (400) or broken (501).
        """
        text = json.dumps(schema)
        return await self._compile(
            "compile_json_schema", schema, text, field, "", max_whitespace_cnt=MAX_WHITE_SPACE
        )

    async def compile_structure(self, structure: JsonObject, field: str = "tools", start: str = "") -> object:
        """Compile a grammar of text with tagged parts (xgrammar's structural tag).

        Args:
            start: text that the grammar allows, after which it must allow a token.

        Raises:
            RequestError: as for `compile_schema`.
        """
        tag = {"type": "structural_tag", "format": limit_white_space(structure)}
        return await self._compile("compile_structural_tag", structure, json.dumps(tag), field, start)

    async def _compile(
        self, method: str, schema: object, text: str, field: str, start: str, **options: object
    ) -> object:
        if not self.available:
            raise RequestError(MISSING)
        if problem := find_schema_problem(schema, len(text)):
            raise RequestError(f"{field}: the schema is too large to constrain an answer: {problem}")
        key = hashlib.blake2b(f"{method}{text}".encode("utf-8", "replace"), digest_size=16).digest()
        if key in self._problems:
            raise RequestError(f"{field}: {self._problems[key]}")
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads, self._compile_now, method, text, start, options)
        except UselessSchema as error:
            self._problems[key] = str(error)
            raise RequestError(f"{field}: {error}") from error

    def _compile_now(self, method: str, text: str, start: str, options: JsonObject) -> object:
        try:
            compiler = self._get_compiler()
        except Exception as error:  # a broken installation: a missing library, another version's symbols
            raise _broken("cannot be loaded", error) from error
        try:
            grammar = getattr(compiler, method)(text, **options)
        except (RuntimeError, ValueError, TypeError) as error:  # all that xgrammar raises for invalid input
            if not _works(compiler):
                raise _broken("failed", error) from error
            reason = NOT_IN_REASON.sub("", str(error)).strip()
            raise UselessSchema(f"the schema cannot be compiled: {reason:.500}") from error
        except Exception as error:
            raise _broken("failed", error) from error
        if not self._goes_on(grammar, start):
            raise UselessSchema("no value fits the schema; a $ref may lead back to itself")
        return grammar

    def _goes_on(self, grammar: Any, start: str) -> bool:
        """Return True if a grammar allows a token after a text."""
        import xgrammar

        mask = xgrammar.allocate_token_bitmask(1, self._vocab_size)
        matcher = xgrammar.GrammarMatcher(grammar)
        if not matcher.accept_string(start):
            return False
        matcher.fill_next_token_bitmask(mask)
        return bool(mask.any())

    def _get_compiler(self) -> object:
        if self._compiler is None:
            import xgrammar

            info = xgrammar.TokenizerInfo.from_huggingface(
                self._tokenizer, vocab_size=self._vocab_size, stop_token_ids=self._stop_ids
            )
            self._compiler = xgrammar.GrammarCompiler(
                info, max_threads=1, cache_limit_bytes=MAX_COMPILED_BYTES
            )
        return self._compiler


def _works(compiler: Any) -> bool:
    """Return True if a compiler compiles a schema that is valid."""
    try:
        compiler.compile_json_schema("{}", max_whitespace_cnt=MAX_WHITE_SPACE)
    except Exception:
        return False
    return True


def _broken(how: str, error: Exception) -> RequestError:
    """The error of a request that a broken xgrammar cannot serve; the request itself is valid."""
    logger.error("xgrammar %s", how, exc_info=error)
    return RequestError(
        f"xgrammar, which constrains answers to a schema, {how} on this server "
        f"({type(error).__name__}: {error}); reinstall it there: pip install --force-reinstall xgrammar",
        501,
        "server_error",
    )


def matcher_for(grammar: Any) -> object:
    """Return a matcher that tracks one response through a grammar; None without a grammar."""
    if grammar is None:
        return None
    import xgrammar

    return xgrammar.GrammarMatcher(grammar)


def mask_logits(logits: torch.Tensor, matchers: list[Any]) -> torch.Tensor:
    """Set the logits of tokens that a row's grammar does not allow to minus infinity.

    Args:
        logits: shape (rows, vocabulary); not modified.
        matchers: one per row; None for a row without a grammar.
    """
    import xgrammar

    logits = logits.float().clone()
    rows = [row for row, matcher in enumerate(matchers) if matcher is not None]
    mask = xgrammar.allocate_token_bitmask(len(matchers), logits.shape[-1])
    for row in rows:
        matchers[row].fill_next_token_bitmask(mask, row)
    xgrammar.apply_token_bitmask_inplace(logits, mask.to(logits.device), indices=rows)
    return logits


def find_schema_problem(schema: object, length: int) -> str | None:
    """Return what makes a schema too expensive as a constraint, and where; None if nothing does.

    Args:
        length: characters of the schema as JSON.
    """
    if length > MAX_SCHEMA:
        return f"it has {length} characters of JSON; at most {MAX_SCHEMA} are allowed"
    for path, value in _objects(schema):
        for name, problem in _problems_of(value):
            return f"at {'.'.join((*path, name))}: {problem}"
    return None


def _objects(schema: object) -> Iterator[tuple[tuple[str, ...], JsonObject]]:
    """Yield all objects within a schema with their paths."""
    left: list[tuple[tuple[str, ...], object]] = [((), schema)]
    while left:
        path, value = left.pop()
        if isinstance(value, dict):
            yield path, value
            left += [((*path, name), inner) for name, inner in value.items()]
        elif isinstance(value, list):
            left += [((*path, str(index)), inner) for index, inner in enumerate(value)]


def _problems_of(value: JsonObject) -> Iterator[tuple[str, str]]:
    """Yield the keywords of an object that are beyond bounds, each with the reason."""
    properties, patterns = value.get("properties"), value.get("patternProperties")
    if isinstance(properties, dict):
        counted = any(isinstance(value.get(name), int) for name in _COUNTS)
        most = MAX_COUNTED_PROPERTIES if counted else MAX_PROPERTIES
        if len(properties) > most:
            together = f" together with {' and '.join(_COUNTS)}" if counted else ""
            yield "properties", f"{len(properties)} properties; at most {most} are allowed{together}"
    for pattern in [value.get("pattern"), *(patterns if isinstance(patterns, dict) else ())]:
        if isinstance(pattern, str) and (problem := find_pattern_problem(pattern)):
            yield "pattern", problem


def find_pattern_problem(pattern: str) -> str | None:
    """Return what makes a regular expression too expensive; None if nothing does."""
    if len(pattern) > MAX_PATTERN:
        return f"{len(pattern)} characters; at most {MAX_PATTERN} are allowed"
    product = 1
    for low, high in _COUNT.findall(pattern):
        counts = [count.lstrip("0") for count in (low, high)]
        if any(len(count) > 4 or int(count or 0) > MAX_COUNT for count in counts):
            return f"the count {max(counts, key=len):.20} is above {MAX_COUNT}"
        product *= max(int(high or low), 1)
    if product > MAX_REPETITIONS:
        return f"its counts multiply to {product}; at most {MAX_REPETITIONS} are allowed"
    return None


def limit_white_space(structure: object) -> object:
    """Return a structural tag of xgrammar whose JSON parts have limited white space.

    A grammar of JSON allows any amount between its parts. A small model may then write nothing else, up to
    its limit of tokens, and its answers never parse.

    A limit that a part has already is kept.
    """
    if isinstance(structure, list):
        return [limit_white_space(part) for part in structure]
    if not isinstance(structure, dict):
        return structure
    if structure.get("type") == "json_schema":  # the schema itself is not a structure
        given = structure.get("max_whitespace_cnt")
        return structure | {"max_whitespace_cnt": MAX_WHITE_SPACE if given is None else given}
    return {key: limit_white_space(part) for key, part in structure.items()}
