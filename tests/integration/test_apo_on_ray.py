"""APO with real runners, a real store and a real client, against scripted models."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI
from run_output import metric_rows
from scripted_models import serve_script

import raylight as rl
from raylight.errors import CheckpointError, ConfigError, CriticError, RolloutsFailedError

TASKS = [{"a": a, "b": b} for a, b in itertools.product(range(4), range(3))]
TRAIN, VAL = TASKS[:6], TASKS[6:]
SEED = rl.PromptTemplate(template="What is {a} and {b}?")


pytestmark = pytest.mark.usefixtures("connected")


def apo(url: str, **settings: Any) -> rl.APO:
    defaults: dict[str, Any] = {
        "gradient_model": "critic",
        "apply_edit_model": "editor",
        "beam_width": 2,
        "branch_factor": 2,
        "beam_rounds": 1,
        "gradient_batch_size": 2,
        "val_batch_size": 3,
    }
    client = AsyncOpenAI(base_url=url, api_key="key", max_retries=1, timeout=20)
    return rl.APO(client, **defaults | settings)


def trainer(algorithm: rl.APO, folder: Path, **settings: Any) -> rl.Trainer:
    resources = {"prompt_template": SEED} | settings.pop("resources", {})
    return rl.Trainer(
        algorithm=algorithm, n_runners=2, output_dir=folder, initial_resources=resources, **settings
    )


def scripted_answer(text: str) -> str:
    """Return the answer of the agent's model: the sum, alone only if the prompt asks for that."""
    total = sum(
        int(word)
        for word in text.replace("?", " ").replace(".", " ").replace(",", " ").split()
        if word.isdigit()
    )
    return str(total) if "only" in text else f"The answer is {total}"


@rl.rollout
async def adder(task: dict, prompt_template: rl.PromptTemplate, worker: rl.LLM) -> float:
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=worker.endpoint, api_key=worker.api_key) as client:
        messages = [{"role": "user", "content": prompt_template.format(**task)}]
        reply = await client.chat.completions.create(model=worker.model, messages=messages)  # type: ignore[arg-type]
    return 1.0 if reply.choices[0].message.content == str(task["a"] + task["b"]) else 0.0


