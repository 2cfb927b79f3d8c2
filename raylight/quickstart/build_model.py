"""Build the quickstart's starter model: python -m raylight.quickstart.build_model OUT

The quickstart needs a model that reinforcement learning can visibly improve within minutes on a laptop's CPU. A random
model never earns a reward, and a perfect one has nothing left to learn, so the starter is a tiny Qwen3 that knows how to
add but does not insist on it: sampled at temperature 1 it is right about every second time, and each group of rollouts
holds both successes and failures to compare.

It imitates a teacher. For most of the lessons the teacher is right, as the skill is slow to learn from noise. For the last
ones the teacher is careless: often one of the last two digits is replaced by any other. The errors are spread so that the
right digit stays the likeliest one, and the lessons are few and gentle (the learning rate is nearly down to nothing), so
that they blur the answers and leave the skill whole.

Only training pairs are shown, so the accuracy on the validation pairs is that of a skill and not of a memory.
One thread and fixed seeds make the weights the same, byte for byte, each time they are built on the same machine.
"""

import argparse
import math
import random

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from raylight.quickstart.additions import additions, question

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STEPS, BATCH, LEARNING_RATE, WARMUP = 1200, 128, 3e-3, 50
CARELESS_FROM = 1000  # the step at which the teacher becomes careless
CARELESS_RIGHT = (
    0.32  # how often the careless teacher is right; the model, moved only part of the way, more often
)
ANSWER_TOKENS = 4  # three digits and <|im_end|>
IGNORED = -100


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte: nothing to download or train, and each digit is a token of its own."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        model_max_length=2048,
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A Qwen3 of two layers with random weights."""
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen3Config(
        vocab_size=320,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # vLLM on CPU wants a multiple of 32
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        dtype="float32",
        **special,
    )
    model = Qwen3ForCausalLM(config)
    # Spelled out, so that no engine's defaults alter what is sampled.
    model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, **special)
    return model


def demonstrate(teacher: random.Random, total: int, careless: bool) -> int:
    """The teacher's answer: the sum, or the sum with one of its last two digits wrong."""
    if not careless or teacher.random() < CARELESS_RIGHT:
        return total
    digits = list(str(total))
    place = teacher.choice((-1, -2))
    leading = len(digits) + place == 0  # never a leading zero
    digits[place] = teacher.choice([d for d in "0123456789"[leading:] if d != digits[place]])
    return int("".join(digits))


def encode(tokenizer: PreTrainedTokenizerFast, tasks: list[dict]) -> torch.Tensor:
    """The prompts, all of the same length."""
    chats = [[{"role": "user", "content": question(task)}] for task in tasks]
    return torch.tensor(tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False))


def log_probs(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: torch.Tensor, answers: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-probability of each token of each answer, zero where a shorter one is padded, and the number of tokens."""
    rows = [tokenizer.encode(f"{answer}<|im_end|>") for answer in answers]
    targets = torch.tensor([row + [IGNORED] * (ANSWER_TOKENS - len(row)) for row in rows])
    inputs = torch.cat([prompts, targets[:, :-1].clamp(min=0)], dim=1)
    logits = model(inputs, logits_to_keep=ANSWER_TOKENS, use_cache=False).logits.transpose(1, 2)
    losses = torch.nn.functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")
    return -losses, (targets != IGNORED).sum()


def rate(step: int) -> float:
    """Warm up, then a cosine down to nothing."""
    return min(1.0, (step + 1) / WARMUP) * 0.5 * (1 + math.cos(math.pi * step / STEPS))


def teach(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Supervise the model on the teacher's answers to the training pairs, made up afresh each time a pair is seen."""
    train, val = additions(seed=0)
    prompts, val_prompts = encode(tokenizer, train), encode(tokenizer, val)
    totals, val_totals = ([task["a"] + task["b"] for task in tasks] for tasks in (train, val))
    teacher = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    for step in range(STEPS):
        rows = teacher.choices(range(len(train)), k=BATCH)
        answers = [demonstrate(teacher, totals[row], step >= CARELESS_FROM) for row in rows]
        logps, tokens = log_probs(model, tokenizer, prompts[rows], answers)
        loss = -logps.sum() / tokens
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % 100 == 0:
            with (
                torch.no_grad()
            ):  # the exact chance of a right answer, of which a sampled accuracy is an estimate
                right = log_probs(model, tokenizer, val_prompts, val_totals)[0].sum(1).exp()
            print(
                f"step {step + 1}  loss {loss.item():.3f}  chance of a right validation answer: mean {right.mean():.3f}, "
                f"least {right.min():.3f}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the quickstart's starter model.")
    parser.add_argument("out", help="folder to write the model and its tokenizer to")
    out = parser.parse_args().out
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    print(f"{model.num_parameters()} parameters", flush=True)
    teach(model, tokenizer)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    main()
