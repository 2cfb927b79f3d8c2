"""Files of images under their digests."""

from pathlib import Path

import pytest
from image_helpers import make_image

from raylight.errors import ImageError
from raylight.images.folder import ImageFolder

RED, BLUE = make_image("red"), make_image("blue")


def test_a_file_is_written_once(tmp_path: Path) -> None:
    folder = ImageFolder(tmp_path / "images")
    folder.write({RED.sha256: RED.data})
    before = (folder.path / RED.sha256).stat()
    folder.write({RED.sha256: RED.data, BLUE.sha256: BLUE.data})
    assert (folder.path / RED.sha256).stat().st_mtime_ns == before.st_mtime_ns
    assert folder.read([BLUE.sha256, RED.sha256]) == {RED.sha256: RED.data, BLUE.sha256: BLUE.data}
    with pytest.raises(ImageError, match="has no image"):
        folder.read(["0" * 64])


def test_a_cleared_folder_keeps_the_files_of_others(tmp_path: Path) -> None:
    folder = ImageFolder(tmp_path / "images")
    folder.clear()
    folder.write({RED.sha256: RED.data})
    (folder.path / (BLUE.sha256 + ".partial")).write_bytes(b"cut")
    (folder.path / "notes.txt").write_text("mine")
    folder.clear()
    assert [path.name for path in folder.path.iterdir()] == ["notes.txt"]
    (folder.path / "notes.txt").unlink()
    folder.clear()
    assert not folder.path.exists()


def test_another_digest_is_refused(tmp_path: Path) -> None:
    folder = ImageFolder(tmp_path)
    with pytest.raises(ImageError, match="another digest"):
        folder.write({RED.sha256: BLUE.data})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["../store.db", "", "A" * 64, "0" * 63, "0" * 64 + "\n"])
def test_a_name_that_is_no_digest_is_refused(tmp_path: Path, name: str) -> None:
    folder = ImageFolder(tmp_path)
    for use in (lambda: folder.read([name]), lambda: folder.write({name: b""})):
        with pytest.raises(ImageError, match="not a sha256 digest"):
            use()
