"""Peak memory and CPU seconds of an update towards a teacher's whole distributions, against a plain loss.

    python tests/benchmarks/distillation.py [--shapes 32768x2048 151936x1024] [--divergence js]

Each measurement is a separate process, so that peaks do not mix. Student and teacher are random Qwen2 of 2
layers; rows have 512 tokens, a quarter of them the prompt. "plain" computes the logits of the responses of
both models as a whole, and the divergence in plain torch. It reports the faster of two updates, and the peak
memory beyond what the process used before.
"""

import argparse
import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import Pairs, make_parser, run_script
from learner_tokens import as_batch, save_model
from update_memory import measure

TOP_K = 64
CONTESTANTS = ("chunked", f"top {TOP_K}", "plain")


def learner_update(args: argparse.Namespace, rows: Pairs, tokens: int) -> Callable[[], Any]:
    from raylight.config import LearnerConfig
    from raylight.experience.settings.policy_settings import PolicySettings
    from raylight.learner.updates.policy import Policy

    settings = PolicySettings(
        adv_estimator="opd",
        divergence=args.divergence,
        teacher_top_k=None if args.contestant == "chunked" else TOP_K,
        lr=1e-5,
        max_logprob_mismatch=1e6,
        calculate_entropy=False,
    ).with_local_teachers([args.teacher])
    policy = Policy(args.model, LearnerConfig(max_tokens_per_micro_batch=tokens), settings, total_steps=100)
    return lambda: policy.update(as_batch(rows, policy.version))


def plain_update(args: argparse.Namespace, rows: Pairs, tokens: int) -> Callable[[], Any]:
    from transformers import AutoModelForCausalLM

    from raylight.learner.losses.divergence import divergence

    student = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).train()
    teacher = AutoModelForCausalLM.from_pretrained(args.teacher, dtype=torch.float32)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-5, weight_decay=0.01)

    def update() -> None:
        ids = torch.tensor([prompt + answer for prompt, answer in rows])
        kept = len(rows[0][1]) + 1
        own = student(ids, use_cache=False, logits_to_keep=kept).logits[:, :-1].log_softmax(-1)
        with torch.no_grad():
            other = teacher(ids, use_cache=False, logits_to_keep=kept).logits[:, :-1].log_softmax(-1)
        optimizer.zero_grad()
        divergence(own, other, args.divergence, 0.5).mean().backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()

    return update


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--shapes", nargs="+", default=["32768x2048", "151936x1024"], help="vocabulary x tokens of an update"
    )
    parser.add_argument("--divergence", default="js")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    for hidden in ("--contestant", "--model", "--teacher"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contestant:
        build = plain_update if args.contestant == "plain" else learner_update
        print(json.dumps(measure(args, functools.partial(build, args))))
        return
    print(f"{'shape':>14} {'':8} {'CPU seconds':>11} {'peak MiB':>9} {'time, memory of plain':>22}")
    for shape in args.shapes:
        with tempfile.TemporaryDirectory() as folder:
            sizes = {"vocab_size": int(shape.split("x")[0]), "num_hidden_layers": 2, "num_attention_heads": 4}
            paths = []
            for name, hidden in (("model", args.hidden), ("teacher", 2 * args.hidden)):
                widths = {"hidden_size": hidden, "intermediate_size": 2 * hidden}
                paths.append(save_model(Path(folder, name), **sizes | widths))
            options = ["--model", paths[0], "--teacher", paths[1], "--shapes", shape]
            options += ["--threads", args.threads, "--divergence", args.divergence]
            found = {name: run_script(__file__, "--contestant", name, *options) for name in CONTESTANTS}
            for name, result in found.items():
                ratios = [result[key] / found["plain"][key] for key in ("seconds", "kib")]
                print(
                    f"{shape:>14} {name:8} {result['seconds']:11.2f} {result['kib'] / 1024:9.0f} "
                    f"{ratios[0]:14.2f} {ratios[1]:7.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
