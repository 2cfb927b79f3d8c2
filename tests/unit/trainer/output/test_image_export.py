"""Images in exports and transcripts of a run."""

import asyncio
import json
from pathlib import Path

import pytest
from command_runner import CliRunner
from image_helpers import make_image
from recorded_run import record_image_run

from raylight.cli import app
from raylight.errors import ImageError

RED = make_image("red")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    asyncio.run(record_image_run(tmp_path / "run", RED))
    return tmp_path / "run"


@pytest.mark.parametrize("kind", ["sft", "messages", "jsonl"])
def test_an_export_has_the_files(run: Path, kind: str) -> None:
    result = CliRunner().invoke(app, ["export-traces", str(run), "--format", kind])
    assert result.exception is None, result.exception
    record = json.loads(result.stdout)
    conversation = record["conversations"][0] if kind == "jsonl" else record
    assert conversation["messages"][0]["content"][1] == {
        "type": "image_url",
        "image_url": {"url": RED.data_url},
    }
    if kind == "jsonl":
        assert record["rows"][0]["images"] == [{"sha256": RED.sha256, "start": 1, "stop": 3}]


def test_a_missing_file_is_an_error(run: Path) -> None:
    (run / "store-images" / RED.sha256).unlink()
    result = CliRunner().invoke(app, ["export-traces", str(run)])
    assert isinstance(result.exception, ImageError)
    assert "copy the folder together with the store's file" in str(result.exception)


def test_a_transcript_names_the_image(run: Path) -> None:
    result = CliRunner().invoke(app, ["trace", str(run)])
    assert f"[image {RED.sha256[:12]}]" in result.stdout
    assert "which color?" in result.stdout
