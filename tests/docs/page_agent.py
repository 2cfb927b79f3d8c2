"""Program that runs the rollout function of a documentation page on the task of its standard input.

    python page_agent.py PAGE BLOCK [OLD NEW]...

OLD and NEW are a text in the block and its replacement. The program runs in the framework's own environment,
so it imports raylight and a helper of the tests from the checkout.
"""

import asyncio
import inspect
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[2]))
sys.path.insert(2, str(Path(__file__).parents[1] / "helpers"))

from docs_snippets import snippet

import raylight as rl


def main(page: Path, block: str, *replaced: str) -> None:
    task = json.load(sys.stdin)
    shown = snippet(page, block)
    for old, new in zip(replaced[::2], replaced[1::2], strict=True):
        assert old in shown.code
        shown = replace(shown, code=shown.code.replace(old, new))
    agent = shown.run()["agent"]
    llm = rl.LLM(
        endpoint=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        model=os.environ["OPENAI_MODEL"],
        traced=True,
    )
    reward = agent(task, llm)
    if inspect.isawaitable(reward):
        reward = asyncio.run(reward)
    print(f"\n{json.dumps(reward)}")


main(Path(sys.argv[1]), *sys.argv[2:])
