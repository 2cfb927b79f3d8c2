"""The choice of a transport: it must fit engine and learners, and errors name what to do."""

from typing import Any

import pytest
from weight_loading import DictSource

from raylight.config import EngineConfig, LearnerConfig
from raylight.errors import ConfigError
from raylight.weights.gloo import GlooReceiver
from raylight.weights.protocol import SenderSettings, WeightReceiver
from raylight.weights.transports import (
    TRANSPORTS,
    Transport,
    choose_transport,
    find_transport,
    make_receiver,
    open_sender,
    vllm_backend,
)
from unit.weights import toy_transport

OWN = Transport("package.module:Sender", "own", "package.module:Receiver", needs_gpu=False)


def chosen(engine: EngineConfig, learner: LearnerConfig, workers: int, during_updates: bool = False) -> str:
    return choose_transport(engine, learner, workers, engine.kind == "vllm", during_updates)


@pytest.mark.parametrize(
    ("settings", "learner_gpus", "expected"),
    [
        ({"kind": "transformers"}, 0, "gloo"),
        ({"kind": "transformers", "num_gpus": 1}, 1, "gloo"),
        ({"kind": "vllm"}, 0, "gloo"),
        ({"kind": "vllm", "num_gpus": 1}, 0, "gloo"),
        ({"kind": "vllm", "num_gpus": 1}, 1, "nccl"),
        ({"kind": "vllm", "num_gpus": 0.4}, 0.6, "ipc"),
        ({"kind": "vllm", "num_gpus": 0.4, "replicas": 2}, 0.6, "ipc"),
        ({"kind": "vllm", "num_gpus": 0.4, "replicas": 3}, 0.6, "gloo"),  # one shares no GPU with a learner
        ({"kind": "vllm", "num_gpus": 0.5}, 0.6, "gloo"),  # not on the same GPU
        ({"kind": "vllm", "num_gpus": 0.4}, 1, "nccl"),
        ({"kind": "vllm", "num_gpus": 0.4, "replicas": 2}, 1, "gloo"),  # both may be on one GPU
        ({"kind": "vllm", "num_gpus": 1}, 0.6, "nccl"),
        ({"kind": "vllm", "num_gpus": 1, "sleep_while_learning": True}, 1, "nccl"),
        ({"kind": "vllm", "num_gpus": 1, "weight_transfer": "sharded_rdt"}, 1, "sharded_rdt"),
        ({"kind": "vllm", "num_gpus": 1, "weight_transfer": "gloo"}, 1, "gloo"),
        ({"kind": "transformers", "weight_transfer": f"{__name__}:OWN"}, 0, f"{__name__}:OWN"),
    ],
)
def test_the_transport_fits_engine_and_learners(
    settings: dict[str, Any], learner_gpus: float, expected: str
) -> None:
    engine, learner = EngineConfig(**settings), LearnerConfig(n=2, num_gpus=learner_gpus)
    assert chosen(engine, learner, engine.replicas) == expected


def test_beside_updates_the_transport_uses_no_connections_of_the_learners() -> None:
    shared = EngineConfig(kind="vllm", num_gpus=0.4)
    assert chosen(shared, LearnerConfig(num_gpus=0.6), 1, during_updates=True) == "gloo"
    own, learner = EngineConfig(kind="vllm", num_gpus=1), LearnerConfig(num_gpus=1)
    assert chosen(own, learner, 1, during_updates=True) == "nccl"
    pulled = own.model_copy(update={"weight_transfer": "sharded_rdt"})
    with pytest.raises(ConfigError, match="'sharded_rdt' cannot send weights during updates"):
        chosen(pulled, learner, 1, during_updates=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "vllm", "weight_transfer": "nccl"}, "needs GPUs on both sides: engine.num_gpus is 0 and"),
        (
            {"kind": "transformers", "weight_transfer": "ipc"},
            "is a backend of vLLM, and the engine is",
        ),
        ({"kind": "vllm", "weight_transfer": "ncl"}, "no transport 'ncl'; there are: nccl"),
        ({"kind": "vllm", "weight_transfer": f"{__name__}:pytest"}, "is not a raylight.*Transport"),
    ],
)
def test_a_transport_that_does_not_fit_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        chosen(EngineConfig(**settings), LearnerConfig(num_gpus=0), 1)


def test_engines_without_learners_have_a_transport_too() -> None:
    assert isinstance(make_receiver("auto"), GlooReceiver)
    assert vllm_backend("auto") == "gloo"
    assert [vllm_backend(name) for name in TRANSPORTS] == list(TRANSPORTS)
    assert find_transport(f"{__name__}:OWN") is OWN


class OneEngine:
    """The control of one engine, which keeps what it receives in `weights`."""

    def __init__(self, receiver: WeightReceiver) -> None:
        self._receiver, self.weights = receiver, dict[str, Any]()

    def send(self, info: dict[str, object]) -> None:
        for group in self._receiver.receive(info):
            self.weights.update(group)


def test_a_transport_is_one_file_that_its_dotted_name_selects() -> None:
    name = f"{toy_transport.__name__}:transport"
    settings = EngineConfig(kind="transformers", weight_transfer=name)
    assert chosen(settings, LearnerConfig(), 1) == name
    source = DictSource({"a": [1.0, 2.0], "b": [3.0], "c": [[4.0]]}, size=2)
    engine: Any = OneEngine(make_receiver(name))
    for rank in (1, 0):
        assert engine.weights == {}
        open_sender(name, SenderSettings(rank, "127.0.0.1", (1,), 60.0), engine, source).send_weights()
    assert {name: value.tolist() for name, value in engine.weights.items()} == {
        "a": [1.0, 2.0],
        "b": [3.0],
        "c": [[4.0]],
    }
