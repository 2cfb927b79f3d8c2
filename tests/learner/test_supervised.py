"""Supervised and preference updates against plain torch, TRL, and other shapes of the same batch."""

import copy
import math
import random
import shutil

import pytest
import supervised_ranks
import torch
from rank_processes import run_ranks
from ranks import PROBE, plain_probe
from supervised_ranks import SETTINGS, batch, make_model, pairs, scored_pairs, shard_of
from torch.nn.functional import logsigmoid
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BambaConfig,
    GPT2Config,
)

import raylight as rl
from raylight.config import LearnerConfig
from raylight.engines.reward_model.engine import Classifier
from raylight.errors import ConfigError, DatasetError
from raylight.experience.batches.supervised_batches import LearnedRow, SupervisedData, build_supervised_batch
from raylight.learner.model.verl_engines import build_reward_model
from raylight.learner.model.weights import save_model
from raylight.learner.updates.supervised import SupervisedModel
from raylight.quickstart import STARTER_MODEL
from raylight.quickstart.additions import additions, question
from raylight.trainer.loops.supervised_data import batch_schedule, load_supervised_data

PADDING = 0
LOSSES = {
    "sigmoid": ("sigmoid", 0.0),
    "smoothed": ("sigmoid", 0.1),
    "ipo": ("ipo", 0.0),
    "hinge": ("hinge", 0.0),
    "robust": ("robust", 0.1),
}


pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(scope="module")
def plain():
    return AutoModelForCausalLM.from_pretrained(STARTER_MODEL)


def answer_logprobs(model, row) -> torch.Tensor:
    """Log-probs of a row's learned tokens by plain transformers."""
    tokens, mask = torch.tensor(row.tokens).long(), torch.tensor(row.mask) == 1
    logprobs = model(tokens[None]).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(-1, tokens[1:, None])[:, 0][mask[1:]]


def plain_sft_loss(model) -> torch.Tensor:
    found = [answer_logprobs(model, row) for row in batch_rows("sft")]
    return -torch.cat(found).mean()


def batch_rows(kind):
    from supervised_ranks import conversations

    examples = conversations() if kind == "sft" else pairs()
    return [row for example in examples for rows in example.answers for row in rows]


def plain_dpo_loss(model, initial, beta, loss_type, smoothing) -> torch.Tensor:
    """Mean loss of the pairs, by the formulas of the papers."""
    losses = []
    for example in pairs():
        ratios, lengths = [], []
        for (row,) in example.answers:
            own, reference = answer_logprobs(model, row), answer_logprobs(initial, row).detach()
            ratios.append((own - reference).sum())
            lengths.append(len(own))
        margin = ratios[0] - ratios[1]
        if loss_type == "hinge":
            losses.append(torch.relu(1 - beta * margin))
        elif loss_type == "ipo":
            losses.append((ratios[0] / lengths[0] - ratios[1] / lengths[1] - 1 / (2 * beta)) ** 2)
        else:
            right, wrong = -logsigmoid(beta * margin), -logsigmoid(-beta * margin)
            mixed = (1 - smoothing) * right + (smoothing if loss_type == "sigmoid" else -smoothing) * wrong
            losses.append(mixed if loss_type == "sigmoid" else mixed / (1 - 2 * smoothing))
    return torch.stack(losses).mean()


