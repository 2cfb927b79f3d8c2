"""Check that learners on other nodes reach the folders of a run.

Each learner writes its part of a training state, and the first one the model, on its own node. The driver
reads them. So the driver writes a token to each folder, each learner that finds it writes one too, and the
driver looks for these.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

import fsspec

from raylight.errors import ConfigError

DRIVER = "driver"

Ask = Callable[[list[str], str], Awaitable[Sequence[Mapping[str, str]]]]
"""Calls `answer` on every rank with folders and a token, and returns the results."""


async def check_shared(folders: Mapping[str, str], nodes: Sequence[str], token: str, ask: Ask) -> None:
    """Check that every rank shares folders with the driver, which is this process.

    Args:
        folders: folder or URL by the name of its setting.
        nodes: node of each rank, for the message.
        token: name of the files that are written for the check, and removed.

    Raises:
        ConfigError: a rank does not share a folder.
    """
    urls = list(folders.values())
    await asyncio.to_thread(_for_each, urls, lambda fs, root: _write_first(fs, root, token))
    try:
        answers = await ask(urls, token)
        for setting, url in folders.items():
            for rank, reasons in enumerate(answers):
                reason = reasons.get(url) or await asyncio.to_thread(_find_answer, url, token, rank)
                if reason:
                    raise ConfigError(_message(setting, url, rank, nodes[rank], reason))
    finally:
        await asyncio.to_thread(_for_each, urls, lambda fs, root: _remove_tokens(fs, root, token))


def answer(urls: Sequence[str], token: str, rank: int) -> dict[str, str]:
    """Write a rank's token to each folder that has the driver's; return reasons for others by URL."""
    reasons = {}
    for url in urls:
        fs, root = fsspec.core.url_to_fs(url)
        try:
            if not fs.exists(_file(root, token, DRIVER)):
                reasons[url] = "does not find there what the driver wrote"
                continue
            fs.pipe_file(_file(root, token, rank), b"")
        except OSError as error:
            reasons[url] = f"cannot write there ({error})"
    return reasons


def _find_answer(url: str, token: str, rank: int) -> str:
    fs, root = fsspec.core.url_to_fs(url)
    fs.invalidate_cache()
    return "" if fs.exists(_file(root, token, rank)) else "wrote a file there that the driver does not find"


def _for_each(urls: Sequence[str], work: Callable[[fsspec.AbstractFileSystem, str], object]) -> None:
    for url in urls:
        work(*fsspec.core.url_to_fs(url))


def _write_first(fs: fsspec.AbstractFileSystem, root: str, token: str) -> None:
    """Write the driver's token; the folder of a run's first state need not exist yet."""
    fs.makedirs(root, exist_ok=True)
    fs.pipe_file(_file(root, token, DRIVER), b"")


def _remove_tokens(fs: fsspec.AbstractFileSystem, root: str, token: str) -> None:
    fs.invalidate_cache()
    for path in fs.ls(root, detail=False):
        if path.rpartition("/")[2].startswith(f".shared-{token}-"):
            fs.rm(path, recursive=True)


def _file(root: str, token: str, owner: object) -> str:
    return f"{root}/.shared-{token}-{owner}"


def _message(setting: str, url: str, rank: int, node: str, reason: str) -> str:
    remedy = (
        "Set checkpoint.path to a folder that all nodes mount at this path, or to an fsspec URL such as "
        "s3://bucket/run"
        if setting == "checkpoint.path"
        else "Set output_dir to a folder that all nodes mount at this path (NFS, EFS, Lustre), set "
        "checkpoint.path to an fsspec URL such as s3://bucket/run, or run driver and learners on one node"
    )
    return f"{setting} {url} is not shared: learner {rank} on node {node} {reason}. {remedy}"
