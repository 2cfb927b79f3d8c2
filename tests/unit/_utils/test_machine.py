"""CPUs, memory and folders of this machine, and what is said where a run cannot start."""

import os
import shutil
import tempfile
from multiprocessing import connection
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray._common.utils as ray_common
import ray._private.utils as ray_utils

from raylight._utils.machine import (
    DASHBOARD_SOCKET,
    MIN_SHM,
    SESSION_SOCKET,
    SOCKET_PATH_LENGTH,
    available_cpus,
    check_start,
    check_writable,
    total_memory,
)
from raylight.errors import ClusterStartError, ConfigError


@pytest.mark.parametrize(
    ("counted", "allowed", "expected"),
    [(8, 8, 8), (8, 1, 1), (2.0, 8, 2), (0, 8, 1), (0.5, 2, 1), (8, None, 8)],
    ids=["whole machine", "affinity", "quota", "quota below 1", "half a CPU", "no affinity outside Linux"],
)
def test_cpus_are_those_of_machine_quota_and_affinity(
    counted: float, allowed: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_utils, "get_num_cpus", lambda **options: counted)
    if allowed is None:
        monkeypatch.delattr(os, "sched_getaffinity")
    else:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(allowed)))
    assert available_cpus() == expected


def test_a_quota_of_the_container_counts(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("150000 100000")
    quota = ray_utils._get_docker_cpus(
        cpu_quota_file_name="none", cpuset_file_name="none", cpu_max_file_name=str(tmp_path / "cpu.max")
    )
    assert quota == 1.5


def test_memory_is_that_of_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_common, "get_system_memory", lambda: 2**30)
    assert total_memory() == 2**30


@pytest.mark.parametrize("variable", ["RAY_TMPDIR", "TMPDIR"])
def test_a_folder_too_long_for_ray_s_sockets_is_refused_with_what_to_set(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_TMPDIR", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    folder = "/tmp/" + "\u00e9" * 40  # of two bytes each
    with pytest.raises(ClusterStartError, match=rf"in {folder} would .*; set {variable} .* {variable}=/tmp$"):
        check_start(folder)


def test_the_longest_folder_that_passes_is_one_in_which_ray_starts() -> None:
    folder = "/tmp/".ljust(SOCKET_PATH_LENGTH - len(SESSION_SOCKET), "x")
    check_start(folder)
    ray_utils.validate_socket_filepath(folder + SESSION_SOCKET)
    with pytest.raises(OSError, match="AF_UNIX path length"):
        ray_utils.validate_socket_filepath(folder + "x" + SESSION_SOCKET)


@pytest.mark.parametrize("spare", [0, -1])
def test_a_folder_too_long_for_the_sockets_of_the_dashboard_is_refused(
    spare: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = "/t".ljust(SOCKET_PATH_LENGTH - len(DASHBOARD_SOCKET) - spare, "x")
    monkeypatch.setattr(tempfile, "tempdir", folder)
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")
    if spare < 0:
        with pytest.raises(ClusterStartError, match=r"would have 108 bytes, .* TMPDIR=/tmp$"):
            check_start("/tmp/ray")
    else:
        check_start("/tmp/ray")


def test_the_sockets_of_multiprocessing_have_the_form_that_is_counted() -> None:
    address = connection.arbitrary_address("AF_UNIX")
    assert len(address) == len(tempfile.gettempdir() + DASHBOARD_SOCKET)


@pytest.mark.parametrize(
    ("folder", "reason"), [("/dev/null/x", "Not a directory"), ("/proc/x/y", "No such file or directory")]
)
def test_a_folder_that_cannot_be_written_is_refused(folder: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"output_dir {folder} cannot be written: {reason}; choose another"):
        check_writable(Path(folder), "output_dir")
    with pytest.raises(ClusterStartError, match=f"{folder}.*cannot be written: {reason}; set .*TMPDIR"):
        check_start(folder)


@pytest.mark.parametrize("free", [0, MIN_SHM - 1, MIN_SHM])
def test_a_full_dev_shm_is_found_before_haproxy_dies(free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    if free < MIN_SHM:
        with pytest.raises(
            ClusterStartError, match=r"/dev/shm has \d\.\d MiB free, .* needs 8 MiB; remove files"
        ):
            check_start("/tmp/ray")
    else:
        check_start("/tmp/ray")


def test_a_check_leaves_nothing_behind(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "folder", "output_dir")
    assert list(tmp_path.iterdir()) == []
