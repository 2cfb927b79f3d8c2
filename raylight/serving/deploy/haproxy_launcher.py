"""Launcher of HAProxy: hardens the configuration that Ray Serve wrote, then becomes HAProxy.

Serve starts the binary that RAY_SERVE_HAPROXY_BINARY_PATH names, at its start and at each change of routes,
with a configuration file that it has just written. That file opens the statistics and metrics on all
interfaces, and the admin socket to every user of the machine; it sets no limit on the time that a client
takes to send its headers. A killed parent leaves HAProxy behind, which keeps its ports.

`install` writes a shell script as that binary. The script runs this file, which edits the configuration and
executes the real HAProxy in the same process, because Serve waits for this process ID. The file imports
nothing but the standard library: it runs without site-packages, so that it starts in some 30 ms.

Each function names the test that fails without it, in tests/unit/serving/deploy/test_haproxy_launcher.py.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import select
import shlex
import signal
import sys
import zlib
from pathlib import Path

HEADER_TIMEOUT_S = 10
"""Longest time that a client may take to send the headers of a request and the begin of its body."""
MAX_CONNECTIONS = 65_536
"""Most connections of clients at a time; fewer if the limit on open files is low."""
RESERVED_FILES = 600
"""Open files that are not connections of requests: sockets, health checks, libraries."""
END_TIMEOUT_S = 5.0
"""Longest time that a killed HAProxy takes to release its ports."""
MAX_SERVER_ID = 2**31 - 1
"""Largest id of a server that HAProxy takes."""
PR_SET_PDEATHSIG = 1
COMMAND_LENGTH = 15
"""Characters of a process's name that the kernel keeps."""
MARK = "# hardened by raylight\n"


class TemplateError(Exception):
    """The configuration is not the one that this launcher was written for."""


def install(folder: Path, binary: str) -> Path:
    """Write the script that Serve executes as HAProxy, and return its path.

    Each installation of raylight has a separate script: its name contains a hash of the content.

    Args:
        binary: path of the real HAProxy.
    """
    command = shlex.join([sys.executable, "-IS", __file__, binary])
    content = f'#!/bin/sh\nexec {command} $PPID "$@"\n'
    script = folder / f"haproxy-{zlib.crc32(content.encode()):08x}"
    partial = script.with_name(f"{script.name}.{os.getpid()}")
    partial.write_text(content)
    partial.chmod(0o700)
    partial.replace(script)
    return script


def harden(config: str, folder: str, connections: int) -> str:
    """Return a configuration without open side doors.

    - The admin socket is open to this user only. The statistics and the metrics are on sockets of `folder`.
    - Headers must arrive within HEADER_TIMEOUT_S, and so must a body, or the 16 KiB of it that HAProxy keeps.
      Before that no replica has the request.
    - A source that is not this machine gets at most half of the connections. This machine's own connections
      come from loopback, or from the address that they reach.
    - Rollouts stay with their replicas when others join or leave (see `identify_servers`).

    Args:
        config: configuration as Serve writes it.
        folder: the folder of the configuration.
        connections: most connections of clients at a time.

    Raises:
        TemplateError: the configuration lacks a line that must be replaced, or has it twice.
    """
    if config.startswith(MARK):
        return config
    # test_nothing_but_the_ingress_listens_on_the_network, test_half_sent_headers_lock_nobody_out,
    # test_a_half_sent_body_reaches_no_replica,
    # test_a_source_gets_half_of_the_connections_unless_it_is_this_machine
    edits = {
        "the mode of the admin socket": (r"^(    stats socket \S+ mode) 666( level admin\b.*)$", r"\1 600\2"),
        "the limit of connections": (r"^    maxconn \d+$", f"    maxconn {connections}"),
        "the address of the metrics": (
            r"^(frontend prometheus\n    bind) \S+$",
            rf"\1 unix@{folder}/prom.sock mode 600",
        ),
        "the address of the statistics": (
            r"^(listen stats\n  bind) \S+$",
            rf"\1 unix@{folder}/stat.sock mode 600",
        ),
        "the defaults": (
            r"^(defaults\n    mode http)$",
            rf"\1\n    timeout http-request {HEADER_TIMEOUT_S}s\n    option http-buffer-request",
        ),
        # the pipes of splicing would take a fifth of the open files
        "splicing": (r"^    option splice-request\n    option splice-response\n", ""),
        "the frontend of the applications": (
            r"^(frontend http_frontend\n    bind \S+)$",
            r"\1\n    stick-table type ipv6 size 100k expire 1m store conn_cur"
            r"\n    tcp-request connection set-var(sess.reached) dst"
            r"\n    tcp-request connection track-sc0 src unless { src 127.0.0.0/8 ::1 } ||"
            r" { src,strcmp(sess.reached) eq 0 }"
            rf"\n    tcp-request connection reject if {{ sc0_conn_cur gt {connections // 2} }}",
        ),
    }
    for name, (pattern, replacement) in edits.items():
        config, count = re.subn(pattern, replacement, config, flags=re.MULTILINE)
        if count != 1:
            raise TemplateError(
                f"Ray's HAProxy configuration has {name} {count} times instead of once, so raylight cannot "
                "close it to others; install the version of Ray that raylight requires (`raylight doctor`)"
            )
    return MARK + identify_servers(config)


