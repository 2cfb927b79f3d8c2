"""The models in training: their limit, and those whose adapters are lost."""

import pytest

from raylight.http.errors import RequestError
from raylight.tinker.models import Models
from raylight.tinker.requests import LoraSpec


async def test_a_lost_model_makes_room_and_is_refused_with_its_reason() -> None:
    models = Models(limit=1, max_waiting=4)
    first = models.add("first", "session", LoraSpec(rank=2), None)
    with pytest.raises(RequestError, match="--max-models") as caught:
        models.add("second", "session", LoraSpec(rank=2), None)
    assert caught.value.status == 429
    first.lost = "continue from tinker://first/weights/a"
    second = models.add("second", "session", LoraSpec(rank=2), None)
    assert models.get("second") is second
    with pytest.raises(RequestError, match="continue from tinker://first/weights/a") as caught:
        models.get("first")
    assert caught.value.status == 404
    assert models.find() == [first, second]  # until their session ends
    for model in (first, second):
        await model.turns.close()
