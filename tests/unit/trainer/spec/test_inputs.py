"""Datasets and models, as a Trainer checks them."""

from pathlib import Path
from typing import Any

import pytest

from raylight.errors import (
    DatasetError,
    ModelNotFoundError,
)
from raylight.tasks.datasets import as_dataset
from raylight.trainer.spec.inputs import as_tasks, resolve_model


class Unsized:
    def __getitem__(self, index: int) -> int:
        if index >= 3:
            raise IndexError
        return index


class Sized(Unsized):
    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize(
    "dataset",
    [[0, 1, 2], (0, 1, 2), range(3), Sized(), (i for i in range(3))],
    ids=lambda d: type(d).__name__,
)
def test_a_dataset_is_anything_with_tasks_in_it(dataset: Any) -> None:
    assert as_tasks(dataset, "train_dataset", required=True) == [0, 1, 2]


def test_an_index_without_a_length_is_read_or_refused() -> None:
    try:
        tasks = as_tasks(Unsized(), "train_dataset", required=True)
    except DatasetError:
        return
    assert tasks == [0, 1, 2]


@pytest.mark.parametrize("dataset", ["tasks.json", b"x", {"a": 1}, 3, object()])
def test_what_is_no_sequence_of_tasks_is_refused_by_name_and_type(dataset: Any) -> None:
    with pytest.raises(DatasetError, match=f"val_dataset.*{type(dataset).__name__}"):
        as_tasks(dataset, "val_dataset", required=False)


def test_what_can_be_read_only_once_is_not_used_up_by_the_check() -> None:
    assert as_dataset((i for i in range(3)), "train_dataset") == [0, 1, 2]
    given = Sized()
    assert as_dataset(given, "train_dataset") is given
    assert as_dataset(None, "train_dataset") is None
    for empty in ([], (), iter([]), {}.keys()):
        with pytest.raises(DatasetError, match="train_dataset is empty"):
            as_dataset(empty, "train_dataset")


def test_an_empty_or_missing_dataset_is_an_error_where_it_is_required() -> None:
    assert as_tasks(None, "val_dataset", required=False) == []
    with pytest.raises(DatasetError, match="train_dataset is missing"):
        as_tasks(None, "train_dataset", required=True)
    with pytest.raises(DatasetError, match="train_dataset is empty"):
        as_tasks([], "train_dataset", required=True)


def test_a_model_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer_config.json"):
        with pytest.raises(ModelNotFoundError, match=name):
            resolve_model(str(tmp_path))
        (tmp_path / name).write_text("{}")
    assert resolve_model(str(tmp_path)) == str(tmp_path)


@pytest.mark.parametrize("extra", [None, "config.json", "model.safetensors"])
def test_a_gguf_file_or_folder_is_refused_with_the_conversion(extra: str | None, tmp_path: Path) -> None:
    """Unless the folder has other weights too."""
    (tmp_path / "tiny-q4.gguf").write_bytes(b"GGUF")
    if extra is not None:
        (tmp_path / extra).write_text("{}")
    for path in (tmp_path / "tiny-q4.gguf", tmp_path):
        if path == tmp_path and extra == "model.safetensors":
            with pytest.raises(ModelNotFoundError, match=r"config\.json.* is missing"):
                resolve_model(str(path))
            continue
        with pytest.raises(ModelNotFoundError, match=r"GGUF.*gguf_file='tiny-q4\.gguf'.*save_pretrained"):
            resolve_model(str(path))


@pytest.mark.parametrize("model", ["nowhere", "./no/where", "/no/where", "~/no-such-folder", "a/b/c"])
def test_a_missing_folder_is_named(model: str) -> None:
    with pytest.raises(ModelNotFoundError, match="there is no model folder"):
        resolve_model(model)


@pytest.mark.parametrize("model", ["no-such-owner/no-such-model", "no such owner/model", "a/..b", "owner/"])
def test_a_hub_name_that_is_not_cached_is_an_error_and_nothing_is_downloaded(model: str) -> None:
    with pytest.raises(ModelNotFoundError):
        resolve_model(model)