def identify_servers(config: str) -> str:
    """Return a configuration whose servers have ids that follow from their names.

    Consistent hashing places a server by its id, which would otherwise be its position in the configuration:
    each change of the servers, or of their order, would then move most rollouts to other replicas.
    """
    # test_rollouts_stay_with_their_replicas_when_others_leave_and_join
    used: set[int] = set()

    def identify(line: re.Match[str]) -> str:
        number = zlib.crc32(line["name"].encode()) % MAX_SERVER_ID + 1
        while number in used:
            number = number % MAX_SERVER_ID + 1
        used.add(number)
        return f"{line[0]} id {number}"

    pattern = r"^    server (?P<name>\S+) \S+ check(?!.* backup$).*$"
    return re.sub(pattern, identify, config, flags=re.MULTILINE)


def connection_limit() -> int:
    """Return the most connections of clients that the limit on open files allows: each takes two files."""
    # test_as_many_connections_as_the_open_files_allow
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if limit == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(100, min(MAX_CONNECTIONS, (limit - RESERVED_FILES) // 2))


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when the thread ends that started it, even after `exec`.

    Linux only. Serve starts HAProxy from the thread of its actor's event loop, which lives as long as the
    actor.

    Args:
        parent: process ID of the parent before this process could ask the kernel.
    """
    if sys.platform != "linux":
        return
    # test_haproxy_ends_with_its_manager
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # the parent ended before prctl
        sys.exit("the process that started HAProxy has ended")


def kill_predecessors(binary: str, config: str, parent: int) -> None:
    """Kill the HAProxies that another manager started with this configuration file: they hold the ports.

    This happens if the other manager is frozen. One that has ended takes its HAProxy with it.

    Args:
        binary: path of HAProxy.
        config: path of the configuration file; it names the node.
        parent: process ID of the manager that starts this HAProxy.
    """
    # test_a_new_manager_takes_the_ports_of_a_frozen_one
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if _is_predecessor(process, binary, config, parent):
                _kill(int(process.name))


def _is_predecessor(process: Path, binary: str, config: str, parent: int) -> bool:
    """Return True if another process than `parent` started this HAProxy with this configuration."""
    return (
        (process / "comm").read_text().strip() == os.path.basename(binary)[:COMMAND_LENGTH]
        and config.encode() in (process / "cmdline").read_bytes().split(b"\0")
        and _parent_of(process) != parent
    )


def _kill(pid: int) -> None:
    """Kill a process and wait until it has ended."""
    handle = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        select.select([handle], [], [], END_TIMEOUT_S)  # readable once the process has ended
    finally:
        os.close(handle)


def _parent_of(process: Path) -> int:
    return int((process / "stat").read_text().rpartition(")")[2].split()[1])


def main(arguments: list[str]) -> None:
    """Become HAProxy.

    Args:
        arguments: path of HAProxy, process ID of the parent, and HAProxy's arguments.
    """
    binary, parent, *options = arguments
    if "-f" in options:
        end_with_parent(int(parent))
        path = Path(options[options.index("-f") + 1])
        path.parent.chmod(0o700)
        hardened = harden(path.read_text(), str(path.parent), connection_limit())
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        partial.write_text(hardened)
        partial.replace(path)
        if "-sf" not in options:
            kill_predecessors(binary, str(path), int(parent))
    os.execv(binary, [binary, *options])


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (TemplateError, OSError) as launch_error:
        sys.exit(f"HAProxy was not started: {launch_error}")
