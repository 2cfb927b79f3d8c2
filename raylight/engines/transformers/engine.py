"""The engine `transformers`: continuous batching on plain transformers, for a CPU or one small GPU.

transformers' own continuous batching is not used: on a CPU it is slower than this engine, it has no seed per
request, and it shares cached prefixes across weight updates.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from starlette.types import ASGIApp
from transformers import AutoTokenizer

from raylight.config import cpu_threads
from raylight.engines.capture_context import CURRENT, Sample
from raylight.engines.grammar import Grammars, matcher_for
from raylight.engines.protocol import EngineLoad, EngineSettings, LoraAdapter, UpdateMode
from raylight.engines.transformers.app import build_app
from raylight.engines.transformers.decoder import Decoder
from raylight.engines.transformers.message import PARSERS, MessageStyle, find_style
from raylight.engines.transformers.sampling import SamplingParams
from raylight.engines.transformers.sequence import Choices, Sequence
from raylight.engines.transformers.text import TextStream, Vocabulary
from raylight.engines.transformers.worker import CLOSED, EngineWorker
from raylight.errors import ConfigError, WeightSyncError
from raylight.http.errors import ContextLengthError, RequestError
from raylight.http.field_bounds import check_answer_size
from raylight.images.image import Image
from raylight.images.model_inputs import ModelImages
from raylight.types import Tokenizer, TopLogprobs
from raylight.types.images import PlacedImage
from raylight.weights.transports import make_receiver

logger = logging.getLogger(__name__)
T = TypeVar("T")
UNKNOWN_CALLS = (
    "the model's tool calls stay text, because their notation is not known: %s; set engine.args.tool_parser "
    "to one of %s if it writes them so. Requests with tools are refused, unless their tool_choice is none"
)
NO_SLEEP = "sleep frees memory only on a GPU; nothing was done"
MIN_PRODUCTS = 2**20
"""Multiplications of a layer's pass from which oneDNN is faster; a call of it costs 10 microseconds more."""


def build_engine(settings: EngineSettings, **args: Any) -> TransformersEngine:
    """Make the engine of a replica.

    Args:
        args: `tool_parser`, `reasoning`, `max_new_tokens` and `record_routes` of the engine.

    Raises:
        ConfigError: `max_new_tokens` is not a positive integer.
    """
    limit = args.get("max_new_tokens")
    if limit is not None and not (type(limit) is int and limit > 0):
        raise ConfigError(f"engine.args['max_new_tokens'] is {limit!r:.80}; give a positive integer")
    config = settings.config
    torch.set_num_threads(cpu_threads(config))
    return TransformersEngine(
        settings.model_path,
        settings.model,
        dtype=config.dtype,
        slots=config.max_concurrent,
        max_waiting=config.max_waiting,
        max_model_len=config.max_model_len,
        seed=settings.seed,
        device=settings.device,
        transport=config.weight_transfer,
        **args,
    )


