"""Build the quickstart's starter model: python scripts/build_quickstart_model.py OUT

The quickstart needs a model that RL visibly improves within minutes on a laptop's CPU. A random model never
earns a reward and a perfect one has nothing left to learn. The starter is therefore a tiny Qwen3 that can add
but does so unreliably: sampled at temperature 1 about half of its answers are right, so that each group of
rollouts has both successes and failures.

It is trained by imitation of a teacher. For most of the training the teacher is always right, because the
skill is slow to learn from noisy labels. At the end the teacher is careless: it often replaces one of the
last two digits with a random one. The errors are spread so that the right digit stays the most probable one,
and the learning rate is close to zero by then, so that the answers become noisy while the skill remains.

The model sees training pairs only, so its validation accuracy measures the skill and not memory. One thread
and fixed seeds make the weights reproducible byte for byte on the same machine.
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
CARELESS_FROM = 1000  # step at which the teacher becomes careless
CARELESS_RIGHT = 0.32  # accuracy of the careless teacher; that of the model stays higher
ANSWER_TOKENS = 4  # three digits and <|im_end|>
IGNORED = -100


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte: nothing to download or train, and each digit is one
    token."""
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
    """Return a Qwen3 of two layers with random weights."""
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen3Config(
        vocab_size=320,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # vLLM on CPU requires a multiple of 32
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        dtype="float32",
        **special,
    )
    model = Qwen3ForCausalLM(config)
    # explicit, so that no engine applies sampling defaults of its own
    model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, **special)
    return model


def demonstrate(teacher: random.Random, total: int, careless: bool) -> int:
    """Return the teacher's answer: the sum, or the sum with one of its last two digits wrong."""
    if not careless or teacher.random() < CARELESS_RIGHT:
        return total
    digits = list(str(total))
    place = teacher.choice((-1, -2))
    leading = len(digits) + place == 0  # never a leading zero
    digits[place] = teacher.choice([d for d in "0123456789"[leading:] if d != digits[place]])
    return int("".join(digits))


def encode(tokenizer: PreTrainedTokenizerFast, tasks: list[dict]) -> torch.Tensor:
    """Return the token ids of the prompts, shape (tasks, prompt length); all prompts have the same length."""
    chats = [[{"role": "user", "content": question(task)}] for task in tasks]
    return torch.tensor(tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False))


def log_probs(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: torch.Tensor, answers: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probs of the answers' tokens, shape (answers, ANSWER_TOKENS) with zeros as padding, and the
    token count."""
    rows = [tokenizer.encode(f"{answer}<|im_end|>") for answer in answers]
    targets = torch.tensor([row + [IGNORED] * (ANSWER_TOKENS - len(row)) for row in rows])
    inputs = torch.cat([prompts, targets[:, :-1].clamp(min=0)], dim=1)
    logits = model(inputs, logits_to_keep=ANSWER_TOKENS, use_cache=False).logits.transpose(1, 2)
    losses = torch.nn.functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")
    return -losses, (targets != IGNORED).sum()


def rate(step: int) -> float:
    """Return the learning rate's factor: linear warm-up, then a cosine down to zero."""
    return min(1.0, (step + 1) / WARMUP) * 0.5 * (1 + math.cos(math.pi * step / STEPS))


def teach(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Train the model on the teacher's answers to the training pairs, drawn again each time that a pair is
    used."""
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
            with torch.no_grad():  # the exact probability of a right answer
                right = log_probs(model, tokenizer, val_prompts, val_totals)[0].sum(1).exp()
            print(
                f"step {step + 1}  loss {loss.item():.3f}  probability of a right validation answer: "
                f"mean {right.mean():.3f}, min {right.min():.3f}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the quickstart's starter model.")
    parser.add_argument("out", help="folder for the model and its tokenizer")
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
