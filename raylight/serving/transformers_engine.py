"""A small engine on plain transformers: continuous batching with a key-value cache, for a CPU or one small GPU.

One thread computes. Requests and weights reach it through one queue and are taken up between two decoding steps, so that a token
is produced by exactly one weight version. transformers' own continuous batching is not used: on a CPU it is slower than this loop,
it has no seed per request, and it shares cached prefixes across weight updates.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from raylight.errors import WeightSyncError
from raylight.serving.engine import RequestError, Sampled, SamplingParams
from raylight.serving.sampling import sample
from raylight.serving.slot_cache import SlotCache

CLOSED = "the engine is shutting down"
PREFILL_TOKENS = 8192
"""Padded tokens of one prefill pass."""


@dataclass(eq=False)
class Sequence:
    """A request on its way through the engine."""

    prompt_ids: list[int]
    params: SamplingParams
    future: asyncio.Future[Sampled]
    generator: torch.Generator | None = None
    sampled: Sampled = field(default_factory=Sampled)
    cancelled: bool = False

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.sampled.output_ids)


@dataclass(frozen=True)
class NewWeights:
    version: int
    weights: Mapping[str, Any]
    future: asyncio.Future[None]


class TransformersEngine:
    """Implements `Engine` on `AutoModelForCausalLM`.

    Args:
        path: folder of a Hugging Face model and tokenizer.
        model: the name under which it is served.
        slots: sequences decoded at once.
        max_waiting: requests that may wait for a slot.
    """

    def __init__(
        self, path: str, model: str, *, dtype: str, slots: int, max_waiting: int, max_model_len: int, seed: int, device: str
    ) -> None:
        self.model = model
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        module: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), attn_implementation="sdpa")
        self._module = module.to(device).eval()
        self._device = torch.device(device)
        self.max_model_len = min(max_model_len, self._module.config.max_position_embeddings)
        self._stop_ids = _stop_ids(self._module, self.tokenizer)
        self._slots, self._max_waiting = slots, max_waiting
        self._cache = SlotCache(self._module.config.num_hidden_layers, slots)
        self._random = torch.Generator(device).manual_seed(seed)
        self._inbox: queue.SimpleQueue[Sequence | NewWeights | None] = queue.SimpleQueue()
        self._waiting: deque[Sequence] = deque()
        self._active: list[Sequence] = []
        self._in_flight = 0
        self._closed = False
        self.version = 0
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    async def generate(self, prompt_ids: list[int], params: SamplingParams) -> Sampled:
        if self._closed:
            raise RequestError(CLOSED, 503, "overloaded_error")
        if not prompt_ids:
            raise RequestError("the prompt is empty")
        room = self.max_model_len - len(prompt_ids)
        if room < 1:
            raise RequestError(f"the prompt has {len(prompt_ids)} tokens; this model takes at most {self.max_model_len - 1}")
        if self._in_flight >= self._slots + self._max_waiting:
            raise RequestError(f"{self._max_waiting} requests are waiting already; try again later", 503, "overloaded_error")
        if params.max_tokens > room:
            params = SamplingParams(**{**vars(params), "max_tokens": room})
        sequence = Sequence(prompt_ids, params, asyncio.get_running_loop().create_future())
        if params.seed is not None:
            sequence.generator = torch.Generator(self._device).manual_seed(params.seed)
        self._in_flight += 1
        self._inbox.put(sequence)
        try:
            return await sequence.future
        finally:
            sequence.cancelled = True  # no effect on one that has ended
            self._in_flight -= 1

    async def load_weights(self, version: int, weights: Mapping[str, Any]) -> None:
        if self._closed:
            raise WeightSyncError(CLOSED)
        message = NewWeights(version, weights, asyncio.get_running_loop().create_future())
        self._inbox.put(message)
        await message.future

    def close(self) -> None:
        self._closed = True
        self._inbox.put(None)
        self._thread.join(timeout=10)

    # the engine's thread

    def _work(self) -> None:
        with torch.inference_mode():
            while self._take_messages():
                try:
                    self._drop_cancelled()
                    self._prefill()
                    self._decode()
                except Exception as error:  # whatever broke, the callers that wait for this step must hear of it
                    self._fail_all(error)
        while not self._inbox.empty():  # what came between the last look and the closing
            self._take_messages()
        self._fail_all(RequestError(CLOSED, 503, "overloaded_error"))

    def _take_messages(self) -> bool:
        """Take what has arrived; wait if there is nothing to compute. False once the engine closes."""
        idle = not (self._active or self._waiting)
        while True:
            try:
                message = self._inbox.get(block=idle)
            except queue.Empty:
                return True
            idle = False
            if message is None:
                return False
            if isinstance(message, Sequence):
                self._waiting.append(message)
            else:
                self._load(message)

    def _load(self, message: NewWeights) -> None:
        try:
            load_state(self._module, message.weights)
            self.version = message.version
        except Exception as error:  # reported to the caller of load_weights
            _resolve([(message.future, error)])
        else:
            _resolve([(message.future, None)])

    def _prefill(self) -> None:
        """Admit as many waiting sequences as slots and one pass allow, and sample their first tokens."""
        admitted: list[Sequence] = []
        longest = 0
        while self._waiting and len(self._active) + len(admitted) < self._slots:
            longest = max(longest, self._waiting[0].length)
            if admitted and longest * (len(admitted) + 1) > PREFILL_TOKENS:
                break
            admitted.append(self._waiting.popleft())
        if not admitted:
            return
        lengths = torch.tensor([s.length for s in admitted])
        width = int(lengths.max())
        ids = torch.zeros(len(admitted), width, dtype=torch.long)
        for row, sequence in enumerate(admitted):
            ids[row, : sequence.length] = torch.tensor(sequence.prompt_ids)
        self._cache.prefill(len(self._active), len(admitted), width)
        places = torch.arange(width, device=self._device)
        mask = (places[None, :] <= places[:, None])[None, None].expand(len(admitted), 1, width, width)
        last, which = (lengths - 1).unique(return_inverse=True)  # logits only where some row ends
        self._active += admitted  # before the pass: if it fails, these fail with it
        logits = self._forward(ids.to(self._device), places[None].expand(len(admitted), -1), mask, last.to(self._device))
        self._append(admitted, logits[torch.arange(len(admitted)), which])

    def _decode(self) -> None:
        """One more token for every active sequence."""
        if not self._active:
            return
        positions = torch.tensor([s.length - 1 for s in self._active], device=self._device)
        ids = torch.tensor([[s.sampled.output_ids[-1]] for s in self._active], device=self._device)
        self._cache.decode(positions)
        places = torch.arange(self._cache.window.width, device=self._device)
        mask = (places[None] <= positions[:, None])[:, None, None]
        logits = self._forward(ids, positions[:, None], mask, torch.zeros(1, dtype=torch.long, device=self._device))
        self._append(list(self._active), logits[:, 0])

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        """Logits of shape (rows, len(keep), vocabulary) at the places `keep`."""
        return self._module(
            input_ids=ids, position_ids=positions, attention_mask=mask, past_key_values=self._cache, use_cache=True,
            logits_to_keep=keep,
        ).logits  # fmt: skip

    def _append(self, sequences: list[Sequence], logits: torch.Tensor) -> None:
        """Sample a token for each sequence and end those that are complete."""
        tokens, logprobs = sample(logits, [s.params for s in sequences], [s.generator for s in sequences], self._random)
        for sequence, token, logprob in zip(sequences, tokens.tolist(), logprobs.tolist(), strict=True):
            sampled = sequence.sampled
            sampled.output_ids.append(token)
            sampled.logprobs.append(logprob)
            sampled.weight_versions.append(self.version)
        ended = [s for s in sequences if self._is_complete(s)]
        for sequence in ended:
            self._free(sequence)
        self._answer([(s, s.sampled) for s in ended])

    def _is_complete(self, sequence: Sequence) -> bool:
        sampled, params = sequence.sampled, sequence.params
        if sampled.output_ids[-1] in self._stop_ids or (params.stop and self._has_stop_string(sequence)):
            sampled.finish_reason = "stop"
        elif len(sampled.output_ids) >= params.max_tokens:
            sampled.finish_reason = "length"
        else:
            return False
        return True

    def _has_stop_string(self, sequence: Sequence) -> bool:
        text = self.tokenizer.decode(sequence.sampled.output_ids, skip_special_tokens=True)
        return any(word in text for word in sequence.params.stop)

    def _free(self, sequence: Sequence) -> None:
        """Give a sequence's slot to the last active one, so that slots stay dense."""
        slot, last = self._active.index(sequence), len(self._active) - 1
        if slot != last:
            self._cache.move(last, slot, self._active[last].length)
            self._active[slot] = self._active[last]
        self._active.pop()

    def _drop_cancelled(self) -> None:
        self._waiting = deque(s for s in self._waiting if not s.cancelled)
        for sequence in [s for s in self._active if s.cancelled]:
            self._free(sequence)

    def _fail_all(self, error: Exception) -> None:
        sequences, self._active = [*self._active, *self._waiting], []
        self._waiting.clear()
        self._answer([(s, error) for s in sequences])

    def _answer(self, answers: list[tuple[Sequence, Any]]) -> None:
        """Wake the callers, all of one step at once."""
        _resolve([(sequence.future, result) for sequence, result in answers])


