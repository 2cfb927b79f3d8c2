"""The agent: it plays a game of take-away against an older version of itself."""

from __future__ import annotations

import raylight as rl

MOST = 3
"""Most stones of a move. Who leaves a multiple of four stones wins, and who takes the last stone has won."""


@rl.rollout
async def play(task: dict[str, int], llm: rl.LLM, opponent: rl.LLM) -> float:
    """Return 1 for a win and 0 for a loss. An illegal move loses.

    Args:
        task: the stones at the beginning, and the player who begins: 0 is the policy, 1 the opponent.
    """
    stones, player = task["stones"], task["begins"]
    while True:
        taken = await choose_move(opponent if player else llm, stones)
        if not 1 <= taken <= min(MOST, stones):
            return float(player == 1)
        stones -= taken
        if not stones:
            return float(player == 0)
        player = 1 - player


async def choose_move(llm: rl.LLM, stones: int) -> int:
    """Return the stones that a model takes; 0 if its answer is not a number."""
    reply = await llm.client().chat.completions.create(
        model=llm.model, messages=[{"role": "user", "content": question(stones)}], max_tokens=4
    )
    answer = (reply.choices[0].message.content or "").strip()
    return int(answer) if answer.isdecimal() else 0


def question(stones: int) -> str:
    return f"There are {stones} stones. Take 1, 2 or 3; the last stone wins. Answer with a number."
