"""MiniGRPO's loop without Ray: the pure runner, a store in memory, and real HTTP between agent and model."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from schema_agent import MAX_TOKENS, questions, schema_agent
from transformers import AutoModelForCausalLM

import raylight as rl
from raylight.agent.hooks import HookDispatcher
from raylight.algorithms.minigrpo.endpoint import Endpoint
from raylight.errors import DatasetError, PortInUseError
from raylight.experience.trajectory import build_trajectories
from raylight.quickstart import STARTER_MODEL
from raylight.quickstart.additions import additions
from raylight.quickstart.agent import adder
from raylight.runner.runner import Runner
from raylight.store.client import StoreClient
from raylight.store.service import StoreService
from raylight.traces.tracer import DummyTracer
from raylight.trainer.report import Report
from raylight.trainer.run_context import TrainerRunContext


class Quiet:
    """Display that keeps the notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def progress(self, text: str) -> None: ...

    def stage(self, text: str) -> None: ...

    def step(self, step: int, metrics: dict[str, float]) -> None: ...

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


async def train(
    folder: Path, val: list[Any], agent: Any = adder, tasks: Any = None, **settings: Any
) -> tuple[Report, StoreClient, list[str]]:
    """Run the algorithm on additions or other tasks, with a runner in this process."""
    plain = {
        "model": STARTER_MODEL,
        "max_model_len": 64,
        "max_new_tokens": 8,
        "tasks_per_step": 4,
        "group_size": 8,
        "lr": 1e-3,
    }
    algorithm, store, display = rl.MiniGRPO(**plain | settings), StoreClient(StoreService()), Quiet()
    report = Report(folder, display, algorithm.resolved())
    algorithm.set_store(store)
    algorithm.set_run_context(TrainerRunContext(report, "secret", {}, None))
    running = asyncio.create_task(
        Runner("w", store, agent, DummyTracer(), HookDispatcher(()), "secret", 32).serve()
    )
    try:
        async with asyncio.timeout(120):
            await algorithm.run(tasks or additions(0)[0][:64], val)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    return report, store, display.notes


async def test_rollouts_are_captured_trained_and_counted(tmp_path: Path) -> None:
    report, store, notes = await train(tmp_path, additions(0)[1][:8], n_steps=3, val_every=2, save_every=2)
    rows = {row["step"]: row for row in report._history}
    assert list(rows) == [0, 1, 2, 3]
    assert [step for step, row in rows.items() if "val/reward" in row] == [0, 2, 3]
    learned = [row for row in rows.values() if "learner/grad_norm" in row]
    assert [row["weights/version"] for row in learned] == list(range(1, len(learned) + 1)) != []
    assert all(row["mismatch/logprob_abs_max"] < 1e-3 for row in learned)
    assert any("GB at the peak" in note for note in notes)

    rollouts = await store.query_rollouts()
    found = await store.collect([rollout.rollout_id for rollout in rollouts])
    trained = [item for item in found if item.rollout.mode == "train"]
    assert len(trained) == 3 * 32
    versions = {version for item in trained for call in item.generations for version in call.weight_versions}
    assert versions == set(range(len(learned))) or versions == set(range(len(learned) + 1))
    assert all(len(item.generations) == 1 and len(item.generations[0].output_ids) <= 8 for item in trained)

    assert (tmp_path / "checkpoint" / "step-2" / "adapter_config.json").exists()
    loaded = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(STARTER_MODEL), tmp_path / "checkpoint"
    )
    assert max(float(p.abs().max()) for name, p in loaded.named_parameters() if "lora_B" in name) > 1e-4


async def test_a_schema_bound_agent_learns(tmp_path: Path) -> None:
    """The reward rises from about 0.5, because the choices that the schema leaves are trained."""
    report, store, _ = await train(
        tmp_path,
        [],
        schema_agent,
        questions(64),
        n_steps=12,
        tasks_per_step=8,
        lr=5e-3,
        max_new_tokens=MAX_TOKENS,
        seed=1,
    )
    rows = [row for row in report._history if row["step"]]
    rewards = [row["train/reward"] for row in rows]
    assert sum(rewards[-3:]) / 3 - sum(rewards[:3]) / 3 >= 0.15, rewards
    learned = [row for row in rows if "learner/grad_norm" in row]
    assert len(learned) >= 5
    assert all(row["mismatch/logprob_abs_max"] < 1e-3 for row in learned)
    for row in rows:
        sampled = row["constrained/tokens"] + row["constrained/forced_tokens"]
        assert sampled == 64 * row["train/response_tokens"]
        assert row["constrained/forced_fraction"] > 0.5
    rollouts = await store.query_rollouts()
    for item in await store.collect([rollout.rollout_id for rollout in rollouts]):
        (call,) = item.generations
        choices = [i for i, allowed in enumerate(call.allowed) if allowed != 1]
        (row,) = build_trajectories([call]).rows
        assert [i - len(call.prompt_ids) for i, trained in enumerate(row.mask) if trained] == choices


async def test_a_run_without_tasks_is_refused() -> None:
    with pytest.raises(DatasetError, match="train_dataset is missing"):
        await rl.MiniGRPO(model=STARTER_MODEL).run(None, None)


async def test_a_port_in_use_is_an_error() -> None:
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        with pytest.raises(PortInUseError, match=str(port)):
            async with Endpoint(None, StoreClient(StoreService()), "secret", "127.0.0.1", port):  # type: ignore[arg-type]
                pass