def load_state(module: torch.nn.Module, weights: Mapping[str, Any]) -> None:
    """Copy named arrays into a model's parameters, in its own dtype and on its own device.

    Raises:
        WeightSyncError: a parameter is missing, unknown, or of another shape. A tied output layer may be missing.
    """
    own = module.state_dict()
    tied = set(getattr(module, "all_tied_weights_keys", None) or ())
    missing, unknown = own.keys() - weights.keys() - tied, weights.keys() - own.keys()
    if missing or unknown:
        raise WeightSyncError(f"weights do not fit the model: missing {sorted(missing)[:3]}, unknown {sorted(unknown)[:3]}")
    tensors = {name: torch.as_tensor(array) for name, array in weights.items()}
    for name, tensor in tensors.items():  # all before the first is copied, so that no model is left half loaded
        if tensor.shape != own[name].shape:
            raise WeightSyncError(f"{name} has shape {tuple(tensor.shape)}, the engine's has {tuple(own[name].shape)}")
    for name, tensor in tensors.items():
        own[name].copy_(tensor)


def _stop_ids(module: Any, tokenizer: Any) -> frozenset[int]:
    """Ids that end a response: the model's own and the tokenizer's."""
    ids = module.generation_config.eos_token_id
    ids = ids if isinstance(ids, list) else [ids]
    return frozenset(i for i in [*ids, tokenizer.eos_token_id] if i is not None)


def _resolve(results: list[tuple[asyncio.Future[Any], Any]]) -> None:
    """Settle futures from the engine's thread, waking each event loop once."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], Any]]] = {}
    for future, result in results:
        by_loop.setdefault(future.get_loop(), []).append((future, result))
    for loop, settled in by_loop.items():
        if not loop.is_closed():  # else nobody waits any more
            loop.call_soon_threadsafe(_settle, settled)


def _settle(results: list[tuple[asyncio.Future[Any], Any]]) -> None:
    for future, result in results:
        if not future.done():
            future.set_exception(result) if isinstance(result, Exception) else future.set_result(result)
