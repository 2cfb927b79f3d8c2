"""Build the tool-calling starter model: python scripts/build_tool_model.py OUT

A Qwen3 of three layers that reads the tools of its prompt, calls one in the format of Hermes and Qwen, and
answers with the tool's result. It copies and does not compute. `examples/starter_models` makes
a model for one tool and one form of question in a minute; this one reads the tools and the prompts of many
frameworks, which takes longer. As there, its teacher is careless at the end: sampled at temperature 1 about
half of its rollouts are right, and the right token stays the most probable one.

The chat template shows a tool as one line, `add(a: integer, b: integer): Add two numbers.`, whatever else a
framework puts into its schema. One thread and fixed seeds make the weights reproducible byte for byte on the
same machine.
"""

import argparse
import functools
import itertools
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tool_dialogues import Careless, Dialogue, Teacher
from tool_texts import PROSE
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.starter_models.model import ROPE_THETA, attend_to_previous
from examples.starter_models.tokenizer import chat_template

TEMPLATE = chat_template()
VOCABULARY = 1280
COPY_STEPS, COPY_TOKENS = 1300, 48
BATCH, LEARNING_RATE, WARMUP = 8, 2e-3, 60
STEPS, COSINE_STEPS = 1500, 3600  # the learning rate of the first phase stays high
CARELESS_STEPS, CARELESS_RATE = 400, 8e-4
WINDOW = 16  # batches that are sorted by length together
SHORT_UNTIL = 1500  # step until which prompts grow
CARELESS = Careless(digit=0.07, skip=0.15, broken=0.04)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on dialogues.

    Words never include a space and each digit is a token, so that a word or a number has the same tokens
    wherever it is copied to.
    """
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Split(Regex(r"[^\p{L}\p{N}]+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    raw.decoder = decoders.ByteLevel()
    tokens = ["<|im_end|>", "<|endoftext|>", "<|im_start|>"]
    calls = [AddedToken(t, special=False, normalized=False) for t in ("<tool_call>", "</tool_call>")]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw)
    tokenizer.chat_template = TEMPLATE
    teacher = Teacher(1)
    texts = [render(tokenizer, teacher.dialogue(teacher.random.random())) for _ in range(3000)]
    texts = [text for t in texts for text in re.split(r"<\|im_\w+\|>|</?tool_call>", t)]
    size = VOCABULARY - len(tokens) - len(calls)
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    raw.train_from_iterator(texts + PROSE * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token=tokens[0],
        pad_token=tokens[1],
        additional_special_tokens=[tokens[2]],
        model_max_length=8192,
    )
    tokenizer.add_tokens(calls)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Return a Qwen3 of three layers with random weights."""
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=8192,
        initializer_range=0.08,
        attention_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        dtype="float32",
        **special,
    )
    model = Qwen3ForCausalLM(config)
    attend_to_previous(model)
    model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, **special)
    return model


def learn_to_copy(model: Qwen3ForCausalLM) -> None:
    """Train the model on repeated random tokens, so that it can copy before it sees dialogues."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.1)
    for step in range(COPY_STEPS):
        length = int(torch.randint(4, 16, ()))
        tokens = torch.randint(0, VOCABULARY, (16, length)).repeat(1, 8)[:, :COPY_TOKENS]
        hidden = model.model(tokens, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden[:, length - 1 : -1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, length:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 100 == 0:
            print(f"copy step {step + 1}  loss {loss.item():.3f}", flush=True)


def render(tokenizer: PreTrainedTokenizerFast, dialogue: Dialogue) -> str:
    return tokenizer.apply_chat_template(dialogue.messages, tools=dialogue.tools or None, tokenize=False)


ANSWER = re.compile(r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", re.DOTALL)


def encode(
    tokenizer: PreTrainedTokenizerFast, dialogues: list[Dialogue]
) -> list[tuple[list[int], list[int]]]:
    """Return the token ids of each dialogue and the positions that are learned: answers without their hidden
    prefixes."""
    texts = [render(tokenizer, dialogue) for dialogue in dialogues]
    encoded = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
    rows = []
    for dialogue, text, ids, offsets in zip(
        dialogues, texts, encoded["input_ids"], encoded["offset_mapping"], strict=True
    ):
        learned = bytearray(len(text))
        for hidden, match in zip(dialogue.hidden, ANSWER.finditer(text), strict=True):
            learned[match.start(1) + hidden : match.end(1)] = b"\1" * (match.end(1) - match.start(1) - hidden)
        rows.append((ids, [i for i, (start, _) in enumerate(offsets) if learned[start]]))
    return rows


def batches(
    tokenizer: PreTrainedTokenizerFast, teacher: Teacher, short_until: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield tokens, shape (BATCH, longest), and the flat positions of the tokens that are learned.

    Args:
        short_until: step until which the prompts grow.
    """
    step = 0
    while True:
        longest = min(1.0, 0.1 + step / short_until) if short_until else 1.0
        dialogues = [teacher.dialogue(longest * teacher.random.random()) for _ in range(BATCH * WINDOW)]
        rows = sorted(encode(tokenizer, dialogues), key=lambda row: len(row[0]))
        groups = [rows[i : i + BATCH] for i in range(0, len(rows), BATCH)]
        teacher.random.shuffle(groups)
        for group in groups:
            width = max(len(ids) for ids, _ in group)
            tokens = torch.full((BATCH, width), tokenizer.pad_token_id)
            for row, (ids, _) in enumerate(group):
                tokens[row, : len(ids)] = torch.tensor(ids)
            places = [row * width + place for row, (_, learned) in enumerate(group) for place in learned]
            yield tokens, torch.tensor(places)
        step += len(groups)


def rate(step: int, steps: int) -> float:
    """Return the learning rate's factor: linear warm-up, then a cosine that reaches zero after `steps`."""
    return min(1.0, (step + 1) / WARMUP) * 0.5 * (1 + math.cos(math.pi * step / steps))


def teach(
    model: Qwen3ForCausalLM,
    source: Iterator[tuple[torch.Tensor, torch.Tensor]],
    steps: int,
    learning_rate: float,
    cosine_steps: int,
) -> None:
    """Train the model on dialogues, with a new optimizer."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, functools.partial(rate, steps=cosine_steps))
    losses = []
    for step, (tokens, places) in enumerate(itertools.islice(source, steps), 1):
        hidden = model.model(tokens, use_cache=False).last_hidden_state.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(model.lm_head(hidden[places - 1]), tokens.flatten()[places])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % 100 == 0:
            print(f"step {step}  loss {sum(losses[-100:]) / 100:.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the tool-calling starter model.")
    parser.add_argument("out", help="folder for the model and its tokenizer")
    out = parser.parse_args().out
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    print(f"{model.num_parameters()} parameters", flush=True)
    learn_to_copy(model)
    teach(model, batches(tokenizer, Teacher(0), SHORT_UNTIL), STEPS, LEARNING_RATE, COSINE_STEPS)
    careless = Teacher(2)
    careless.careless = CARELESS
    teach(model, batches(tokenizer, careless, 0), CARELESS_STEPS, CARELESS_RATE, CARELESS_STEPS)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    main()
