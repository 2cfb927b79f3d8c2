"""The recovery of a run from a fault, the expected ends of its drivers, and the faults of both loops."""

from typing import Any

import pytest
from chaos_events import Event
from chaos_faults import Recovery
from chaos_processes import TARGETS
from chaos_runs import RUNS
from chaos_table import Result


def event(kind: str, at: float, **fields: Any) -> Event:
    return Event(kind, at, fields)


def test_a_recovery_takes_a_rollout_and_an_update_that_began_after_the_fault() -> None:
    recovery = Recovery(10.0)
    before = [event("begun", 9, attempt="a"), event("update", 9)]
    early = [event("finished", 11, attempt="a"), event("step", 12), event("begun", 13, attempt="b")]
    assert not any(recovery(e) for e in [*before, *early, event("finished", 14, attempt="b")])
    assert not recovery(event("update", 15))
    assert recovery(event("step", 16))
    assert (recovery.rollout_at, recovery.step_at) == (14, 16)


def test_a_run_must_end_as_each_of_its_faults_says() -> None:
    def faults_found(name: str, *ends: str) -> list[str]:
        return Result(RUNS[name], ends=list(ends)).faults_found

    assert not faults_found("haproxy", "completed")
    assert faults_found("haproxy", "signal 9", "completed")
    assert not faults_found("wait-disk", "DiskError", "completed")
    assert faults_found("wait-disk", "completed")
    assert not faults_found("wait-buffer", "signal 9", "completed")
    assert faults_found("wait-buffer", "hang", "completed")


def test_faults_at_random_moments_come_in_an_order_of_the_seed() -> None:
    def order(seed: str) -> list[str]:
        return [fault.target for fault in RUNS["mask-random"].with_seed(seed).faults]

    assert order("1") == order("1") != order("2")
    assert sorted(order("1")) == sorted(order("2"))


def test_each_fault_can_be_injected_alone() -> None:
    alone = list(RUNS["replica"].alone())
    assert [run.faults for run in alone] == [(fault,) for fault in RUNS["replica"].faults]
    assert alone[0].name == "replica:replica-start-kill"


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("action", ["kill", "freeze"])
@pytest.mark.parametrize("target", sorted(TARGETS.keys() - {"program", "GCS", "raylet", "dashboard agent"}))
def test_both_loops_meet_kills_and_freezes_of_each_part(target: str, action: str, asynchronous: bool) -> None:
    runs = [run for run in RUNS.values() if ("max_staleness" in run.settings) is asynchronous]
    faults = [fault for run in runs for fault in run.faults]
    assert any(fault.target == target and fault.action == action for fault in faults)
