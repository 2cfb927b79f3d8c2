"""Short local run that records the listening sockets of its processes: socket_run.py OUTPUT_DIR ENGINE"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
from pathlib import Path
from typing import Any

import psutil

import raylight as rl
from raylight.quickstart import STARTER_MODEL
from raylight.quickstart.additions import additions
from raylight.quickstart.agent import adder

SO_ACCEPTCON = 0x10000
"""Flag of a listening socket in /proc/net/unix."""


def listening_paths() -> set[str]:
    """Return the paths of all listening unix sockets of the machine; abstract ones begin with @."""
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return {row[7] for row in rows if len(row) > 7 and int(row[3], 16) & SO_ACCEPTCON}


def listening_sockets() -> list[dict[str, Any]]:
    """Return process, protocol and address of each listening socket of this process and its descendants."""
    paths, found = listening_paths(), []
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            line = " ".join(process.cmdline()) or process.name()
            for known in process.net_connections("all"):
                if known.family == socket.AF_UNIX:
                    if known.laddr in paths:
                        found.append({"process": line, "protocol": "unix", "address": known.laddr})
                elif known.type == socket.SOCK_DGRAM or known.status == psutil.CONN_LISTEN:
                    protocol = "udp" if known.type == socket.SOCK_DGRAM else "tcp"
                    found.append(
                        {
                            "process": line,
                            "protocol": protocol,
                            "address": known.laddr.ip,
                            "port": known.laddr.port,
                        }
                    )
    return found


class SocketLogger:
    """Metric logger that writes the sockets to `sockets.json` after the first step."""

    def __init__(self, folder: str) -> None:
        self._file = Path(folder, "sockets.json")

    def start(self, config: dict[str, Any]) -> None:
        """Do nothing."""

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        self._file.write_text(json.dumps(listening_sockets()))

    def finish(self) -> None:
        """Do nothing."""


def main(folder: str, engine: dict[str, Any]) -> None:
    train, _ = additions(0)
    algorithm = rl.GRPO(
        model=STARTER_MODEL, lr=2e-4, group_size=4, tasks_per_step=4, n_steps=1, max_logprob_mismatch=1.0
    )
    trainer = rl.Trainer(
        algorithm=algorithm,
        n_learners=2,
        n_runners=1,
        output_dir=folder,
        address="local",
        engine={"max_model_len": 64, **engine},
        loggers=[SocketLogger(folder)],
    )
    trainer.fit(adder, train[:8])


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