def plain_step(model, loss, settings) -> float:
    """Take the step of AdamW that the settings describe; return the norm of the gradient."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay
    )
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.grad_clip)
    optimizer.step()
    return float(norm)


@pytest.mark.parametrize("packed", [False, True])
def test_an_sft_step_is_that_of_plain_torch(plain, packed):
    reference, model = copy.deepcopy(plain), make_model("sft", {"packed": packed})
    loss = plain_sft_loss(reference)
    metrics = model.update_shard(shard_of(model, batch("sft")))
    norm = plain_step(reference, loss, SETTINGS["sft"])
    assert metrics["train/loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert metrics["learner/grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert model.logprobs(PROBE) == pytest.approx(plain_probe(reference), abs=1e-4)
    found = model.evaluate_shard(shard_of(model, batch("sft")))
    with torch.no_grad():
        assert found["loss"] / found["count"] == pytest.approx(float(plain_sft_loss(reference)), abs=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_a_preference_step_is_that_of_plain_torch(plain, name):
    loss_type, smoothing = LOSSES[name]
    reference = copy.deepcopy(plain)
    settings = SETTINGS["dpo"].model_copy(update={"loss_type": loss_type, "label_smoothing": smoothing})
    model = make_model("dpo", loss_type=loss_type, label_smoothing=smoothing)
    for step in (1, 2):  # the first one begins at the initial model, where the margin is 0
        loss = plain_dpo_loss(reference, plain, settings.beta, loss_type, smoothing)
        metrics = model.update_shard(shard_of(model, batch("dpo")))
        assert metrics["train/loss"] == pytest.approx(loss.item(), abs=1e-6 if step == 1 else 1e-4)
        reference.zero_grad()
        if step == 1:
            norm = plain_step(reference, loss, settings)
            assert metrics["learner/grad_norm"] == pytest.approx(norm, rel=1e-5)
            # AdamW's first step divides gradients near 0 by themselves, so that rounding shows
            assert model.logprobs(PROBE) == pytest.approx(plain_probe(reference), abs=1e-3)


@pytest.mark.parametrize("kind", SETTINGS)
def test_micro_batches_do_not_change_an_update(kind):
    whole, split = make_model(kind), make_model(kind, {"max_tokens_per_micro_batch": 16})
    first, second = (model.update_shard(shard_of(model, batch(kind))) for model in (whole, split))
    assert first == pytest.approx(second, rel=1e-4, abs=1e-5)
    if kind != "reward":
        # AdamW's first step divides gradients near 0 by themselves, so that rounding shows
        assert whole.logprobs(PROBE) == pytest.approx(split.logprobs(PROBE), rel=1e-4, abs=1e-3)


@pytest.mark.parametrize("kind", SETTINGS)
def test_an_adapter_learns_and_its_base_is_the_reference(kind):
    model = make_model(kind, {"lora": {"rank": 4}}, lr=1e-2)
    losses = [model.update_shard(shard_of(model, batch(kind)))["train/loss"] for _ in range(4)]
    assert losses[-1] < losses[0] - 0.05
    if kind == "dpo":
        assert losses[0] == pytest.approx(math.log(2), abs=1e-6)


def test_the_rows_of_an_answer_count_together(plain):
    """A chosen answer of two rows has the sum of their log-probs."""
    examples = pairs()
    extra = examples[1].answers[0][0]
    examples[0] = type(examples[0])("0", ((*examples[0].answers[0], extra), examples[0].answers[1]))
    model = make_model("dpo")
    model.update_shard(shard_of(model, batch("dpo")))
    moved = AutoModelForCausalLM.from_pretrained(STARTER_MODEL)
    moved.load_state_dict({name: torch.from_numpy(array) for name, array in model.export().items()})
    with torch.no_grad():
        ratio = sum(
            float((answer_logprobs(moved, row) - answer_logprobs(plain, row)).sum())
            for row in examples[0].answers[0]
        )
    found = model.evaluate_shard(shard_of(model, build_supervised_batch(examples[:1])))
    assert found["chosen_reward"] == pytest.approx(SETTINGS["dpo"].beta * ratio, abs=1e-5)


# reward models


def classifier_of(model) -> torch.nn.Module:
    """Return a copy of a reward model in the form in which it is saved."""
    classifier = AutoModelForSequenceClassification.from_pretrained(STARTER_MODEL, num_labels=1)
    weights = {name: torch.from_numpy(array) for name, array in model.export().items()}
    found = classifier.load_state_dict(weights, strict=False)
    assert (found.missing_keys, found.unexpected_keys) == ([], [])
    return classifier.eval()


def plain_scores(classifier) -> torch.Tensor:
    """Scores of all answers by plain transformers, one conversation at a time."""
    rows = [answer[0].tokens[:-1] for example in scored_pairs() for answer in example.answers]
    return torch.stack([classifier(torch.tensor(row).long()[None]).logits[0, 0] for row in rows])


def plain_reward_loss(classifier) -> torch.Tensor:
    scores = plain_scores(classifier).double()
    margins = torch.tensor([example.margin for example in scored_pairs()])
    losses = -logsigmoid(scores[0::2] - scores[1::2] - margins) + 0.01 * (scores[0::2] + scores[1::2]) ** 2
    return losses.mean()


@pytest.mark.parametrize("packed", [False, True])
def test_a_step_of_a_reward_model_is_that_of_plain_torch(packed):
    model = make_model("reward", {"packed": packed})
    reference = classifier_of(model)
    loss, settings = plain_reward_loss(reference), SETTINGS["reward"]
    scores = plain_scores(reference).detach()
    metrics = model.update_shard(shard_of(model, batch("reward")))
    assert metrics["train/loss"] == pytest.approx(float(loss), abs=1e-6)
    assert metrics["train/chosen_reward"] == pytest.approx(float(scores[0::2].mean()), abs=1e-6)
    assert metrics["train/accuracy"] == float((scores[0::2] > scores[1::2]).float().mean())
    assert metrics["learner/grad_norm"] == pytest.approx(plain_step(reference, loss, settings), rel=1e-5)
    with torch.no_grad():
        found = model.evaluate_shard(shard_of(model, batch("reward")))
        assert found["loss"] / found["count"] == pytest.approx(float(plain_reward_loss(reference)), abs=1e-4)


def test_the_loss_of_a_reward_model_is_that_of_trl(tmp_path):
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    model = make_model("reward")
    message = [{"role": "user", "content": "1+1="}]
    one = {"prompt": [message], "chosen": [[{"role": "assistant", "content": "2"}]], "margin": [0.0]}
    arguments = trl.RewardConfig(
        output_dir=str(tmp_path), report_to=[], use_cpu=True, bf16=False, center_rewards_coefficient=0.01
    )
    trainer = trl.RewardTrainer(
        classifier_of(model),
        arguments,
        train_dataset=Dataset.from_dict(one | {"rejected": [[{"role": "assistant", "content": "3"}]]}),
        processing_class=AutoTokenizer.from_pretrained(STARTER_MODEL),
    )
    trainer.model.eval()
    answers = [answer[0] for example in scored_pairs() for answer in example.answers]
    rows = [LearnedRow(row.tokens[:-1], row.mask[:-1]) for row in [*answers[0::2], *answers[1::2]]]
    inputs = trl_inputs(rows, "completion_mask")
    del inputs["completion_mask"]
    inputs["input_ids"][inputs["attention_mask"] == 0] = trainer.model.config.pad_token_id
    inputs["margin"] = torch.tensor([example.margin for example in scored_pairs()])
    with torch.no_grad():
        expected = float(trainer.compute_loss(trainer.model, inputs))
    metrics = model.update_shard(shard_of(model, batch("reward")))
    assert metrics["train/loss"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_a_saved_reward_model_scores_in_its_engine_and_can_be_trained_on(tmp_path, lora):
    model = make_model("reward", {"lora": lora}, lr=1e-3)
    for _ in range(2):
        model.update_shard(shard_of(model, batch("reward")))
    save_model(model.engine, str(tmp_path / "saved"))
    rows = [answer[0].tokens[:-1].tolist() for example in scored_pairs() for answer in example.answers]
    scores = Classifier(str(tmp_path / "saved"), "float32", "cpu", 4096).scores(rows)
    total = model.evaluate_shard(shard_of(model, batch("reward")))
    assert sum(scores[0::2]) == pytest.approx(total["chosen_reward"], abs=1e-4)
    assert sum(scores[1::2]) == pytest.approx(total["rejected_reward"], abs=1e-4)
    again = SupervisedModel(str(tmp_path / "saved"), LearnerConfig(), SETTINGS["reward"], 1)
    assert again.evaluate_shard(shard_of(again, batch("reward"))) == pytest.approx(total, abs=1e-4)


@pytest.mark.slow
def test_a_reward_model_learns_to_prefer_a_digit():
    """Pairs of messages, as `rl.RewardModel(data=...)` reads them."""

    def answer(number):
        return [{"role": "user", "content": "?"}, {"role": "assistant", "content": number}]

    numbers = [str(n) for n in range(10, 1000) if "7" in str(n)]
    random.Random(0).shuffle(numbers)
    data = [{"chosen": answer(n), "rejected": answer(n.replace("7", "8")), "margin": 0.5} for n in numbers]
    algorithm = rl.RewardModel(model=STARTER_MODEL, data=data[:192], lr=1e-3)
    train = load(algorithm)
    assert {example.margin for example in train} == {0.5}
    held_out = build_supervised_batch(load(rl.RewardModel(model=STARTER_MODEL, data=data[192:])))
    torch.manual_seed(0)
    model = SupervisedModel(STARTER_MODEL, LearnerConfig(), algorithm.policy_settings(), 18)
    for step in range(18):
        part = train[step % 6 * 32 : step % 6 * 32 + 32]
        model.update_shard(shard_of(model, build_supervised_batch(part)))
    found = model.evaluate_shard(shard_of(model, held_out))
    assert found["accuracy"] / found["count"] > 0.9


@pytest.mark.parametrize("pads_with", ["the end", "token 0"])
def test_the_scored_token_is_that_of_transformers_whatever_pads(tmp_path, pads_with):
    """Tokenizers may pad with the token that ends an answer."""
    shutil.copytree(STARTER_MODEL, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    first = tokenizer.convert_ids_to_tokens(0)
    tokenizer.pad_token = tokenizer.eos_token if pads_with == "the end" else first
    tokenizer.save_pretrained(tmp_path / "model")
    data = [{k: [{"role": "assistant", "content": n}] for k, n in (("chosen", "12"), ("rejected", "345"))}]
    algorithm = rl.RewardModel(model=str(tmp_path / "model"), data=data)
    (example,) = load_supervised_data(algorithm, algorithm.model, LearnerConfig()).train
    torch.manual_seed(0)
    model = SupervisedModel(algorithm.model, LearnerConfig(), algorithm.policy_settings(), 1)
    save_model(model.engine, str(tmp_path / "saved"))
    rows = [
        tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        for text in ("12", "345")
    ]
    scores = Classifier(str(tmp_path / "saved"), "float32", "cpu", 4096).scores(rows)
    found = model.evaluate_shard(shard_of(model, build_supervised_batch([example])))
    assert scores == pytest.approx([found["chosen_reward"], found["rejected_reward"]], abs=1e-5)


@pytest.mark.parametrize("margin", ["1", True, float("nan"), None])
def test_a_wrong_margin_raises(margin):
    pair = {
        "chosen": [{"role": "assistant", "content": "1"}],
        "rejected": [{"role": "assistant", "content": "2"}],
    }
    with pytest.raises(DatasetError, match="example 1 of data: margin is"):
        load(rl.RewardModel(model=STARTER_MODEL, data=[pair | {"margin": margin}]))


def test_an_architecture_without_reward_models_is_refused(tmp_path):
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    BambaConfig(**sizes, vocab_size=16, mamba_n_heads=2, mamba_d_head=8).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="transformers has no reward models of the architecture bamba"):
        build_reward_model(str(tmp_path), LearnerConfig(), SETTINGS["reward"], 1)


def test_a_head_of_another_name_and_answers_that_are_cut_off_are_refused(tmp_path):
    shutil.copytree(STARTER_MODEL, tmp_path / "gpt2", ignore=shutil.ignore_patterns("*.safetensors"))
    config = GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=300, n_positions=16)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ConfigError, match="GPT2ForTokenClassification has no head of the name `score`"):
        build_reward_model(str(tmp_path / "gpt2"), LearnerConfig(), SETTINGS["reward"], 1)
    with pytest.raises(ConfigError, match="would cut off the answers that a reward model scores"):
        load_supervised_data(
            rl.RewardModel(model=STARTER_MODEL, data=[]), STARTER_MODEL, LearnerConfig(long_rows="truncate")
        )


@pytest.mark.slow
def test_two_ranks_learn_as_one():
    one, two = (run_ranks(supervised_ranks.main, ranks)[0] for ranks in (1, 2))
    for name, value in one.items():
        # AdamW divides a gradient near 0 by itself, so that rounding shows in single log-probs
        tolerance = 1e-5 if name.endswith(("loss", "margin", "grad_norm")) else 5e-4
        assert two[name] == pytest.approx(value, rel=1e-5, abs=tolerance), name


# TRL


def trl_inputs(rows, mask_name):
    """A padded batch as TRL's collators return it."""
    width = max(len(row.tokens) for row in rows)
    ids = torch.full((len(rows), width), PADDING)
    attention, learned = torch.zeros_like(ids), torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, : len(row.tokens)] = torch.tensor(row.tokens).long()
        attention[i, : len(row.tokens)] = 1
        learned[i, : len(row.tokens)] = torch.tensor(row.mask).long()
    inputs = {"input_ids": ids, "attention_mask": attention}
    if mask_name == "labels":
        return inputs | {"labels": ids.where(learned == 1, -100)}
    return inputs | {"completion_mask": learned}


