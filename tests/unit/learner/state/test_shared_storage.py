"""Learners that do not share the folders of a run are found at the start."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from raylight.errors import ConfigError
from raylight.learner.state.shared_storage import Ask, answer, check_shared

NODES = ["10.0.0.1", "10.0.0.2"]


def ranks_that_see(views: Sequence[Mapping[str, str]]) -> Ask:
    """Return ranks to which each folder is another one, as on nodes without shared storage."""

    async def ask(urls: list[str], token: str) -> list[dict[str, str]]:
        answers = []
        for rank, view in enumerate(views):
            found = answer([view.get(url, url) for url in urls], token, rank)
            own = {view.get(url, url): url for url in urls}
            answers.append({own[url]: reason for url, reason in found.items()})
        return answers

    return ask


async def test_shared_folders_pass_and_are_left_as_they_were(tmp_path: Path):
    (tmp_path / "config.yaml").touch()
    folders = {"output_dir": str(tmp_path), "checkpoint.path": "memory://bucket/run"}
    MemoryFileSystem().makedirs("/bucket/run", exist_ok=True)
    await check_shared(folders, NODES, "t", ranks_that_see([{}, {}]))
    assert os.listdir(tmp_path) == ["config.yaml"]
    assert MemoryFileSystem().ls("/bucket/run") == []
    MemoryFileSystem.store.clear()


async def test_a_folder_that_does_not_exist_yet_is_made(tmp_path: Path):
    folder = tmp_path / "run" / "states"
    await check_shared({"checkpoint.path": str(folder)}, NODES, "t", ranks_that_see([{}, {}]))
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("setting", "remedy"),
    [
        ("output_dir", "Set output_dir to a folder that all nodes mount"),
        ("checkpoint.path", "s3://bucket/run"),
    ],
)
@pytest.mark.parametrize("exists", [True, False])
async def test_a_folder_of_the_node_itself_is_refused(
    setting: str, remedy: str, exists: bool, tmp_path: Path
):
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    mine.mkdir()
    if exists:
        theirs.mkdir()
    views = [{}, {str(mine): str(theirs)}]
    message = rf"{setting} .*mine is not shared: learner 1 on node 10.0.0.2 does not find .*{remedy}"
    with pytest.raises(ConfigError, match=message):
        await check_shared({setting: str(mine)}, NODES, "t", ranks_that_see(views))
    assert list(mine.iterdir()) == []
    assert theirs.exists() == exists
    assert not exists or list(theirs.iterdir()) == []


async def test_a_folder_that_a_learner_cannot_write_is_refused(tmp_path: Path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / ".shared-t-1").mkdir()
    folders = {"output_dir": str(tmp_path / "folder")}
    with pytest.raises(ConfigError, match=r"learner 1 on node 10\.0\.0\.2 cannot write there"):
        await check_shared(folders, NODES, "t", ranks_that_see([{}, {}]))


async def test_a_driver_that_does_not_see_the_learners_files_refuses_the_folder(tmp_path: Path):
    async def ask(urls: list[str], token: str) -> list[dict[str, str]]:
        return [{}, {}]

    with pytest.raises(ConfigError, match=r"learner 0 on node .* that the driver does not find"):
        await check_shared({"output_dir": str(tmp_path)}, NODES, "t", ask)
