"""Serve a model to a support desk in JavaScript, and train it on rewards that come later.

python examples/support/train.py                 a model that is made here, on a CPU
python examples/support/train.py --model PATH    another model
"""

from __future__ import annotations

import argparse
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from demonstrations import demonstrations
from service import run_service

from examples.starter_models.make import recipe_model
from raylight.trainer.online_trainer import OnlineTrainer, online_algorithm

HERE = Path(__file__).resolve().parent
SESSIONS_PER_STEP = 64


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder or name of a chat model; left out: a tiny one is made")
    parser.add_argument("--steps", type=int, default=30, help=f"each of {SESSIONS_PER_STEP} rewarded tickets")
    parser.add_argument("--delay", type=float, default=5.0, help="mean seconds until a customer answers")
    parser.add_argument("--lease", type=float, default=2.0, help="seconds until a silent session expires")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/support"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cpu", action="store_true", help="leave GPUs alone")
    args = parser.parse_args(arguments)
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        sys.exit("the support desk is a program of Node: install nodejs and npm")
    if not (HERE / "node_modules").exists():
        subprocess.run([npm, "install", "--no-audit", "--no-fund"], cwd=HERE, check=True)
    model = args.model or recipe_model(
        demonstrations, args.output_dir / "initial", size="tiny", steps=100, seed=args.seed
    )
    settings = {"n_steps": args.steps, "lr": 1e-6 if args.model else 1e-3}
    gpus = {"num_gpus": 0} if args.cpu else {}
    key = secrets.token_hex(20)
    trainer = OnlineTrainer(
        api_key=key,
        sessions={"max_open": 4 * SESSIONS_PER_STEP},
        algorithm=online_algorithm(model, settings, SESSIONS_PER_STEP, args.lease),
        engine={"port": args.port, **gpus},
        learner=gpus,
        output_dir=args.output_dir,
        seed=args.seed,
    )
    address = {"RAYLIGHT_URL": f"http://127.0.0.1:{args.port}", "RAYLIGHT_API_KEY": key}
    with run_service([node, str(HERE / "agent.mjs"), "32", str(args.delay)], address):
        trainer.serve()


if __name__ == "__main__":
    main()
