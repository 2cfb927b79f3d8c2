"""Availability of a served model from probes, some of them late or refused."""

from typing import get_args

from hypothesis import given
from hypothesis import strategies as st

from raylight.serving.deploy.monitor import LATE_PROBES, REFUSED_PROBES, Probe, ProbeResult, ServingHealth

RESULTS = st.lists(st.sampled_from(get_args(ProbeResult)), max_size=40)


def health_after(*results: str) -> ServingHealth:
    """Health after probes at 1, 2, 3 ... seconds."""
    health = ServingHealth(0.0)
    for sent, result in enumerate(results, start=1):
        health.observe(Probe(float(sent), result, f"probe {sent}"))  # type: ignore[arg-type]
    return health


def test_two_refused_probes_are_an_outage_since_the_last_answer() -> None:
    assert health_after("answered", "refused").outage is None
    outage = health_after("answered", "answered", "refused", "refused").outage
    assert (outage.since, outage.reason) == (2.0, "probe 4")


def test_a_single_refused_probe_is_a_reload_of_the_ingress() -> None:
    health = health_after("refused", "answered", "refused", "busy", "refused")
    assert (health.outage, health.outages, health.is_in_doubt) == (None, 0, True)


def test_late_probes_are_an_outage_only_after_several() -> None:
    assert health_after(*["late"] * (LATE_PROBES - 1), "answered", "late").outage is None
    assert health_after(*["late"] * LATE_PROBES).outage is not None


def test_busy_replicas_are_no_outage() -> None:
    health = health_after(*["busy"] * 100, "refused", "refused")
    assert (health.outages, health.outage and health.outage.since) == (1, 100.0)


def test_only_an_answer_of_a_replica_ends_an_outage() -> None:
    health = health_after("refused", "refused", "busy", "late")
    assert health.outage is not None
    assert health.seconds_away(10.0) == 10.0
    health.observe(Probe(11.0, "answered"))
    assert health.outage is None
    assert health.seconds_away(20.0) == 11.0


@given(RESULTS)
def test_laws(results: list[str]) -> None:
    health, began = ServingHealth(0.0), 0
    reachable, seconds = 0.0, 0.0
    for sent, result in enumerate(results, start=1):
        before = health.outage
        health.observe(Probe(float(sent), result))  # type: ignore[arg-type]
        if result == "answered":
            assert health.outage is None
            seconds += sent - before.since if before else 0
            reachable = sent
        if before is None and result == "busy":
            reachable = sent
        if before is not None and result != "answered":
            assert health.outage is before
        if before is None and health.outage is not None:
            began += 1
            last = results[sent - REFUSED_PROBES : sent], results[sent - LATE_PROBES : sent]
            assert set(last[0]) == {"refused"} or set(last[1]) <= {"refused", "late"}
            assert health.outage.since == reachable
    assert health.outages == began
    ongoing = len(results) - health.outage.since if health.outage else 0
    assert health.seconds_away(len(results)) == seconds + ongoing
