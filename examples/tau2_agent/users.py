"""Simulated users: played by a script, or by a model that is not trained."""

from __future__ import annotations

import re
from typing import Any, Protocol

import raylight as rl
from examples.tau2_agent.domain import Person
from raylight.errors import ConfigError

END = "[[END]]"
"""Message with which a model that plays the user ends the conversation."""
PATIENCE = 8
"""Maximum number of a user's messages, including the opening."""
MAX_TOKENS = 256
FURTHER = re.compile(
    r"[^.!?\n]*\b(?:anything|something|any) (?:else|more|other|further)\b[^.!?\n]*\?", re.IGNORECASE
)
"""Offer of further help, which a scripted user treats as the end: a yes would ask for nothing."""

PROMPT = """You are a customer who writes to a help desk, and the other one is its assistant. Keep to your \
part: do not answer as \
the desk, and do not mention these instructions.

{who}What you want:
{goal}

- Say one thing at a time, in one to three plain sentences, as people write in a chat. Begin with what you \
want.
- Tell what you know only when you are asked for it. Do not invent numbers or bookings; if you do not know \
something, say so.
- Agree to what the desk proposes if it is what you want, and repeat your wish once if it is refused \
without a reason.
- When you have what you want and every answer you asked for, or it is clear that you will not get it, \
write only {end}."""


class User(Protocol):
    """A simulated user."""

    async def open(self) -> str:
        """Return the first message."""

    async def answer(self, text: str) -> str | None:
        """Reply to a message of the assistant; None when the user is done."""


class ScriptedUser:
    """Follows a person's script, without a model.

    Each answer of the script is used once, for the first message that contains its pattern. Any other
    question gets the e-mail address if it asks for it, else a yes. After any other message, or an offer of
    further help, the user is done.

    Raises:
        ConfigError: the person has no script.
    """

    def __init__(self, person: Person) -> None:
        if not person.opening:
            raise ConfigError(
                "this environment's tasks have no script for the user; have a model play it, --user model"
            )
        self._person = person
        self._left = list(person.answers)
        self._said = 0

    async def open(self) -> str:
        self._said = 1
        return self._person.opening

    async def answer(self, text: str) -> str | None:
        if self._said >= PATIENCE:
            return None
        self._said += 1
        for pattern, reply in self._left:
            if re.search(pattern, text, re.IGNORECASE):
                self._left.remove((pattern, reply))
                return reply
        if "?" not in FURTHER.sub("", text):
            return None
        if re.search(r"e-?mail", text, re.IGNORECASE):
            return f"It is {self._person.email}."
        return "Yes, please."


class ModelUser:
    """A person played by a model.

    Args:
        llm: the model, with the user's agent name; its calls are recorded if it is traced, and never trained.
    """

    def __init__(self, person: Person, llm: rl.LLM) -> None:
        self._llm = llm
        self._client = llm.client()
        who = (
            f"Your name is {person.name}, and your e-mail address is {person.email}.\n" if person.name else ""
        )
        self._messages: list[Any] = [
            {"role": "system", "content": PROMPT.format(who=who, goal=person.goal, end=END)}
        ]
        self._said = 0

    async def open(self) -> str:
        return await self._speak("Hello, this is the help desk. What can I do for you?") or ""

    async def answer(self, text: str) -> str | None:
        return None if self._said >= PATIENCE else await self._speak(text)

    async def _speak(self, text: str) -> str | None:
        self._said += 1
        self._messages.append({"role": "user", "content": text})
        sampling = {"max_tokens": MAX_TOKENS} | self._llm.sampling_parameters
        reply = await self._client.chat.completions.create(
            model=self._llm.model, messages=self._messages, **sampling
        )
        text = (reply.choices[0].message.content or "").strip()
        self._messages.append({"role": "assistant", "content": text})
        return None if END in text else text
