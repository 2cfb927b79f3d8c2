"""Tokens per second that a replica receives, records and hands on, if its engine core is fast enough.

    python tests/benchmarks/capture_tokens.py [--streams 512] [--steps 200] [--rounds 5] [--tokens 1]
                                              [--profile]

Needs vLLM, of any build. No model runs: the messages of an engine core that samples a token of each stream in
every step are made beforehand, as vLLM makes them. The measured work is the work of the process that serves
requests: decoding a message, detokenizing, recording, and the output of each stream. In turn:

- bare: vLLM, with requests that want no log-probs;
- log-probs: vLLM, with requests that want the log-prob of the sampled token;
- captured: requests that raylight records.

Prints tokens per second of each, as medians over the rounds with their range, and the ratios; and the time in
which the engine core makes and encodes a step of each kind. `--profile` prints the functions that take the
most time.
"""

from __future__ import annotations

import asyncio
import contextlib
import cProfile
import pstats
import statistics
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
from harness import make_parser, spread
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.tokenizers import get_tokenizer
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from raylight.engines.capture_context import CURRENT, AttemptScope, CaptureContext
from raylight.engines.vllm.args import SCHEDULER
from raylight.engines.vllm.capture import Capture
from raylight.engines.vllm.scheduler import StepLogprobs, move_logprobs
from raylight.quickstart import STARTER_MODEL
from raylight.types import CallKey

KINDS = ("bare", "log-probs", "captured")
PROMPT = list(range(20, 52))
TARGET = 100_000
"""Tokens per second with which capture should keep up."""


class Replica:
    """The serving side of vLLM, with requests of a kind."""

    def __init__(self, kind: str, streams: int) -> None:
        self.kind = kind
        self.processor = OutputProcessor(get_tokenizer(STARTER_MODEL), log_stats=False)
        self.decoder = MsgpackDecoder(EngineCoreOutputs)
        link = SimpleNamespace(outputs_queue=asyncio.Queue(), get_output_async=None)
        config = SimpleNamespace(
            structured_outputs_config=SimpleNamespace(disable_any_whitespace=False),
            scheduler_config=SimpleNamespace(scheduler_cls=SCHEDULER),
        )
        if kind == "captured":
            Capture(SimpleNamespace(vllm_config=config, output_processor=self.processor, engine_core=link))
        self.samples = [self._add(str(stream)) for stream in range(streams)]

    def _add(self, name: str) -> Any:
        params = SamplingParams(
            max_tokens=10**6,
            logprobs=0 if self.kind == "log-probs" else None,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        request = EngineCoreRequest(
            name, PROMPT, None, params, None, time.time(), None, None, None, external_req_id=f"r-{name}"
        )
        queue = RequestOutputCollector(RequestOutputKind.FINAL_ONLY, name)
        if self.kind != "captured":
            self.processor.add_request(request, None, None, 0, queue)
            return None
        key = CallKey(name, "a", "c")
        context = CaptureContext(AttemptScope(name, "a", ""), "chat", {}, time.time(), [key])
        token = CURRENT.set(context)
        try:
            self.processor.add_request(request, None, None, 0, queue)
        finally:
            CURRENT.reset(token)
        return context.samples[0]

    def receive(self, message: Any) -> None:
        self.processor.process_outputs(self.decoder.decode(message).outputs)


def make_message(kind: str, streams: int, tokens: int) -> EngineCoreOutputs:
    """Return the message of a step, which a scheduler of vLLM would make."""
    ids = np.random.default_rng(0).integers(20, 90, (streams * tokens, 1)).astype(np.int32)
    found = LogprobsLists(
        ids,
        np.full(ids.shape, -1.5, np.float32),
        np.ones(len(ids), np.int32),
        list(range(0, len(ids), tokens)),
    )
    divided = StepLogprobs(found, [kind == "captured"] * streams)
    outputs = [
        EngineCoreOutput(
            str(stream),
            ids[stream * tokens : (stream + 1) * tokens, 0].tolist(),
            None if kind == "bare" else divided.slice_request(stream, tokens),
        )
        for stream in range(streams)
    ]
    move_logprobs(outputs)
    return EngineCoreOutputs(outputs=outputs)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--streams", type=int, default=512)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=1, help="of each stream in a step, as by speculation")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    encoder = MsgpackEncoder()
    rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
    encoding: dict[str, list[float]] = {kind: [] for kind in KINDS}
    profile = cProfile.Profile()
    for _ in range(args.rounds):
        for kind in KINDS:
            began = time.perf_counter()
            message = encoder.encode(make_message(kind, args.streams, args.tokens))
            encoding[kind].append(time.perf_counter() - began)
            replica = Replica(kind, args.streams)
            began = time.perf_counter()
            with profile if args.profile and kind == "captured" else contextlib.nullcontext():
                for _ in range(args.steps):
                    replica.receive(message)
            rates[kind].append(args.streams * args.tokens * args.steps / (time.perf_counter() - began))
            if kind == "captured":
                assert all(
                    len(sample.output_ids) == len(sample.logprobs) == args.steps * args.tokens
                    for sample in replica.samples
                )
    bare = statistics.median(rates["bare"])
    for kind in KINDS:
        share = statistics.median(rates[kind]) / bare
        step_ms = 1000 * statistics.median(encoding[kind])
        print(f"{kind:10} {spread(rates[kind], 0)} tokens/s, {share:.2f} of bare; a step in {step_ms:.2f} ms")
    print(f"target: {TARGET:,} tokens/s captured")
    if args.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(18)


if __name__ == "__main__":
    main()
