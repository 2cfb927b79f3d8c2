"""A small engine on plain transformers: continuous batching with a key-value cache, for a CPU or one small GPU.

transformers' own continuous batching is not used: on a CPU it is slower than this loop, it has no seed per request, and it shares
cached prefixes across weight updates.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, TypeVar

import torch
from starlette.types import ASGIApp
from transformers import AutoTokenizer

from raylight.engines.capture_context import CURRENT, Sample
from raylight.engines.protocol import LoraAdapter, UpdateMode
from raylight.engines.transformers.app import build_app
from raylight.engines.transformers.choices import Choices
from raylight.engines.transformers.decoder import Decoder
from raylight.engines.transformers.grammar import Grammars, follow
from raylight.engines.transformers.message import MARKERS, Style, find_style
from raylight.engines.transformers.params import SamplingParams
from raylight.engines.transformers.sequence import Sequence
from raylight.engines.transformers.text import TextStream
from raylight.engines.transformers.tools import ToolParserName
from raylight.engines.transformers.vocabulary import Vocabulary
from raylight.engines.transformers.worker import CLOSED, Worker
from raylight.errors import WeightSyncError
from raylight.http.errors import RequestError

T = TypeVar("T")
NO_SLEEP = "sleep frees memory only on a GPU; nothing was done"


class TransformersEngine:
    """Implements `Engine` on `AutoModelForCausalLM`.

    Args:
        path: folder of a Hugging Face model and tokenizer.
        model: the name under which it is served.
        slots: sequences decoded at once.
        max_waiting: requests that may wait for a slot.
        tool_parser: how the model writes tool calls; "auto" looks at its chat template, None knows none.
        reasoning: whether the model thinks aloud between `<think>` and `</think>`; "auto" looks at its chat template.
    """

    kind = "transformers"

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
        tool_parser: ToolParserName | Literal["auto"] | None = "auto",
        reasoning: bool | Literal["auto"] = "auto",
    ) -> None:
        self.model = model
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self._decoder = Decoder(path, dtype, device, slots)
        config = self._decoder.module.config
        self.max_model_len = min(max_model_len, config.max_position_embeddings)
        self.vocab_size: int = config.vocab_size
        self.style: Style = find_style(self.tokenizer, tool_parser, reasoning)
        self.vocabulary = Vocabulary(self.tokenizer, MARKERS)
        self._longest_text = self.max_model_len * max(map(len, self.tokenizer.get_vocab()))
        stop_ids = _stop_ids(self._decoder.module, self.tokenizer)
        self.grammars = Grammars(self.tokenizer, self.vocab_size, stop_ids)
        self._limit = slots + max_waiting
        self._max_waiting = max_waiting
        self._in_flight = 0
        self._worker = Worker(self._decoder, stop_ids, seed)

    async def app(self) -> ASGIApp:
        return build_app(self)

    # sampling

    def begin(
        self,
        prompts: list[list[int]],
        params: list[SamplingParams],
        adapter: str | None = None,
        streams: bool = False,
    ) -> Choices:
        """Begin to sample a response to each prompt. The choices must be closed (`with`); that cancels those that still run.

        Args:
            params: one per prompt.
            adapter: the adapter to sample with.
            streams: tell of each token, not only of the end.

        Raises:
            RequestError: a prompt does not fit, or too many requests wait.
        """
        if self._worker.closed:
            raise RequestError(CLOSED, 503, "overloaded_error")
        for prompt in prompts:
            self._check_prompt(prompt)
        if self._in_flight + len(prompts) > self._limit:
            raise RequestError(
                f"{self._max_waiting} requests are waiting already; try again later", 503, "overloaded_error"
            )
        news, exchange = asyncio.Event(), CURRENT.get()
        sequences = []
        for index, (prompt, given) in enumerate(zip(prompts, params, strict=True)):
            own = replace(given, max_tokens=min(given.max_tokens, self.max_model_len - len(prompt)))
            begin = exchange.sample if exchange is not None else Sample
            sequences.append(self._sequence(begin(index, prompt, own.record()), own, news, adapter, streams))
        self._in_flight += len(sequences)
        self._worker.submit(sequences)
        return Choices(sequences, news, lambda: self._release(len(sequences)))

    async def generate(self, prompt: list[int], params: SamplingParams, adapter: str | None = None) -> Sample:
        """Sample one response; cancelling the call frees its place.

        Raises:
            RequestError: as for `begin`.
        """
        with self.begin([prompt], [params], adapter) as choices:
            (sequence,) = await choices.end()
        return sequence.sample

    def check_text(self, text: str) -> None:
        """Refuse a text that cannot fit, whatever its tokens are, before a tokenizer spends seconds on it.

        Raises:
            RequestError: it is too long.
        """
        if len(text) > self._longest_text:
            raise RequestError(
                f"the text has {len(text)} characters; this model takes at most {self.max_model_len - 1} tokens"
            )

    def _check_prompt(self, ids: list[int]) -> None:
        if not ids:
            raise RequestError("the prompt is empty")
        if len(ids) >= self.max_model_len:
            raise RequestError(
                f"the prompt has {len(ids)} tokens; this model takes at most {self.max_model_len - 1}"
            )
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            raise RequestError(f"token ids must be between 0 and {self.vocab_size - 1}")

    def _sequence(
        self, sample: Sample, params: SamplingParams, news: asyncio.Event, adapter: str | None, streams: bool
    ) -> Sequence:
        sequence = Sequence(
            sample, params, asyncio.get_running_loop(), news, streams, adapter, matcher=follow(params.grammar)
        )
        if params.seed is not None:
            sequence.generator = torch.Generator(self._decoder.device).manual_seed(params.seed)
        if params.stop:
            sequence.stops = TextStream(self.vocabulary.text, params.stop, params.min_tokens)
        return sequence

    def _release(self, count: int) -> None:
        self._in_flight -= count

    # weights and adapters

    @property
    def version(self) -> int:
        """Of the weights that it samples with."""
        return self._worker.version

    @property
    def adapters(self) -> list[str]:
        """Names of the adapters that are served."""
        return self._decoder.adapters.names

    async def load_weights(self, version: int, weights: Mapping[str, Any], mode: UpdateMode = "keep") -> None:
        """Take new weights. Under "keep" the cache of the sequences in flight is computed again, so that each later token is
        sampled from exactly the new weights.
        """
        if version <= self.version:
            raise WeightSyncError(
                f"version {version} is not newer than {self.version}; versions are never reused"
            )

        def load() -> None:
            self._decoder.load(weights)
            self._worker.version = version
            if mode == "abort":
                self._worker.abort(None)
            self._worker.recompute()

        await self._update(load, mode)

    async def load_adapter(
        self, name: str, version: int, adapter: LoraAdapter, mode: UpdateMode = "keep"
    ) -> None:
        if name == self.model:
            raise WeightSyncError(f"{name!r} is the name of the model itself")

        def load() -> None:
            self._decoder.adapters.load(name, version, adapter)
            if mode == "abort":
                self._worker.abort(name)
            self._worker.unload_unused()

        await self._update(load, mode)

    async def drop_adapter(self, name: str) -> None:
        def drop() -> None:
            self._decoder.adapters.drop(name)
            self._worker.unload_unused()

        await self._update(drop)

    async def logprobs(self, ids: list[int], adapter: str | None = None) -> list[float]:
        if not 2 <= len(ids) <= self.max_model_len or min(ids) < 0 or max(ids) >= self.vocab_size:
            raise WeightSyncError(
                f"log-probabilities are told of 2 to {self.max_model_len} token ids below {self.vocab_size}"
            )

        def compute() -> list[float]:
            found = self._decoder.adapters.find(adapter) if adapter is not None else None
            if adapter is not None and found is None:
                raise WeightSyncError(f"there is no adapter {adapter!r}")
            if self._worker.asleep:
                raise WeightSyncError("the engine sleeps")
            return self._decoder.logprobs(ids, found)

        return await self._update(compute)

    async def _update(self, action: Callable[[], T], mode: UpdateMode = "keep") -> T:
        try:
            return await self._worker.do(action, after_all=mode == "wait")
        except RequestError as error:
            raise WeightSyncError(str(error)) from error

    # life

    async def sleep(self, level: int = 1) -> str | None:
        if self._decoder.device.type == "cpu":
            return NO_SLEEP

        def sleep() -> None:
            self._worker.recompute()
            self._decoder.leave()
            self._worker.asleep = True

        await self._update(sleep)
        return None

    async def wake(self) -> None:
        def wake() -> None:
            self._decoder.enter()
            self._worker.asleep = False

        await self._update(wake)

    async def check_health(self) -> None:
        if self._worker.closed or not self._worker.thread.is_alive():
            raise RequestError(
                CLOSED if self._worker.closed else "the engine's thread has died", 503, "overloaded_error"
            )

    def close(self) -> None:
        self._worker.close()


def _stop_ids(module: Any, tokenizer: Any) -> frozenset[int]:
    """Ids that end a response: the model's own and the tokenizer's."""
    ids = module.generation_config.eos_token_id
    ids = ids if isinstance(ids, list) else [ids]
    return frozenset(i for i in [*ids, tokenizer.eos_token_id] if i is not None)