class TransformersEngine:
    """`Engine` on transformers, with continuous batching of concurrent requests.

    A model with a vision part and the files of its processor is loaded whole, and takes images.

    Weights, adapters and sleep change between two decoding steps, on the engine's thread.

    Args:
        path: folder of a Hugging Face model and tokenizer.
        model: name under which the model is served.
        dtype: torch dtype of the parameters.
        slots: sequences decoded concurrently.
        max_waiting: requests that may wait for a slot.
        max_model_len: longest prompt plus response, in tokens; the model's own limit applies if it is lower.
        seed: seed for requests that set no seed.
        device: torch device.
        tool_parser: notation of the model's tool calls, a key of `PARSERS`; "auto" detects it from the chat
            template, None disables tools.
        reasoning: True if the model writes reasoning, in the notation of its chat template or else between
            `<think>` and `</think>`; "auto" detects it from the chat template.
        max_new_tokens: longest response, in tokens; a request can only lower it. None: no limit.
        transport: name of the transport of weights.
        record_routes: record the experts that each token is sent to.
    """

    workers = 1
    fast_linear = True
    """Compute linear layers by the faster kernels (`use_fast_linear`), where they are."""
    closing_s: float | None = 10.0
    """Seconds for which closing waits for the step in progress; None for no limit."""

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
        transport: str = "auto",
        record_routes: bool = False,
    ) -> None:
        self.model = model
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.images = ModelImages.load(path)
        self._decoder = Decoder(path, dtype, device, slots, max_model_len, record_routes, self.images)
        config = self._decoder.module.config.get_text_config()
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
        if self.fast_linear and self._decoder.device.type == "cpu":
            use_fast_linear(self._decoder.module)
        self._receiver = make_receiver(transport)
        self._incomplete = False
        """True once an update has loaded weights, until it is complete."""

    async def app(self) -> ASGIApp:
        return build_app(self)

    @property
    def version(self) -> int:
        """Version of the weights that it samples with."""
        return self._worker.version

    # sampling

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
        images: tuple[Image, ...] = (),
        places: tuple[PlacedImage, ...] = (),
    ) -> Choices:
        """Start sampling one response per prompt.

        Close the choices (`with`), which cancels those that still run.

        Args:
            params: one per prompt.
            adapter: name of the adapter to sample with; None samples with the model itself.
            streams: notify of every token, not only of the end.
            images: images of each prompt.
            places: places of these images in each prompt.

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
            sample = new_sample(index, np.asarray(prompt, np.int32), capped.as_record(), images=places)
            sequences.append(self._sequence(sample, capped, progressed, adapter, streams, images))
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
        images: tuple[Image, ...],
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
            images=images,
            adapter_name=adapter,
            generator=generator,
            grammar_matcher=matcher_for(params.grammar),
            stop_words=stops,
        )

    def _release(self, count: int) -> None:
        self._in_flight -= count

    # weights and adapters

    async def init_weight_transfer_engine(self, info: Mapping[str, object]) -> None:
        await asyncio.to_thread(self._receiver.init, info)

    async def start_weight_update(self, mode: UpdateMode = "keep") -> None:
        def start() -> None:
            self._worker.updating = True
            if mode == "abort":
                self._worker.abort(None)

        try:
            await self._run(start, mode)
        except BaseException:
            self._receiver.close()  # so that the sender does not wait for this engine
            raise

    async def update_weights(self, info: Any) -> None:
        def receive() -> None:
            try:
                self._decoder.check_weights(dict(zip(info["names"], info["shapes"], strict=True)))
                for group in self._receiver.receive(info):
                    self._incomplete = True
                    self._decoder.load(group)
            except BaseException:
                self._receiver.close()  # so that the sender does not wait for this engine
                raise

        await self._run(receive)

    async def finish_weight_update(self, version: int) -> None:
        """Sample with the new weights.

        Under "keep" the cache of the sequences in flight is recomputed, so that each later token is sampled
        from exactly the new weights.
        """

        def finish() -> None:
            self._worker.version = version
            self._worker.recompute()
            self._worker.updating = self._incomplete = False

        await self._run(finish)

    async def abort_weight_update(self) -> None:
        def abort() -> None:
            self._receiver.close()
            self._worker.updating = self._incomplete

        await self._run(abort)

    async def load_adapter(
        self, name: str, version: int, adapter: LoraAdapter, mode: UpdateMode = "keep"
    ) -> None:
        def load() -> None:
            self._decoder.adapters.load(name, version, adapter)
            self._decoder.prefixes.clear()
            if mode == "abort":
                self._worker.abort(name)
            self._worker.unload_unused()

        await self._run(load, mode)

    async def drop_adapter(self, name: str) -> None:
        def drop() -> None:
            self._decoder.adapters.drop(name)
            self._worker.unload_unused()

        await self._run(drop)

    async def logprobs(
        self, ids: list[int], adapter: str | None = None, temperature: float = 1.0
    ) -> list[float]:
        def compute() -> list[float]:
            loaded = self._decoder.adapters.find(adapter) if adapter is not None else None
            if adapter is not None and loaded is None:
                raise WeightSyncError(f"there is no adapter {adapter!r}")
            return self._decoder.logprobs(ids, loaded, temperature)

        return await self._score(ids, compute)

    async def top_logprobs(self, ids: list[int], k: int, temperature: float = 1.0) -> TopLogprobs:
        return await self._score(ids, lambda: self._decoder.top_logprobs(ids, k, temperature))

    async def _score(self, ids: list[int], compute: Callable[[], T]) -> T:
        if not 2 <= len(ids) <= self.max_model_len or min(ids) < 0 or max(ids) >= self.vocab_size:
            raise WeightSyncError(
                f"log-probs need 2 to {self.max_model_len} token ids from 0 to {self.vocab_size - 1}"
            )

        def checked() -> T:
            if self._worker.asleep:
                raise WeightSyncError("the engine is asleep; wake it first")
            if self._incomplete:
                raise WeightSyncError("an update of the weights was broken off; publish a new version")
            return compute()

        return await self._run(checked)

    async def _run(self, action: Callable[[], T], mode: UpdateMode = "keep") -> T:
        """Run an action between two decoding steps; under "wait", when nothing is in flight."""
        try:
            return await self._worker.run(action, when_idle=mode == "wait")
        except RequestError as error:
            raise WeightSyncError(str(error)) from error

    # life cycle

    async def sleep(self, level: int = 1) -> str | None:
        if self._decoder.device.type == "cpu":
            return NO_SLEEP

        def sleep() -> None:
            self._worker.recompute()
            self._decoder.offload()
            self._worker.asleep = True

        await self._run(sleep)
        return None

    async def wake(self) -> None:
        def wake() -> None:
            self._decoder.reload()
            self._worker.asleep = False

        await self._run(wake)

    def load(self) -> EngineLoad:
        """Return the current load. A sequence has a slot for as long as it runs, so none is preempted."""
        worker, decoder = self._worker, self._decoder
        active = list(decoder.active)
        capacity = decoder.slots * self.max_model_len
        return EngineLoad(
            kv_use=sum(sequence.length for sequence in active) / capacity,
            running=len(active),
            waiting=max(self._in_flight - len(active), 0),
            capacity=capacity,
            paused=worker.asleep or worker.updating,
        )

    async def check_health(self) -> None:
        if self._worker.closed or not self._worker.thread.is_alive():
            reason = CLOSED if self._worker.closed else "the engine's thread has died"
            raise RequestError(reason, 503, "overloaded_error")

    def close(self) -> None:
        self._worker.close(self.closing_s)
        self._receiver.close()


class TrainableEngine(TransformersEngine):
    """Engine that samples from a module which is trained between two decoding steps, so weights are never
    copied."""

    fast_linear = False  # its log-probs must equal the learner's to the last bit
    closing_s = None  # Python aborts if it ends during a backward pass of another thread

    @property
    def module(self) -> Any:
        """Model. After the first request, only the engine's thread may use it (`run_between_steps`,
        `change_weights`)."""
        return self._decoder.module

    async def change_weights(self, action: Callable[[], tuple[int, T]]) -> T:
        """Change the weights in the engine's thread.

        Sampling pauses. Later tokens have the new weight version; requests in flight continue with a
        recomputed cache.

        Args:
            action: changes the weights; returns their new version, and the result of this method.
        """

        def change() -> T:
            try:
                with torch.inference_mode(False):
                    self._worker.version, result = action()
            finally:
                if self._decoder.vision is not None:
                    self._decoder.vision.clear()
                self._worker.recompute()
            return result

        return await self._run(change)

    async def run_between_steps(self, action: Callable[[], T]) -> T:
        """Run an action that does not change the weights in the engine's thread and return its result."""

        def act() -> T:
            with torch.inference_mode(False):
                return action()

        return await self._run(act)


