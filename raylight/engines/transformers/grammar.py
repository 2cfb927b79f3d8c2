"""Responses constrained to a JSON schema, by masking the logits. Needs xgrammar, which vLLM installs too."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Iterable
from typing import Any

import torch

from raylight.http.errors import RequestError

XGRAMMAR_MISSING = "this engine needs xgrammar to constrain answers to a schema (pip install xgrammar)"


class Grammars:
    """Compiler of grammars for one tokenizer.

    Args:
        vocab_size: width of the logits.
        stop_ids: tokens that end a response.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, stop_ids: Iterable[int]) -> None:
        self._tokenizer, self._vocab_size, self._stop_ids = tokenizer, vocab_size, list(stop_ids)
        self._compiler: Any = None

    @property
    def available(self) -> bool:
        """True if xgrammar is installed."""
        return importlib.util.find_spec("xgrammar") is not None

    async def compile_schema(self, schema: dict[str, Any]) -> Any:
        """Compile a grammar of the JSON values that fit a schema.

        Raises:
            RequestError: the schema cannot be compiled, or xgrammar is not installed.
        """
        return await self._compile("compile_json_schema", json.dumps(schema))

    async def compile_structure(self, structure: dict[str, Any]) -> Any:
        """Compile a grammar of text with tagged parts (xgrammar's structural tag).

        Raises:
            RequestError: as for `compile_schema`.
        """
        return await self._compile(
            "compile_structural_tag", json.dumps({"type": "structural_tag", "format": structure})
        )

    async def _compile(self, method: str, text: str) -> Any:
        if not self.available:
            raise RequestError(XGRAMMAR_MISSING)
        try:
            return await asyncio.to_thread(lambda: getattr(self._get_compiler(), method)(text))
        except Exception as error:  # xgrammar raises many kinds of errors for an invalid schema
            raise RequestError(f"the schema cannot be compiled: {error}") from error

    def _get_compiler(self) -> Any:
        if self._compiler is None:
            import xgrammar

            info = xgrammar.TokenizerInfo.from_huggingface(
                self._tokenizer, vocab_size=self._vocab_size, stop_token_ids=self._stop_ids
            )
            self._compiler = xgrammar.GrammarCompiler(info, max_threads=1)
        return self._compiler


def matcher_for(grammar: Any) -> Any:
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
