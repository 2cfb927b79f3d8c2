"""Stages of a start, noted by several processes."""

import logging
import os
import subprocess
import sys

import pytest

from raylight.engines import start_stages
from raylight.engines.start_stages import StartStages, note_stage
from raylight.engines.vllm.worker import STAGES, StageHandler, note_start_stages

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs an anonymous file")


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> StartStages:
    monkeypatch.setenv(start_stages.VARIABLE, "")
    return StartStages()


def test_each_process_notes_its_stage(stages: StartStages) -> None:
    stage, read = stages.read()
    assert stage == ""
    assert read > 0, "this process has read its modules"
    note_stage("importing")
    code = "from raylight.engines.start_stages import note_stage; note_stage('loading weights')"
    subprocess.run([sys.executable, "-c", code], check=True)
    stage, more = stages.read()
    assert stage == "loading weights"
    assert more >= read


def test_a_process_outside_a_start_notes_nothing(
    stages: StartStages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(start_stages.VARIABLE)
    note_stage("loading weights")
    monkeypatch.setenv(start_stages.VARIABLE, f"/proc/{os.getpid()}/fd/999999")
    note_stage("loading weights")
    assert stages.read()[0] == ""


def test_stages_are_read_from_the_messages_of_vllm(stages: StartStages) -> None:
    logger = logging.getLogger("vllm.v1.worker")
    note_start_stages()
    note_start_stages()
    handlers = [one for one in logging.getLogger("vllm").handlers if isinstance(one, StageHandler)]
    try:
        logger.setLevel(logging.INFO)
        logger.info("Starting to load model %s...", "m")
        logger.info("something else")
        assert stages.read()[0] == "loading weights"
        logger.info("GPU KV cache size: %s tokens", 8)
        assert stages.read()[0] == "warming up and capturing graphs"
    finally:
        logging.getLogger("vllm").removeHandler(handlers[0])
    assert len(handlers) == 1
    assert len(set(STAGES.values())) > 4
