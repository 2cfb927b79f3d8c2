"""The sampling core of the transformers engine: prompts in token ids in, sampled sequences out.

The HTTP routes (`app.py`) are built on a Sampler; `TransformersEngine` adds weights, adapters and sleep.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from transformers import AutoTokenizer

from raylight.engines.capture_context import CURRENT, Sample
from raylight.engines.grammar import Grammars, matcher_for
from raylight.engines.transformers.choices import Choices
from raylight.engines.transformers.decoder import Decoder
from raylight.engines.transformers.message import PARSERS, MessageStyle, find_style
from raylight.engines.transformers.sampling import SamplingParams
from raylight.engines.transformers.sequence import Sequence
from raylight.engines.transformers.text import TextStream, Vocabulary
from raylight.engines.transformers.worker import CLOSED, EngineWorker
from raylight.http.bounds import check_answer_size
from raylight.http.context_length import ContextLengthError
from raylight.http.errors import RequestError

UNKNOWN_CALLS = (
    "the model's tool calls stay text, because their notation is not known: %s; set engine.args.tool_parser "
    "to one of %s if it writes them so. Requests with tools are refused, unless their tool_choice is none"
)
logger = logging.getLogger(__name__)


class Sampler:
    """Samples from a Hugging Face model, with continuous batching of concurrent requests.

    Args:
        path: folder of a Hugging Face model and tokenizer.
        model: name under which the model is served.
        dtype: torch dtype of the parameters.
        slots: sequences decoded concurrently.
        max_waiting: requests that may wait for a slot.
        max_model_len: longest prompt plus response, in tokens; the model's own limit applies if it is lower.
        seed: seed for requests without a seed of their own.
        device: torch device.
        tool_parser: notation of the model's tool calls, a key of `PARSERS`; "auto" detects it from the chat
            template, None disables tools.
        reasoning: True if the model writes reasoning, in the notation of its chat template or else between
            `<think>` and `</think>`; "auto" detects it from the chat template.
        max_new_tokens: longest response, in tokens; a request can only lower it. None: no limit.
    """

    def __init__(
        self,
        path: str,
        model: str,
        *,
        dtype: str = "float32",
        slots: int = 64,
        max_waiting: int = 1024,
        max_model_len: int = 4096,
        seed: int = 0,
        device: str = "cpu",
        tool_parser: str | None = "auto",
        reasoning: bool | Literal["auto"] = "auto",
        max_new_tokens: int | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self._decoder = Decoder(path, dtype, device, slots, max_model_len)
        config = self._decoder.module.config
        self.max_model_len = min(max_model_len, config.max_position_embeddings)
        self._max_new_tokens = max_new_tokens or self.max_model_len
        self.vocab_size: int = config.vocab_size
        self.style: MessageStyle = find_style(self.tokenizer, tool_parser, reasoning, config.model_type)
        if self.style.tool_format is None and "tools" in self.style.template and tool_parser == "auto":
            logger.warning(UNKNOWN_CALLS, self.style.reason, ", ".join(PARSERS))
        self.vocabulary = Vocabulary(self.tokenizer, self.style.texts)
        self._max_token_len = max(map(len, self.tokenizer.get_vocab()))
        stop_ids = _stop_ids(self._decoder.module, self.tokenizer)
        self.grammars = Grammars(self.tokenizer, self.vocab_size, stop_ids)
        self._max_in_flight = slots + max_waiting
        self._max_waiting = max_waiting
        self._in_flight = 0
        self._worker = EngineWorker(self._decoder, stop_ids, seed)

    @property
    def adapters(self) -> list[str]:
        """Names of the adapters that are served."""
        return self._decoder.adapters.names

    def begin(
        self,
        prompts: list[list[int]],
        params: list[SamplingParams],
        adapter: str | None = None,
        streams: bool = False,
    ) -> Choices:
        """Start sampling one response per prompt.

        Close the choices (`with`), which cancels those that still run.

        Args:
            params: one per prompt.
            adapter: name of the adapter to sample with; None samples with the model itself.
            streams: notify of every token, not only of the end.

        Raises:
            RequestError: a prompt does not fit, too many requests wait, or the engine is closed.
        """
        if self._worker.closed:
            raise RequestError(CLOSED, 503, "overloaded_error")
        for prompt in prompts:
            self._check_prompt(prompt)
        if len(prompts) > self._max_in_flight:
            raise RequestError(
                f"n: this engine takes at most {self._max_in_flight} choices at a time; the request has "
                f"{len(prompts)}"
            )
        limits = (self._max_new_tokens, self.max_model_len - min(map(len, prompts)))
        longest = min(max(p.max_tokens for p in params), *limits)
        check_answer_size(len(prompts), longest, max(p.top_logprobs for p in params))
        if self._in_flight + len(prompts) > self._max_in_flight:
            raise RequestError(
                f"{self._max_waiting} requests are waiting already; try again later", 503, "overloaded_error"
            )
        progressed, capture = asyncio.Event(), CURRENT.get()
        new_sample = capture.sample if capture is not None else Sample
        sequences = []
        for index, (prompt, requested) in enumerate(zip(prompts, params, strict=True)):
            limit = min(requested.max_tokens, self._max_new_tokens, self.max_model_len - len(prompt))
            if capture is not None and capture.max_tokens is not None:
                limit = min(limit, capture.max_tokens)
            capped = replace(requested, max_tokens=limit)
            sample = new_sample(index, np.asarray(prompt, np.int32), capped.as_record())
            sequences.append(self._sequence(sample, capped, progressed, adapter, streams))
        self._in_flight += len(sequences)
        self._worker.submit(sequences)
        return Choices(sequences, progressed, lambda: self._release(len(sequences)))

    async def generate(self, prompt: list[int], params: SamplingParams, adapter: str | None = None) -> Sample:
        """Sample one response; cancelling the call frees its slot.

        Raises:
            RequestError: as for `begin`.
        """
        with self.begin([prompt], [params], adapter) as choices:
            (sequence,) = await choices.end()
        return sequence.sample

    def check_text(self, text: str) -> None:
        """Reject a text that cannot fit whatever its tokens are, before the tokenizer spends seconds on it.

        Raises:
            RequestError: the text is too long.
        """
        if len(text) > self.max_model_len * self._max_token_len:
            tokens = -(-len(text) // self._max_token_len)
            raise ContextLengthError(self.max_model_len, tokens, at_least=True)

    def _check_prompt(self, ids: list[int]) -> None:
        if not ids:
            raise RequestError("the prompt is empty")
        if len(ids) >= self.max_model_len:
            raise ContextLengthError(self.max_model_len, len(ids))
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            raise RequestError(f"token ids must be between 0 and {self.vocab_size - 1}")

    def _sequence(
        self,
        sample: Sample,
        params: SamplingParams,
        progressed: asyncio.Event,
        adapter: str | None,
        streams: bool,
    ) -> Sequence:
        generator = None
        if params.seed is not None:
            generator = torch.Generator(self._decoder.device).manual_seed(params.seed)
        stops = TextStream(self.vocabulary.text, params.stop, params.min_tokens) if params.stop else None
        return Sequence(
            sample=sample,
            params=params,
            loop=asyncio.get_running_loop(),
            progressed=progressed,
            streams=streams,
            adapter_name=adapter,
            generator=generator,
            grammar_matcher=matcher_for(params.grammar),
            stop_words=stops,
        )

    def _release(self, count: int) -> None:
        self._in_flight -= count


def _stop_ids(module: Any, tokenizer: Any) -> frozenset[int]:
    """Return the ids that end a response: the model's own and the tokenizer's."""
    ids = module.generation_config.eos_token_id
    ids = ids if isinstance(ids, list) else [ids]
    return frozenset(i for i in [*ids, tokenizer.eos_token_id] if i is not None)
