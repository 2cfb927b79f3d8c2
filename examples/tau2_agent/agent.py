"""The agent that is trained: a rollout is one conversation of an assistant with a simulated user."""

from __future__ import annotations

import asyncio
import functools
from typing import Literal

from openai import AsyncOpenAI

import raylight as rl
from examples.tau2_agent.conversation import Assistant, converse
from examples.tau2_agent.domain import Person, find_domain
from examples.tau2_agent.tasks import Row, read_row
from examples.tau2_agent.users import ModelUser, ScriptedUser, User

ASSISTANT, USER = "assistant", "user"
"""The agents' names: what a call is recorded under, and what the trained ones are told by."""


@functools.cache
def client() -> AsyncOpenAI:
    """One HTTP client for all rollouts of a process, because making one takes 20 ms."""
    return AsyncOpenAI(base_url="http://unset", api_key="unset")


class CustomerService(rl.LitAgent[Row]):
    """An assistant that serves a simulated user, in one of the environments. Only the assistant is trained.

    It takes two resources: `llm`, the model being trained, and, if a model plays the user, `user`: any other one, by
    `LLM(endpoint=..., traced=True)`. Without that resource the model being trained plays both, and is trained on the assistant's
    calls alone.

    Args:
        user: who plays the user: the task's script, or a model.
        max_steps: calls of the assistant's model in a conversation. One that is not over by then has reward 0.
        max_tokens: of one answer of the assistant.
    """

    def __init__(
        self, user: Literal["scripted", "model"] = "scripted", max_steps: int = 30, max_tokens: int = 1024
    ) -> None:
        super().__init__()
        self.user, self.max_steps, self.max_tokens = user, max_steps, max_tokens

    async def rollout_async(
        self, task: Row, resources: rl.NamedResources, rollout: rl.Rollout
    ) -> dict[str, float]:
        """Hold one conversation; returns its rewards: the one that counts, and the parts of which it is the product."""
        rollout.mark_agent_as_trainable(ASSISTANT)
        environment, details = read_row(task)
        case = await asyncio.to_thread(
            find_domain(environment).open, details
        )  # tau2's database takes a second
        assistant = Assistant(resources["llm"].for_agent(ASSISTANT), client(), self.max_tokens)
        transcript = await converse(case, assistant, self._user(case.person, resources), self.max_steps)
        rl.emit_annotation(
            {"ending": transcript.ending, "steps": transcript.steps, "tool_errors": transcript.tool_errors}
        )
        return await asyncio.to_thread(case.grade, transcript)

    def _user(self, person: Person, resources: rl.NamedResources) -> User:
        if self.user == "scripted":
            return ScriptedUser(person)
        return ModelUser(
            person, (resources["user"] if "user" in resources else resources["llm"]).for_agent(USER), client()
        )