def use_fast_linear(module: torch.nn.Module) -> None:
    """Have the float32 linear layers of a module on a CPU computed by the faster kernels, if there are any.

    torch multiplies float32 matrices with MKL, which uses only AVX2 on AMD's processors; oneDNN's kernels,
    which torch has too, are twice as fast there with AVX-512. The results differ by rounding.
    """
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not torch.backends.mkldnn.is_available():
        return
    for layer in module.modules():
        if type(layer) is torch.nn.Linear and layer.weight.dtype == torch.float32:
            layer.__class__ = FastLinear


class FastLinear(torch.nn.Linear):
    """A linear layer whose large products oneDNN computes on a CPU, if no gradient is needed."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight, self.bias
        if (
            input.numel() * len(weight) < MIN_PRODUCTS
            or input.device.type != "cpu"
            or input.dtype != torch.float32
            or torch.is_grad_enabled()
        ):
            return super().forward(input)
        rows = input.reshape(-1, input.shape[-1])
        product = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
        return product.view(*input.shape[:-1], len(weight))


def _stop_ids(module: Any, tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids that end a response: the model's own and the tokenizer's."""
    ids = module.generation_config.eos_token_id
    ids = ids if isinstance(ids, list) else [ids]
    return frozenset(i for i in [*ids, tokenizer.eos_token_id] if i is not None)
