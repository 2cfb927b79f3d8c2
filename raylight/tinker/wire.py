"""Protocol buffers of the Tinker API: requests of training in, results of training and sampling out.

The messages are the public SDK's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from tinker.proto import tinker_public_pb2 as pb

from raylight.http.errors import RequestError
from raylight.tinker.datums import Datum
from raylight.tinker.tinker_losses import TARGETS

PROTOBUF = "application/x-protobuf"
"""Content type of the messages."""
NUMPY_TYPES: dict[int, np.dtype[Any]] = {pb.DTYPE_FLOAT32: np.dtype("<f4"), pb.DTYPE_INT64: np.dtype("<i8")}
MAX_DIMENSIONS = 8
STOP_REASONS = {"stop": pb.STOP_REASON_STOP, "length": pb.STOP_REASON_LENGTH}


@dataclass(frozen=True, eq=False)
class Sampled:
    """A sampled response: its tokens, their log-probs, and "stop" or "length"."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    stop_reason: str


def read_forward_backward(content: bytes) -> tuple[pb.ForwardBackwardRequest, str, int | None]:
    """Decode a request for training, and return its model and sequence number too.

    Raises:
        RequestError: the content cannot be decoded.
    """
    try:
        message = pb.ForwardBackwardRequest.FromString(content)
    except DecodeError as error:
        raise RequestError(f"the body is not a ForwardBackwardRequest: {error}") from None
    return message, message.model_id, message.seq_id or None


def read_settings(message: pb.ForwardBackwardRequest) -> dict[str, float]:
    """Return the settings of the loss in a request for training.

    Raises:
        RequestError: a setting is not a number.
    """
    for name, value in message.loss_fn_config_v2.items():
        if value.WhichOneof("value") != "number":
            raise RequestError(f"loss_fn_config: {name!r:.80} is not a number")
    return dict(message.loss_fn_config)


def read_data(message: pb.ForwardBackwardRequest) -> list[Datum]:
    """Return the examples of a request for training.

    Raises:
        RequestError: an example has something else than text, or its tensors are broken or sparse.
    """
    return [_read_datum(f"data[{i}]", datum) for i, datum in enumerate(message.data)]


def write_forward_backward(loss: float, logprobs: Sequence[np.ndarray]) -> bytes:
    """Encode the result of a forward pass.

    Args:
        loss: sum of the losses of all tokens.
        logprobs: log-probs of each example's targets, shape (targets,).
    """
    output = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics={"loss:sum": loss})
    record = output.loss_fn_outputs.add(num_datums=len(logprobs))
    arrays = [np.ascontiguousarray(values, "<f4") for values in logprobs]
    offsets = np.cumsum([0, *(array.nbytes for array in arrays)], dtype="<i8")
    record.fields["logprobs"].CopyFrom(
        pb.BatchedTensor(
            data=b"".join(array.tobytes() for array in arrays),
            offsets=offsets.tobytes(),
            dtype=pb.DTYPE_FLOAT32,
        )
    )
    return output.SerializeToString()


def write_samples(samples: Sequence[Sampled], prompt_logprobs: Sequence[float | None] | None) -> bytes:
    """Encode sampled responses.

    Args:
        prompt_logprobs: log-probs of the prompt's tokens, None for the first; None if not asked for.
    """
    response = pb.SampleResponse(
        sequences=[
            pb.SampledSequence(
                stop_reason=STOP_REASONS[sample.stop_reason],
                tokens=np.asarray(sample.tokens, "<i4").tobytes(),
                logprobs=np.asarray(sample.logprobs, "<f4").tobytes(),
            )
            for sample in samples
        ]
    )
    if prompt_logprobs is not None:
        values = [np.nan if value is None else value for value in prompt_logprobs]
        response.prompt_logprobs = np.asarray(values, "<f4").tobytes()
    return response.SerializeToString()


def _read_datum(place: str, datum: pb.Datum) -> Datum:
    chunks = []
    for chunk in datum.model_input:
        if (kind := chunk.WhichOneof("chunk")) != "encoded_text":
            raise RequestError(f"{place}.model_input: this model takes text only, not {kind}")
        chunks.append(_array(f"{place}.model_input", chunk.encoded_text.tokens, np.dtype("<i4")))
    inputs = {
        name: _read_tensor(f"{place}.loss_fn_inputs.{name}", tensor)
        for name, tensor in datum.loss_fn_inputs.items()
    }
    if (targets := inputs.get(TARGETS)) is not None and targets.dtype.kind != "i":
        raise RequestError(f"{place}.loss_fn_inputs.{TARGETS}: token ids must be int64")
    tokens = np.concatenate(chunks) if chunks else np.empty(0)
    return Datum(tokens.astype(np.int64), inputs)


def _read_tensor(place: str, tensor: pb.Tensor) -> np.ndarray:
    if tensor.WhichOneof("encoding") != "dense":
        raise RequestError(f"{place}: this server takes dense tensors only")
    if (dtype := NUMPY_TYPES.get(tensor.dtype)) is None:
        raise RequestError(f"{place}: the type must be float32 or int64")
    values = _array(place, tensor.dense, dtype)
    shape = list(tensor.shape) or [len(values)]
    if len(shape) > MAX_DIMENSIONS or min(shape) < 0 or math.prod(shape) != len(values):
        raise RequestError(f"{place}: {len(values)} values do not have the shape {shape!s:.80}")
    target = np.int64 if place.endswith(f".{TARGETS}") and dtype.kind == "i" else np.float32
    try:
        return values.reshape(shape).astype(target)
    except ValueError:  # an empty array has limits too
        raise RequestError(f"{place}: no array has the shape {shape!s:.80}") from None


def _array(place: str, content: bytes, dtype: np.dtype) -> np.ndarray:
    if len(content) % dtype.itemsize:
        raise RequestError(f"{place}: {len(content)} bytes are not a whole number of values")
    return np.frombuffer(content, dtype)
