"""Prompt optimisation, then training: APO improves the prompt of a rollout function, then GRPO trains its
model.

    python examples/apo_then_grpo.py                  (offline, on a CPU, in about two minutes) python
    examples/apo_then_grpo.py --debug          (one rollout, with its full trace) python
    examples/apo_then_grpo.py --model path/to/model --critic-url https://api.example.com/v1 --critic-model
    large

The starter model was trained on additions of the form `12+34=` only, and responds to a question in words with
nonsense. Without --critic-url, a small scripted server stands in for the model that criticises and rewrites
prompts. One of its rewrites lacks a placeholder, and is rejected.
"""

import argparse
import contextlib
import itertools
import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from openai import AsyncOpenAI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import raylight as rl
from raylight.quickstart import STARTER_MODEL
from raylight.quickstart.additions import additions

SEED = rl.PromptTemplate(template="Could you please tell me what {a} plus {b} makes?")


@rl.rollout
async def adder(task: dict, llm: rl.LLM, prompt_template: rl.PromptTemplate) -> float:
    """Ask for a + b with the prompt template; the reward is 1 for exactly the right number, else 0."""
    sampling = {"temperature": 1.0, "max_tokens": 8} | llm.sampling_parameters
    reply = await llm.client().chat.completions.create(
        model=llm.model,
        messages=[{"role": "user", "content": prompt_template.format(**task)}],
        **sampling,
    )
    return 1.0 if (reply.choices[0].message.content or "").strip() == str(task["a"] + task["b"]) else 0.0


CRITIQUE = (
    "The attempts answer with stray digits. The words around the numbers are of no use to this model; an "
    "equation would be."
)
REWRITES = ("Add {a}.", "{a} plus {b} =", "{a}+{b}=", "Sum: {a}, {b}")


@contextlib.contextmanager
def scripted_critic() -> Iterator[str]:
    """Serve OpenAI's API with scripted critiques and rewrites; yields its base URL."""
    rewrites = itertools.cycle(REWRITES)

    async def chat(request: Request) -> JSONResponse:
        body = await request.json()
        text = CRITIQUE if body["model"] == "critic" else f"<prompt>{next(rewrites)}</prompt>"
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        return JSONResponse(
            {"id": "chatcmpl-0", "object": "chat.completion", "created": 0, "model": "-", "choices": [choice]}
        )

    app = Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    listening = socket.create_server(("127.0.0.1", 0))  # from here on, clients can connect
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        thread.join(10)


def main() -> None:
    parser = argparse.ArgumentParser(description="Optimise an agent's prompt, then train its model.")
    parser.add_argument("--model", default=STARTER_MODEL, help="folder of the model that the agent calls")
    parser.add_argument(
        "--critic-url",
        help="OpenAI-compatible endpoint of the model that rewrites prompts; its key: OPENAI_API_KEY",
    )
    parser.add_argument("--critic-model", default="gpt-5-mini", help="name of that model at the endpoint")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of the beam search")
    parser.add_argument("--steps", type=int, default=15, help="steps of GRPO")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/apo_then_grpo"))
    parser.add_argument(
        "--debug", action="store_true", help="run the agent on one sample and print its full trace"
    )
    args = parser.parse_args()
    try:
        run(args)
    except rl.RaylightError as error:
        sys.exit(f"{type(error).__name__}: {error}")


def run(args: argparse.Namespace) -> None:
    """Evaluate, optimise the prompt, train, and print the reward after each."""
    train, val = additions(0)
    prompt = {"prompt_template": SEED}

    if args.debug:
        folder = args.output_dir / "debug"
        rl.Trainer(initial_resources=prompt, output_dir=folder).evaluate(adder, train[:1], model=args.model)
        rl.print_traces(folder, last=1, full=True)
        return

    before = rl.Trainer(initial_resources=prompt, output_dir=args.output_dir / "before").evaluate(
        adder, val, model=args.model
    )

    with scripted_critic() if args.critic_url is None else contextlib.nullcontext(args.critic_url) as url:
        client = AsyncOpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
        critic, editor = (
            ("critic", "editor") if args.critic_url is None else (args.critic_model, args.critic_model)
        )
        apo = rl.APO(
            client,
            gradient_model=critic,
            apply_edit_model=editor,
            beam_width=2,
            branch_factor=2,
            beam_rounds=args.rounds,
            val_batch_size=32,
            served_model=args.model,
        )
        rl.Trainer(
            algorithm=apo, n_runners=2, initial_resources=prompt, output_dir=args.output_dir / "apo"
        ).fit(adder, train, val)
    best = apo.get_best_prompt()

    grpo = rl.GRPO(model=args.model, n_steps=args.steps, lr=2e-4, kl_coef=1e-3, val_every=5, val_samples=2)
    trained = rl.Trainer(
        algorithm=grpo,
        n_runners=2,
        initial_resources={"prompt_template": best},
        output_dir=args.output_dir / "grpo",
    ).fit(adder, train, val)
    print(f"seed prompt       {before['rewards']['reward']['mean']:.3f}  {SEED.template}")
    print(f"prompt by APO     {trained['reward_before']:.3f}  {best.template}")
    print(f"and GRPO          {trained['reward_after']:.3f}  {trained['steps']} steps")


if __name__ == "__main__":
    main()
