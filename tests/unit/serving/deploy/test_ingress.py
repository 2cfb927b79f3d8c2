"""Serve's ports: chosen by one driver of a machine at a time."""

import threading

import pytest

from raylight.serving.deploy import ingress


def test_drivers_choose_their_ports_one_after_another() -> None:
    inside, log = threading.Event(), []

    def other() -> None:
        assert inside.wait(10)
        with ingress._port_lock():
            log.append("second")

    thread = threading.Thread(target=other)
    thread.start()
    with ingress._port_lock():
        inside.set()
        thread.join(0.3)
        log.append("first")
    thread.join(10)
    assert log == ["first", "second"]


def test_a_driver_that_never_ends_blocks_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingress, "PORT_LOCK_S", 0.2)
    with ingress._port_lock(), ingress._port_lock():
        pass
