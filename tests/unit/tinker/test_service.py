"""The state of a server: idle models whose adapters are lost make room."""

import asyncio
from pathlib import Path
from typing import Any, cast

import httpx2
import numpy as np
import pytest
from starlette.responses import JSONResponse
from unit_helpers import until, within

from raylight.engines.protocol import LoraAdapter
from raylight.errors import ConfigError, LearnerLostError
from raylight.http.errors import RequestError
from raylight.tinker.checkpoints import CheckpointPath, Checkpoints
from raylight.tinker.models import AdapterTrainer
from raylight.tinker.requests import AdamParams, CreateModel, LoadWeights, LoraSpec, OptimStep
from raylight.tinker.settings import TinkerSettings

pytest.importorskip("tinker.proto", reason="pip install 'raylight[tinker]'")
from raylight.tinker.app import AccessCheck
from raylight.tinker.service import TinkerService

NAME = "raylight/tiny"


class Trainer:
    """A stand-in for the trainer that only creates and loses adapters. `fails` are the methods that fail."""

    def __init__(self, *fails: Any) -> None:
        self.fails = fails
        self.losses: asyncio.Queue[list[str]] = asyncio.Queue()
        self.gone = False

    async def call(self, method: Any, model_id: str, *args: Any) -> None:
        assert method in (AdapterTrainer.create, AdapterTrainer.remove, AdapterTrainer.load)
        if method in self.fails:
            raise ConfigError("the adapter does not fit")

    async def wait_loss(self) -> list[str]:
        lost = await self.losses.get()
        if self.gone:
            raise LearnerLostError("gone")
        return lost


def create(service: TinkerService) -> Any:
    session = service.sessions.open()
    return service.create_model(CreateModel(session_id=session, model_seq_id=0, base_model=NAME))


def service_of(trainer: Trainer, folder: Path, on_lost: Any = None) -> TinkerService:
    settings = TinkerSettings(NAME, vocabulary=8, max_model_len=8, max_models=1)
    engines: Any = None
    return TinkerService(settings, cast(Any, trainer), engines, Checkpoints(folder), on_lost)


async def test_an_idle_model_makes_room_when_its_adapter_is_lost(tmp_path: Path) -> None:
    ends: list[LearnerLostError] = []
    trainer = Trainer()
    service = service_of(trainer, tmp_path, ends.append)
    accepted = create(service)
    async with within():
        await service.promises.wait(accepted["request_id"], 5)
    with pytest.raises(RequestError, match="--max-models"):
        create(service)
    lost = accepted["model_id"]
    trainer.losses.put_nowait([lost])
    await until(lambda: all(model.lost for model in service.models.find()))
    other = create(service)["model_id"]
    with pytest.raises(RequestError, match="the trainer has died and was started again; it has no saved"):
        service.models.get(lost)
    assert service.models.get(other).lost is None
    trainer.gone = True
    trainer.losses.put_nowait([])
    await until(lambda: bool(ends))
    await service.close()


async def test_a_model_that_was_not_created_makes_room_and_says_why(tmp_path: Path) -> None:
    service = service_of(Trainer(AdapterTrainer.create), tmp_path)
    async with within():
        accepted = create(service)
        step = service.optim_step(OptimStep(model_id=accepted["model_id"], adam_params=AdamParams()))
        for request in (accepted, step):
            answer = await service.promises.wait(request["request_id"], 5)
            assert answer is not None
            assert b"the adapter does not fit" in answer.content
        assert create(service)["model_id"] != accepted["model_id"]
        await service.close()


async def test_a_state_that_was_not_loaded_is_not_taken_for_the_last(tmp_path: Path) -> None:
    trainer = Trainer(AdapterTrainer.load)
    service = service_of(trainer, tmp_path)
    path = CheckpointPath.of("other", "weights", "state")
    lora = LoraSpec(rank=2).model_dump(exclude={"type"})
    service.checkpoints.save(path, LoraAdapter({}, {"a": np.zeros(1)}), {}, base_model=NAME, lora=lora)
    async with within():
        model_id = create(service)["model_id"]
        load = service.load_weights(LoadWeights(path=str(path), optimizer=False, model_id=model_id))
        answer = await service.promises.wait(load["request_id"], 5)
        assert answer is not None
        assert b"the adapter does not fit" in answer.content
        trainer.losses.put_nowait([model_id])
        await until(lambda: service.models.find()[0].lost is not None)
    with pytest.raises(RequestError, match="it has no saved state"):
        service.models.get(model_id)
    await service.close()


@pytest.mark.parametrize(
    ("key", "host", "sent", "status"),
    [
        (None, "127.0.0.1:8080", {}, 200),
        (None, "localhost", {}, 200),
        (None, "evil.example:8080", {}, 403),
        (None, "127.0.0.1.evil.example", {}, 403),
        ("tml-1", "server.example", {"x-api-key": "tml-1"}, 200),
        ("tml-1", "localhost", {"authorization": "Bearer tml-2"}, 401),
    ],
)
async def test_a_server_without_a_key_answers_its_own_names_only(
    key: str | None, host: str, sent: dict[str, str], status: int
) -> None:
    app = AccessCheck(JSONResponse({}), key)
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://x") as client:
        assert (await client.get("/", headers={"host": host, **sent})).status_code == status
