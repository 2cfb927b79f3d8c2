"""vLLM's processes end with the replica's process."""

import multiprocessing
import os
import signal
import subprocess
import sys
from multiprocessing.connection import Connection

import psutil

from raylight.engines.vllm.worker import WorkerExtension

DEADLINE_S = 30.0


def run_core(replica: int, in_core: bool, report: Connection) -> None:
    """Stand in for the engine core, with its worker in this process or in a separate one."""
    if in_core:
        run_worker(replica, report)
    else:
        context = multiprocessing.get_context("spawn")
        worker = context.Process(target=run_worker, args=(replica, report))
        worker.start()
        worker.join()


def run_worker(replica: int, report: Connection) -> None:
    WorkerExtension().raylight_end_with(replica)
    report.send([os.getppid(), os.getpid()])
    signal.pause()


def run_replica() -> None:
    """Stand in for the replica: start one core of each kind, and print all processes."""
    context = multiprocessing.get_context("spawn")
    for in_core in (True, False):
        receiver, sender = context.Pipe(duplex=False)
        context.Process(target=run_core, args=(os.getpid(), in_core, sender), daemon=False).start()
        print(*receiver.recv(), flush=True)
    print("ready", flush=True)
    signal.pause()


def test_core_and_worker_end_with_a_killed_replica() -> None:
    replica = subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE, text=True)
    assert replica.stdout
    pids = [int(pid) for _ in range(2) for pid in replica.stdout.readline().split()]
    assert replica.stdout.readline() == "ready\n"
    processes = [psutil.Process(pid) for pid in set(pids) - {replica.pid}]
    assert len(processes) == 3
    replica.kill()
    replica.wait()
    replica.stdout.close()
    _, alive = psutil.wait_procs(processes, DEADLINE_S)
    assert not alive


def test_a_worker_that_is_a_process_of_its_own_is_left_alone() -> None:
    assert multiprocessing.parent_process() is None
    WorkerExtension().raylight_end_with(os.getpid())


if __name__ == "__main__":
    run_replica()