@pytest.mark.slow
def test_the_prompt_improves_the_reward(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edits = itertools.count()

    def script(model: str, text: str) -> str | int | tuple[str, str]:
        if model == "worker":
            return scripted_answer(text)
        if model == "critic":
            return "it talks too much" if "The answer is" in text else "fine as it is"
        number = next(edits)  # the editor's third answer fails twice, including the client's retry
        script = [
            "<prompt>Add {a}. Write only the number.</prompt>",
            "<prompt>Add {a} and {b}, please.</prompt>",
            500,
            500,
            "<prompt>Add {a} and {b}. Write only the number.</prompt>",
        ]
        return script[number] if number < len(script) else ("<prompt>{a}", "length")

    with serve_script(script) as models:
        algorithm = apo(models.url, max_concurrent=1, beam_rounds=2)
        worker = rl.LLM(endpoint=models.url, model="worker", traced=True)
        run = trainer(algorithm, tmp_path, resources={"worker": worker})
        summary = run.fit(adder, TRAIN, VAL)
    history = algorithm.history
    assert history is not None
    assert algorithm.get_best_prompt().template == "Add {a} and {b}. Write only the number."
    assert history.candidates[0].val_score == 0.0
    assert history.best_candidate.val_score == 1.0
    tried = [candidate.template.template for candidate in history.candidates]
    assert tried == [SEED.template, "Add {a} and {b}, please.", algorithm.get_best_prompt().template]
    assert history.rejected_by_kind() == {"cut off": 4, "placeholders": 1, "endpoint": 1}
    criticised = [text for model, text in models.requests if model == "critic"]
    assert all("The answer is" in text or "write only" in text.lower() for text in criticised), (
        "it reads the conversation"
    )
    assert any("[user] What is" in text and "Reward: 0" in text for text in criticised)
    assert any("it talks too much" in text for model, text in models.requests if model == "editor")
    shown = capsys.readouterr().out
    assert "prompts tried" in shown
    assert "6 rewrites rejected: 4 cut off" in shown
    assert "best prompt: v2, validation 1.000; the seed 0.000" in shown
    assert "step 2/2" in shown
    left = json.loads((tmp_path / "apo.json").read_text())
    assert left["best"] == "v2"
    assert left["candidates"][2]["parent"] == "v0"
    assert (tmp_path / "best_prompt.txt").read_text() == algorithm.get_best_prompt().template
    rows = metric_rows(tmp_path)
    assert [(row["step"], row["val/reward"]) for row in rows] == [(0, 0.0), (1, 1.0), (2, 1.0)]
    # seed on 6; 4 branches on 2; 3 prompts on 3; the leader on 6
    # 4 branches on 2; 2 prompts on 3, because the other rewrites were rejected
    assert summary["rollouts"] == summary["by_status"]["succeeded"] == 6 + 8 + 9 + 6 + 8 + 6


@rl.rollout
async def rewarded_by_length(task: dict, prompt_template: rl.PromptTemplate) -> float:
    """Agent rewarded by the number of words.

    It hangs on half of the tasks if the prompt contains "ponder", and fails on "fail".
    """
    import asyncio

    text = prompt_template.format(**task)
    if "ponder" in text and task["b"] == 1:
        await asyncio.Event().wait()
    if "fail" in text:
        raise ValueError("requested by the prompt")
    rl.emit_message(text)
    return float(len(text.split()))


@pytest.mark.slow
def test_rollouts_that_hang_or_fail_have_no_reward(tmp_path: Path) -> None:
    edits = iter(["ponder {a} {b} for long, really long", "fail at {a} {b} with so very many words here"] * 2)
    with serve_script(lambda model, text: next(edits) if model == "editor" else "longer!") as models:
        algorithm = apo(
            models.url,
            beam_width=1,
            branch_factor=2,
            val_batch_size=100,
            rollout_batch_timeout=5.0,
            max_concurrent=1,
        )
        trainer(algorithm, tmp_path, progress=False).fit(rewarded_by_length, TRAIN, VAL)
        criticised = [text for model, text in models.requests if model == "critic"]
    history = algorithm.history
    assert history is not None
    seed, hung, failed = history.candidates
    assert seed.val_score == seed.batch_scores[1] == 5.0
    assert hung.batch_scores[1] == pytest.approx(7 * 4 / 6)
    assert failed.batch_scores[1] == 0.0
    assert history.best == "v0"
    assert "- agentlightning.message" in criticised[0] or "What is" in criticised[0]
    assert "Reward: 5" in criticised[0]


@pytest.mark.slow
def test_a_failing_endpoint_ends_the_run_and_resume_continues_it(tmp_path: Path) -> None:
    down, words = [False], itertools.count()

    def script(model: str, text: str) -> str | int:
        if down[0]:
            return 503
        return "say more" if model == "critic" else "{a} {b}" + " more" * next(words)

    with serve_script(script) as models:
        algorithm = apo(models.url, beam_rounds=1)
        first = trainer(algorithm, tmp_path, progress=False).fit(rewarded_by_length, TRAIN, VAL)
        before = algorithm.history
        assert before is not None
        algorithm.settings = algorithm.settings.model_copy(update={"beam_rounds": 2})
        down[0] = True
        with pytest.raises(CriticError, match="InternalServerError"):
            trainer(algorithm, tmp_path, progress=False).fit(rewarded_by_length, TRAIN, VAL, resume="auto")
        down[0] = False  # the same client again, in another event loop
        second = trainer(algorithm, tmp_path, progress=False).fit(rewarded_by_length, TRAIN, VAL, resume=True)
    after = algorithm.history
    assert after is not None
    assert after.rounds_done == 2
    rows = metric_rows(tmp_path)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert [c.version for c in after.candidates][:5] == ["v0", "v1", "v2", "v3", "v4"]
    assert after.candidates[0].val_score == before.candidates[0].val_score
    assert after.best_candidate.val_score >= before.best_candidate.val_score  # type: ignore[operator]
    assert second["rollouts"] < first["rollouts"] + 6, "the seed is not validated again"
    with pytest.raises(CheckpointError, match="another val_dataset"):
        trainer(algorithm, tmp_path, progress=False).fit(rewarded_by_length, TRAIN, TRAIN, resume="auto")
    with pytest.raises(ConfigError, match="to resume from"):
        trainer(algorithm, tmp_path / "other", progress=False).fit(
            rewarded_by_length, TRAIN, VAL, resume=True
        )
    with pytest.raises(ConfigError, match="nothing reads resume"):
        trainer(rl.Baseline(), tmp_path).fit(rewarded_by_length, TRAIN, VAL, resume=True)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("status", [401, 404])
def test_a_wrong_key_or_name_ends_the_run_at_once(status: int, tmp_path: Path) -> None:
    with serve_script(lambda model, text: status) as models:
        with pytest.raises(CriticError, match="api_key"):
            trainer(apo(models.url), tmp_path, progress=False).fit(rewarded_by_length, TRAIN, VAL)
        assert len(models.requests) <= 4


@pytest.mark.slow
def test_an_agent_that_always_fails_ends_the_run(tmp_path: Path) -> None:
    @rl.rollout
    def broken(task: dict, prompt_template: rl.PromptTemplate) -> float:
        raise KeyError("no such thing")

    @rl.rollout
    def silent(task: dict, prompt_template: rl.PromptTemplate) -> None:
        return None

    with serve_script(lambda model, text: "x") as models:
        with pytest.raises(RolloutsFailedError, match="no such thing"):
            trainer(apo(models.url), tmp_path, progress=False).fit(broken, TRAIN, VAL)
        with pytest.raises(RolloutsFailedError, match="return a float"):
            trainer(apo(models.url), tmp_path, progress=False).fit(silent, TRAIN, VAL)


@pytest.mark.slow
def test_apo_serves_a_model_if_configured(tmp_path: Path) -> None:
    """The starter model adds only with the prompt that it was trained on."""
    from raylight.quickstart import STARTER_MODEL
    from raylight.quickstart.additions import additions

    train, val = additions(0)

    @rl.rollout
    async def asks(task: dict, prompt_template: rl.PromptTemplate, llm: rl.LLM) -> float:
        from openai import AsyncOpenAI

        async with AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key) as client:
            messages: list[Any] = [{"role": "user", "content": prompt_template.format(**task)}]
            reply = await client.chat.completions.create(
                model=llm.model, messages=messages, max_tokens=8, temperature=0.0
            )
        return 1.0 if reply.choices[0].message.content == str(task["a"] + task["b"]) else 0.0

    with serve_script(lambda model, text: "be terse" if model == "critic" else "{a}+{b}=") as models:
        algorithm = apo(
            models.url, served_model=STARTER_MODEL, beam_width=1, branch_factor=1, val_batch_size=16
        )
        trainer(algorithm, tmp_path, progress=False, engine={"max_model_len": 256}).fit(
            asks, train[:8], val[:32]
        )
        criticised = [text for model, text in models.requests if model == "critic"]
    history = algorithm.history
    assert history is not None
    assert history.candidates[0].val_score == 0.0
    assert algorithm.get_best_prompt().template == "{a}+{b}="
    assert "[assistant]" in criticised[0]
    with pytest.raises(ConfigError, match="nothing reads learner"):
        trainer(algorithm, tmp_path, learner={"n": 2}).fit(asks, train[:8], val[:32])
