"""Text of gymnasium's environments: instructions, observations and actions, for agents and their teachers."""

from __future__ import annotations

import re
from typing import Any

ACTION_NAMES = {
    "FrozenLake": ("left", "down", "right", "up"),
    "CliffWalking": ("up", "right", "down", "left"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
    "Blackjack": ("stick", "hit"),
}
"""Words for the actions of environments that number them, by name without version."""
CELL = "Row {0}, column {1}."
OBSERVATIONS = {
    "Blackjack": "Your sum: {0}. The dealer shows: {1}. Usable ace: {2}.",
    "CliffWalking": CELL,
    "FrozenLake": CELL,
    "Taxi": "Taxi: row {0}, column {1}. Passenger: {2}. Destination: {3}.",
}
"""Words for the values of environments without a picture, by name without version."""
STANDS = ("red", "green", "yellow", "blue", "in the taxi")
"""Places of a passenger of Taxi, as the environment numbers them."""
COLOUR = re.compile(r"\x1b\[([\d;]*)m")
MARKS = {"41": ("[", "]"), "42": ("{", "}"), "43": ("[", "]"), "34;1": ("(", ")"), "35": ("<", ">")}
"""Brackets in place of a colour: [] for the agent, {} for a taxi with its passenger, () for the passenger who
waits, and <> for the destination."""
LAST_ACTION = re.compile(r"^ +\(\w+\)\n?", re.MULTILINE)


def environment_name(env: Any) -> str:
    """Return the name of an environment without its namespace and its version."""
    return env.spec.id.rpartition("/")[2].rpartition("-v")[0] if env.spec else ""


def action_names(env: Any) -> tuple[str, ...]:
    """Return the words for the actions of an environment: numbers if it has none of its own.

    Args:
        env: an environment whose actions are a `Discrete` space from 0 on.
    """
    return ACTION_NAMES.get(environment_name(env)) or tuple(map(str, range(int(env.action_space.n))))


def instructions(env: Any) -> str:
    """Return the system prompt of an environment."""
    name = env.spec.id if env.spec else type(env.unwrapped).__name__
    return f"Play {name}. Answer each observation with one action: {', '.join(action_names(env))}."


def observation_text(env: Any, observation: Any) -> str:
    """Return an observation as text: the picture if `render_mode` is "ansi", else the value in words."""
    if env.render_mode != "ansi":
        words = OBSERVATIONS.get(environment_name(env))
        return words.format(*observed_values(env, observation)) if words else str(observation)
    picture = LAST_ACTION.sub("", env.render())
    shown, closing = "", list[str]()
    position = 0
    for code in COLOUR.finditer(picture):
        shown += picture[position : code.start()]
        position = code.end()
        if code[1] in ("", "0"):
            shown += closing.pop() if closing else ""
        else:
            left, right = MARKS.get(code[1], ("", ""))
            shown += left
            closing.append(right)
    return (shown + picture[position:]).strip("\n")


def observed_values(env: Any, observation: Any) -> tuple[Any, ...]:
    """Return the values for the words of `OBSERVATIONS`; some environments pack them into one number."""
    name, inner = environment_name(env), env.unwrapped
    if name == "Taxi":
        row, column, passenger, destination = inner.decode(observation)
        return row, column, STANDS[passenger], STANDS[destination]
    if name in ("CliffWalking", "FrozenLake"):
        columns = (inner.shape if name == "CliffWalking" else inner.desc.shape)[1]
        return divmod(int(observation), columns)
    return tuple(observation)


def parse_action(env: Any, text: str) -> int | None:
    """Return the number of the action that an answer names; None if it names none.

    An answer is an action's name or number. In a longer answer the last name counts.
    """
    names = action_names(env)
    word = text.strip().lower()
    if word in names:
        return names.index(word)
    if word.isascii() and word.isdigit():
        return int(word[:9]) if int(word[:9]) < len(names) else None
    found = [part for part in re.findall(r"[a-z]+", word) if part in names]
    return names.index(found[-1]) if found else None
