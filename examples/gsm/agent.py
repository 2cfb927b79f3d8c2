"""The agent: it asks a question of reasoning-gym, and the verifier of its dataset scores the answer."""

from __future__ import annotations

import raylight as rl

SYSTEM = "Think step by step. End with <answer>the result</answer>."

solve = rl.environments.reasoning_gym_agent(system=SYSTEM, sampling={"max_tokens": 1024})
