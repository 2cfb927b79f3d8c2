"""A run with one fault, from its start to the check of what it left."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
from chaos_checker import check
from chaos_events import Driver, Events
from chaos_evidence import Plan, read_evidence
from chaos_faults import Fault, is_line
from chaos_log import FOLDER_VARIABLE, SAMPLES, STEPS, TASKS
from chaos_processes import RunProcesses
from chaos_surroundings import SmallDisk
from chaos_table import Row
from two_nodes import TwoNodes

START_S, DRIVER_S, CLEAN_S = 150.0, 200.0, 75.0
"""Deadlines: from a driver's start to the moment of the fault, from there to its end, and for the end of its
processes after its own. Ray's agents of a node try for a minute to report the end of their raylet to a GCS
that has ended too."""
ERROR = re.compile(r"^raylight\.errors\.(\w+): ")


class Experiment:
    """A run with one fault.

    Args:
        folder: folder of the test; the run directory is `run` in it.
    """

    def __init__(self, fault: Fault, folder: Path) -> None:
        self._fault, self._folder = fault, folder
        self._run_folder = folder / "run"
        self._events = Events(folder)
        self._processes = RunProcesses(f"{fault.name}-{secrets.token_hex(4)}")
        self._environment = {
            **self._processes.environment,
            FOLDER_VARIABLE: str(folder),
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
            "PYTHONUNBUFFERED": "1",
        }
        self._settings = {"folder": str(self._run_folder), **fault.settings}
        self._disk = SmallDisk(self._run_folder)
        self._nodes: TwoNodes | None = None
        self._row = Row(fault)
        self._struck_at: float | None = None
        self._resumed_at: float | None = None
        self._waited = 0.0
        """Seconds between the end of a driver and the start of the next, which are not the run's."""

    def run(self) -> Row:
        """Run to the end, resume once if the run ended, and check."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._events.close)
            stack.callback(self._processes.kill)
            if self._fault.action == "fill the disk":
                stack.enter_context(self._disk.mounted())
            if self._fault.action in ("remove the node", "replace the node"):
                self._nodes = TwoNodes(self._environment, other={"resources": {"learner_node": 1}})
                self._settings["address"] = self._nodes.address
            self._run_drivers()
            if self._nodes is not None:
                self._nodes.stop()
            self._row.left += self._processes.wait_for_end(CLEAN_S)
            self._row.left += self._processes.files()
            self._measure()
            self._row.findings = check(read_evidence(self._folder, self._run_folder, self._plan))
        return self._row

    @property
    def _plan(self) -> Plan:
        names = ("max_staleness", "stale")
        staleness = {name: self._settings[name] for name in names if name in self._settings}
        return Plan(STEPS, TASKS, SAMPLES, self._fault.may_fail, **staleness)

    def _run_drivers(self) -> None:
        driver = self._start(resume=False)
        try:
            self._strike_at_moments(driver)
        except (TimeoutError, AssertionError) as error:
            self._row.notes.append(f"{self._fault.when} did not come within {START_S:g} s {error}".strip())
        self._row.ends.append(self._end(driver))
        if self._row.ends[0] != "completed":
            if self._fault.action == "fill the disk":
                self._disk.free()
            ended = time.monotonic()
            remaining = self._processes.wait_for_end(CLEAN_S)
            self._row.left += [f"{process}, by the driver that ended" for process in remaining]
            self._resumed_at = time.monotonic()
            self._waited = self._resumed_at - ended
            self._row.ends.append(self._end(self._start(resume=True)))

    def _start(self, resume: bool) -> Driver:
        return Driver(self._folder, self._environment, {**self._settings, "resume": resume}, self._events)

    # the fault

    def _strike_at_moments(self, driver: Driver) -> None:
        """Wait for the moment of the fault and inject it, as often as it asks for."""
        if self._fault.action in ("interrupt", "terminate"):
            self._signal_driver(driver)
            return
        fault, target = self._fault, self._fault.target
        for number in range(fault.times):
            deadline = time.monotonic() + START_S
            self._events.wait(fault.prelude(repeated=number > 0), deadline)
            targets = self._processes.find(target) if target else []
            self._events.drain()
            found = self._events.wait(fault.moment, deadline)
            if found is None:
                self._row.notes.append(f"the driver ended before fault {number + 1}")
                return
            if target == "program":
                targets = [psutil.Process(found.fields["pid"])]
            elif target and not any(process.is_running() for process in targets):
                targets = self._processes.wait_for(target, deadline - time.monotonic())
            self._strike(targets)

    def _strike(self, targets: list[psutil.Process]) -> None:
        if self._struck_at is None:
            self._struck_at = time.monotonic()
        if self._fault.action == "fill the disk":
            self._disk.fill()
        if self._nodes is not None:
            self._nodes.remove_node()
            if self._fault.action == "replace the node":
                threading.Thread(target=self._nodes.add_node).start()  # the run goes on meanwhile
        chosen = targets if self._fault.every else targets[:1]
        for process in chosen:
            if self._fault.action in ("kill", "replace the node"):
                process.kill()
                continue
            process.suspend()
            if self._fault.seconds is not None:
                threading.Timer(self._fault.seconds, _resume, [process]).start()

    def _signal_driver(self, driver: Driver) -> None:
        """Press Ctrl-C, which every process of the terminal's foreground group receives; or send SIGTERM."""
        number = signal.SIGINT if self._fault.action == "interrupt" else signal.SIGTERM
        first = [*self._fault.prelude(repeated=False), *self._fault.moment]
        moments = [first, [is_line("interrupted; stopping")], [is_line("please wait")]]
        for predicates in moments[: self._fault.times]:
            if self._events.wait(predicates, time.monotonic() + START_S) is None:
                return
            self._struck_at = self._struck_at or time.monotonic()
            self._processes.look()
            if self._fault.action == "interrupt":
                os.killpg(driver.process.pid, number)
            else:
                driver.process.send_signal(number)

    # the end

    def _end(self, driver: Driver) -> str:
        """Wait for the end of a driver; return how it ended."""
        if not driver.exited.wait(DRIVER_S):
            self._row.notes.append("its last lines: " + " / ".join(driver.lines[-3:]))
            self._processes.kill()
            return "hang"
        self._processes.look()
        code = driver.process.returncode
        if code == 0:
            return "completed"
        if code < 0:
            return f"signal {-code}"
        errors = [match[1] for line in driver.lines if (match := ERROR.match(line))]
        if errors:
            return errors[-1]
        if code in (128 + signal.SIGINT, 128 + signal.SIGTERM):
            return f"signal {code - 128}"
        self._row.notes.append("its last lines: " + " / ".join(driver.lines[-3:]))
        return "untyped"

    def _measure(self) -> None:
        """Set the seconds from the fault to the end of the next rollout that began after it, and of the next
        step whose update did. After a fault that ends the driver, only those of the resumed run count."""
        self._events.drain()
        if self._struck_at is None:
            return
        since = self._resumed_at or self._struck_at
        later = [event for event in self._events.seen if event.at > since]
        begun = {event.fields["attempt"] for event in later if event.kind == "begun"}
        finished = [e.at for e in later if e.kind == "finished" and e.fields["attempt"] in begun]
        updates = [event.at for event in later if event.kind == "update"]
        steps = [event.at for event in later if event.kind == "step" and updates and event.at > updates[0]]
        start = self._struck_at + self._waited
        self._row.rollout_s = min(finished) - start if finished else None
        self._row.step_s = min(steps) - start if steps else None


def _resume(process: psutil.Process) -> None:
    if process.is_running():
        process.resume()
