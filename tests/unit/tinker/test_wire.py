"""Messages of the SDK, whole and broken."""

from typing import Any

import numpy as np
import pytest

from raylight.http.errors import RequestError

pytest.importorskip("tinker.proto", reason="pip install 'raylight[tinker]'")


def request(**changes: Any) -> Any:
    """Return a message with one example of three tokens."""
    from tinker.proto import tinker_public_pb2 as pb

    message = pb.ForwardBackwardRequest(model_id="m", seq_id=3, loss_fn="ppo", loss_fn_config={"beta": 0.5})
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.arange(2, dtype="<i4").tobytes()
    datum.model_input.add().encoded_text.tokens = np.array([7], "<i4").tobytes()
    tensor = {"dtype": pb.DTYPE_FLOAT32, "dense": np.ones(3, "<f4").tobytes(), "shape": [3]} | changes
    datum.loss_fn_inputs["weights"].CopyFrom(pb.Tensor(**tensor))
    return message


def test_an_example_is_read() -> None:
    from raylight.tinker.wire import read_data, read_forward_backward, read_settings

    message, model, number = read_forward_backward(request().SerializeToString())
    (datum,) = read_data(message)
    assert (model, number, read_settings(message)) == ("m", 3, {"beta": 0.5})
    assert datum.tokens.tolist() == [0, 1, 7]
    assert datum.inputs["weights"].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dense": b"12345"}, "not a whole number of values"),
        ({"shape": [2]}, r"3 values do not have the shape \[2\]"),
        ({"shape": [-3]}, "do not have the shape"),
        ({"shape": [2**62, 4]}, "3 values do not have the shape"),
        ({"shape": [2**62, 4], "dense": b""}, "0 values do not have the shape"),
        ({"shape": [2**62, 0, 2**62], "dense": b""}, "no array has the shape"),
        ({"shape": [1] * 70 + [3]}, "3 values do not have the shape"),
        ({"dtype": 0}, "must be float32 or int64"),
        ({"dense": None}, "dense tensors only"),
    ],
)
def test_a_broken_tensor_is_refused(changes: dict[str, Any], message: str) -> None:
    from raylight.tinker.wire import read_data

    with pytest.raises(RequestError, match=message) as caught:
        read_data(request(**changes))
    assert "data[0].loss_fn_inputs.weights" in caught.value.message


def test_what_is_no_message_is_refused() -> None:
    from raylight.tinker.wire import read_forward_backward

    with pytest.raises(RequestError, match="not a ForwardBackwardRequest"):
        read_forward_backward(b"\xff\xff")


def test_results_are_read_by_the_sdk() -> None:
    from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response

    from raylight.tinker.wire import Sampled, write_forward_backward, write_samples

    arrays = [np.array([-1.0, -2.0], "f4"), np.array([-3.0], "f4")]
    output = deserialize_forward_backward_output(write_forward_backward(2.5, arrays))
    assert output.metrics == {"loss:sum": 2.5}
    assert [found["logprobs"].tolist() for found in output.loss_fn_outputs] == [[-1.0, -2.0], [-3.0]]
    samples = [Sampled([1, 2], [-0.5, -1.5], "stop"), Sampled([3], [-0.25], "length")]
    response = deserialize_sample_response(write_samples(samples, [None, -2.0]))
    assert [list(sequence.tokens) for sequence in response.sequences] == [[1, 2], [3]]
    assert [sequence.stop_reason for sequence in response.sequences] == ["stop", "length"]
    assert response.prompt_logprobs == [None, -2.0]