def test_the_sft_loss_is_that_of_trl(plain, tmp_path):
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    rows = batch_rows("sft")
    arguments = trl.SFTConfig(
        output_dir=str(tmp_path),
        report_to=[],
        use_cpu=True,
        bf16=False,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    trainer = trl.SFTTrainer(
        copy.deepcopy(plain),
        arguments,
        train_dataset=Dataset.from_dict({"input_ids": [[1]]}),
        processing_class=AutoTokenizer.from_pretrained(STARTER_MODEL),
    )
    trainer.model.eval()
    with torch.no_grad():
        expected = float(trainer.compute_loss(trainer.model, trl_inputs(rows, "labels")))
    metrics = (model := make_model("sft")).update_shard(shard_of(model, batch("sft")))
    assert metrics["train/loss"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    "name", ["sigmoid", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ipo", "hinge", "robust"))]
)
def test_the_preference_loss_is_that_of_trl(plain, name, tmp_path):
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    loss_type, smoothing = LOSSES[name]
    moved = make_model("sft")  # a policy that differs from the reference
    moved.update_shard(shard_of(moved, batch("sft")))
    policy = copy.deepcopy(plain)
    weights = {key: torch.from_numpy(array) for key, array in moved.export().items()}
    policy.load_state_dict(weights)
    arguments = trl.DPOConfig(
        output_dir=str(tmp_path),
        report_to=[],
        use_cpu=True,
        bf16=False,
        beta=0.5,
        loss_type=[loss_type],
        label_smoothing=smoothing,
    )
    message = [{"role": "user", "content": "1+1="}]
    one = {"prompt": [message], "chosen": [[{"role": "assistant", "content": "2"}]]}
    trainer = trl.DPOTrainer(
        policy,
        ref_model=copy.deepcopy(plain),
        args=arguments,
        train_dataset=Dataset.from_dict(one | {"rejected": [[{"role": "assistant", "content": "3"}]]}),
        processing_class=AutoTokenizer.from_pretrained(STARTER_MODEL),
    )
    answers = [rows for example in pairs() for rows in example.answers]
    ordered = [rows[0] for rows in [*answers[0::2], *answers[1::2]]]  # all chosen answers first
    expected = trainer.compute_loss(trainer.model, trl_inputs(ordered, "completion_mask"))
    expected.backward()
    norm = torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1e9)
    model = make_model("dpo", loss_type=loss_type, label_smoothing=smoothing)
    with torch.no_grad():
        for key, param in model.engine.module.named_parameters():
            param.copy_(weights[key])
    metrics = model.update_shard(shard_of(model, batch("dpo")))
    assert metrics["train/loss"] == pytest.approx(float(expected), rel=5e-6)
    assert metrics["learner/grad_norm"] == pytest.approx(float(norm), rel=1e-5)


# learning


def exact_answers(model, tasks) -> float:
    """Mean probability of the right answers when the model samples at temperature 1."""
    from raylight.learner.tokens.rows import build_rows

    examples = load(rl.SFT(model=STARTER_MODEL, data=[{"messages": messages(task)} for task in tasks]))
    shard = shard_of(model, build_supervised_batch(examples))
    rows = list(build_rows(shard.rows, shard.outline.owners.tolist()).values())
    found = zip(rows, model.engine.infer(rows), strict=True)
    return sum(float((logprobs * row.mask).sum().exp()) for row, logprobs in found) / len(rows)


def load(algorithm):
    return load_supervised_data(algorithm, STARTER_MODEL, LearnerConfig()).train


def learn(algorithm, tasks) -> tuple[list[dict[str, float]], float, float]:
    """Train on all batches of an algorithm; return the metrics, and the accuracy before and after."""
    from raylight.learner.updates.supervised import SupervisedModel

    examples = load(algorithm)
    schedule = batch_schedule(algorithm, SupervisedData(examples), 0)
    torch.manual_seed(0)
    model = SupervisedModel(STARTER_MODEL, LearnerConfig(), algorithm.policy_settings(), schedule.steps)
    before, metrics = exact_answers(model, tasks), []
    for step in range(1, schedule.steps + 1):
        batch = build_supervised_batch([examples[index] for index in schedule.batch(step)])
        metrics.append(model.update_shard(shard_of(model, batch)))
    return metrics, before, exact_answers(model, tasks)


def messages(task, error=0):
    answer = {"role": "assistant", "content": str(task["a"] + task["b"] + error)}
    return [{"role": "user", "content": question(task)}, answer]


def test_a_few_demonstrations_raise_the_accuracy():
    train, held_out = additions(0)
    data = [{"messages": messages(task)} for task in train[:256]]
    algorithm = rl.SFT(model=STARTER_MODEL, data=data, lr=3e-4, n_epochs=4)
    metrics, before, after = learn(algorithm, held_out)
    print("SFT", len(metrics), before, after, metrics[0]["train/loss"], metrics[-1]["train/loss"])
    assert metrics[-1]["train/loss"] < metrics[0]["train/loss"]
    assert after > before + 0.1


def sampled_answers(model, tasks) -> list[str]:
    """An answer of a model to each task, sampled at temperature 1."""
    tokenizer = AutoTokenizer.from_pretrained(STARTER_MODEL)
    prompts = [messages(task)[:1] for task in tasks]  # all of one length
    inputs = tokenizer.apply_chat_template(
        prompts, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    torch.manual_seed(0)
    with torch.no_grad():
        found = model.generate(
            **inputs, max_new_tokens=5, do_sample=True, top_k=0, top_p=1.0, temperature=1.0
        )
    answers = found[:, inputs["input_ids"].shape[1] :]
    return [text.strip() for text in tokenizer.batch_decode(answers, skip_special_tokens=True)]


@pytest.mark.slow
def test_preferences_raise_margin_and_accuracy(plain):
    """Answers that the model itself got wrong are rejected."""
    train, held_out = additions(0)
    tasks = train[:512]
    wrong = [
        (task, text)
        for task, text in zip(tasks, sampled_answers(plain, tasks), strict=True)
        if text and text != str(task["a"] + task["b"])
    ]
    data = [
        {"chosen": messages(task), "rejected": [messages(task)[0], {"role": "assistant", "content": text}]}
        for task, text in wrong
    ]
    algorithm = rl.DPO(model=STARTER_MODEL, data=data, lr=1e-4, n_epochs=4)
    metrics, before, after = learn(algorithm, held_out)
    print("DPO", len(data), before, after, metrics[0], metrics[-1])
    assert metrics[0]["train/margin"] == 0
    assert metrics[-1]["train/margin"] > 0.2
    assert metrics[-1]["train/accuracy"] > 0.8
    assert after > before + 0.05
