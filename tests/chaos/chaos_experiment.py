"""A run under faults, from its start to the check of what it left."""

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
from chaos_faults import Fault, Recovery, is_line
from chaos_log import FOLDER_VARIABLE, SAMPLES, TASKS
from chaos_processes import RunProcesses
from chaos_runs import ChaosRun
from chaos_surroundings import SmallDisk, WallClock
from chaos_table import Result, Strike
from ray_cluster import eventually
from two_nodes import TwoNodes

START_S, DRIVER_S, CLEAN_S = 150.0, 200.0, 75.0
"""Deadlines: for the recovery from a fault and the moment of the next, for the driver's end after the last
fault, and for the end of its processes after its own. Ray's agents of a node try for a minute to report the
end of their raylet to a GCS that has ended too."""
ERROR = re.compile(r"^raylight\.errors\.(\w+): ")


class Experiment:
    """A run under its faults.

    Args:
        folder: folder of the test; the run directory is `run` in it.
    """

    def __init__(self, run: ChaosRun, folder: Path) -> None:
        self._run, self._folder = run, folder
        self._run_folder = folder / "run"
        self._events = Events(folder)
        self._processes = RunProcesses(f"{run.name}-{secrets.token_hex(4)}")
        self._environment = {
            **self._processes.environment,
            FOLDER_VARIABLE: str(folder),
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
            "PYTHONUNBUFFERED": "1",
        }
        self._settings = {"folder": str(self._run_folder), "steps": run.steps, **run.settings}
        self._disk = SmallDisk(self._run_folder, folder / "disk" if run.breaks_disk else None)
        self._clock: WallClock | None = None
        self._nodes: TwoNodes | None = None
        self._result = Result(run)
        self._freezes: list[tuple[threading.Timer, psutil.Process]] = []
        """Frozen processes, and the timers that end their freezes."""

    def run(self) -> Result:
        """Run to the end, resume whenever a fault ended the run, and check."""
        actions = {fault.action for fault in self._run.faults}
        result = self._result
        with contextlib.ExitStack() as stack:
            stack.callback(self._events.close)
            stack.callback(self._processes.kill)
            if actions & {"fill the disk", "break the disk"}:
                stack.enter_context(self._disk.mounted())
            if any(fault.clock_s for fault in self._run.faults):
                self._clock = WallClock(self._folder)
                self._environment |= self._clock.environment
            if actions & {"remove the node", "replace the node"}:
                self._nodes = TwoNodes(self._environment, other={"resources": {"learner_node": 1}})
                self._settings["address"] = self._nodes.address
            self._run_drivers()
            if self._nodes is not None:
                self._nodes.stop()
            result.left += self._processes.wait_for_end(CLEAN_S)
            result.left += self._processes.files()
            self._measure()
            result.findings = check(read_evidence(self._folder, self._run_folder, self._plan))
        return result

    @property
    def _plan(self) -> Plan:
        names = ("max_staleness", "stale")
        staleness = {name: self._settings[name] for name in names if name in self._settings}
        cancels = any(fault.action in ("interrupt", "terminate") for fault in self._run.faults)
        reorders = any(fault.action == "set the clock" for fault in self._run.faults)
        return Plan(self._run.steps, TASKS, SAMPLES, self._run.may_fail, cancels, reorders, **staleness)

    def _run_drivers(self) -> None:
        driver = self._start(resume=False)
        for fault in self._run.faults:
            try:
                strike = self._strike_at_moment(driver, fault)
            except (TimeoutError, AssertionError) as error:
                text = f"the moment of {fault.name} did not come within {START_S:g} s {error}"
                self._result.notes.append(text.strip())
                break
            if strike is None:
                self._result.notes.append(f"the driver ended before {fault.name}")
                break
            self._result.strikes.append(strike)
            if fault.error is not None:
                strike.end = self._end(driver)
                self._result.ends.append(strike.end)
                if strike.end in ("completed", "hang"):
                    return
                driver = self._resume(strike)
        self._result.ends.append(self._end(driver))

    def _start(self, resume: bool) -> Driver:
        return Driver(self._folder, self._environment, {**self._settings, "resume": resume}, self._events)

    def _resume(self, strike: Strike) -> Driver:
        """Start the next driver, when no process of the last one has the store open. Others may still end:
        Ray's agents take up to a minute."""
        self._events.drain()  # the last driver's exit must not count as the next one's
        ended = time.monotonic()
        eventually(lambda: not self._processes.find("store"), CLEAN_S, "the end of the store")
        if strike.fault.action in ("fill the disk", "break the disk"):
            self._disk.repair()
        if self._clock is not None:
            self._clock.move(strike.fault.clock_s)
        strike.resumed_at = time.monotonic()
        strike.waited = strike.resumed_at - ended
        return self._start(resume=True)

    # the fault

    def _strike_at_moment(self, driver: Driver, fault: Fault) -> Strike | None:
        """Wait for the moment of a fault and inject it; return None if the driver exits before."""
        deadline = time.monotonic() + START_S
        strikes = self._result.strikes
        # a run recovers from one fault before it meets the next
        prelude = [Recovery(strikes[-1].resumed_at or strikes[-1].at)] if strikes else fault.prelude
        if prelude and self._events.wait(prelude, deadline) is None:
            return None
        self._end_freezes()
        targets = self._processes.find(fault.target) if fault.target else []
        self._events.drain()
        if driver.exited.is_set():
            return None
        found = self._events.wait(fault.moment(self._run.seed), deadline)
        if found is None:
            return None
        targets = [process for process in targets if process.is_running()]  # some may have been replaced
        if fault.target == "program":
            targets = [psutil.Process(found.fields["pid"])]
        elif fault.target and not targets:
            targets = self._processes.wait_for(fault.target, deadline - time.monotonic())
        strike = Strike(fault, time.monotonic())
        if fault.action in ("interrupt", "terminate"):
            self._signal(driver, fault)
        else:
            self._inject(fault, targets)
        return strike

    def _inject(self, fault: Fault, targets: list[psutil.Process]) -> None:
        if fault.action == "fill the disk":
            self._disk.fill()
        if fault.action == "break the disk":
            self._disk.fail()
        if self._nodes is not None:
            self._nodes.remove_node()
            if fault.action == "replace the node":
                threading.Thread(target=self._nodes.add_node).start()  # the run goes on meanwhile
        for process in targets if fault.every else targets[:1]:
            if fault.action in ("kill", "replace the node"):
                process.kill()
                continue
            process.suspend()
            if fault.seconds is not None:
                timer = threading.Timer(fault.seconds, _go_on, [process])
                timer.start()
                self._freezes.append((timer, process))
        if self._clock is not None and fault.action == "set the clock":
            self._clock.move(fault.clock_s)

    def _end_freezes(self) -> None:
        """End what is left of the freezes. One that does not stop the run would last until its end."""
        for timer, process in self._freezes:
            timer.cancel()
            _go_on(process)
        self._freezes.clear()

    def _signal(self, driver: Driver, fault: Fault) -> None:
        """Press Ctrl-C, which every process of the terminal's foreground group receives; or send SIGTERM."""
        if fault.action == "terminate":
            driver.process.send_signal(signal.SIGTERM)
            return
        os.killpg(driver.process.pid, signal.SIGINT)
        for line in ("interrupted; stopping", "please wait")[: fault.signals - 1]:
            if self._events.wait([is_line(line)], time.monotonic() + START_S) is None:
                return
            os.killpg(driver.process.pid, signal.SIGINT)

    # the end

    def _end(self, driver: Driver) -> str:
        """Wait for the end of a driver; return how it ended."""
        if not driver.exited.wait(DRIVER_S):
            self._result.notes.append("its last lines: " + " / ".join(driver.lines[-3:]))
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
        self._result.notes.append("its last lines: " + " / ".join(driver.lines[-3:]))
        return "untyped"

    def _measure(self) -> None:
        """Set the times of recovery from each fault. After one that ends the driver, only the rollouts and
        steps of the resumed run count."""
        self._events.drain()
        for strike in self._result.strikes:
            recovery = Recovery(strike.resumed_at or strike.at, self._events.seen)
            start = strike.at + strike.waited
            strike.rollout_s = recovery.rollout_at and recovery.rollout_at - start
            strike.step_s = recovery.step_at and recovery.step_at - start


def _go_on(process: psutil.Process) -> None:
    if process.is_running():
        process.resume()
