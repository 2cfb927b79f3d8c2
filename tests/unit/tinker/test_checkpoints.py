"""Checkpoints are whole, expire in time, and stay within their folder."""

from pathlib import Path

import numpy as np
import pytest

from raylight.engines.protocol import LoraAdapter
from raylight.errors import CheckpointError
from raylight.http.errors import RequestError
from raylight.tinker.checkpoints import CheckpointPath, Checkpoints

ADAPTER = LoraAdapter({"r": 2}, {"a": np.arange(3, dtype=np.float32)})
OPTIMIZER = {"0.step": np.float32(3) * np.ones(1, np.float32)}
LORA = {"rank": 2}
PATH = CheckpointPath.of("session:train:0", "weights", "000001")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def save(checkpoints: Checkpoints, path: CheckpointPath = PATH, **options: object) -> None:
    settings: dict[str, object] = {"base_model": "m", "lora": LORA, **options}
    checkpoints.save(path, ADAPTER, OPTIMIZER if path.kind == "weights" else None, **settings)  # type: ignore[arg-type]


def test_a_checkpoint_is_read_as_it_was_written(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "new", Clock())
    save(checkpoints)
    again = Checkpoints(tmp_path / "new", Clock())
    assert again.load(PATH).config == ADAPTER.config
    assert (again.load(PATH).weights["a"] == ADAPTER.weights["a"]).all()
    assert again.load_optimizer(PATH)["0.step"] == 3
    record = again.record(PATH)
    assert (record.path, record.base_model, record.created_at) == (str(PATH), "m", 1000.0)
    assert record.size_bytes > 0
    assert str(CheckpointPath.parse("tinker://session:train:0/weights/000001")) == str(PATH)


def test_a_checkpoint_is_replaced_only_on_request(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints)
    with pytest.raises(CheckpointError, match="exists already"):
        save(checkpoints)
    save(checkpoints, overwrite=True)
    assert [record.path for record in checkpoints.list()] == [str(PATH)]


def test_a_checkpoint_expires(tmp_path: Path) -> None:
    clock = Clock()
    checkpoints = Checkpoints(tmp_path, clock)
    save(checkpoints, ttl_s=10)
    other = CheckpointPath.of("other", "sampler_weights", "x")
    save(checkpoints, other)
    assert [r.path for r in checkpoints.list("session:train:0")] == [str(PATH)]
    clock.now += 10
    assert [r.path for r in checkpoints.list()] == [str(other)]
    with pytest.raises(RequestError, match="there is no checkpoint") as caught:
        checkpoints.load(PATH)
    assert caught.value.status == 404
    checkpoints.drop_expired()
    assert not (tmp_path / "session:train:0" / "weights" / "000001").exists()


def test_weights_for_sampling_have_no_optimizer(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    path = CheckpointPath.of("m", "sampler_weights", "x")
    save(checkpoints, path)
    with pytest.raises(RequestError, match="has no optimizer"):
        checkpoints.load_optimizer(path)
    checkpoints.delete(path)
    checkpoints.delete(path)
    assert checkpoints.list() == []


@pytest.mark.parametrize(
    "path",
    [
        "m/weights/x",
        "tinker://m/weights",
        "tinker://m/weights/x/y",
        "tinker://m/other/x",
        "tinker://../weights/x",
        "tinker://m/weights/..",
        "tinker://m/weights/",
        "tinker://m/weights/x.partial",
        "tinker://m*/weights/x",
    ],
)
def test_a_path_of_another_form_is_refused(path: str) -> None:
    with pytest.raises(RequestError, match="path: "):
        CheckpointPath.parse(path)
