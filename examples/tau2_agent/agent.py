"""The trained agent: a rollout is one conversation of an assistant with a simulated user."""

from __future__ import annotations

import asyncio
from typing import Literal

import raylight as rl
from examples.tau2_agent.conversation import Assistant, converse
from examples.tau2_agent.domain import Person, find_domain
from examples.tau2_agent.tasks import Row, read_row
from examples.tau2_agent.users import ModelUser, ScriptedUser, User

ASSISTANT, USER = "assistant", "user"
"""Names of the agents, under which calls are recorded and trained agents are selected."""


class CustomerService(rl.LitAgent[Row]):
    """An assistant that serves a simulated user in one of the environments. Only the assistant is trained.

    It uses two resources: `llm`, the trained model, and optionally `user`, the model that plays the user, for
    example `LLM(endpoint=..., traced=True)`. Without `user` the trained model plays both, and is trained on
    the assistant's calls only.

    Args:
        user: "scripted" for the task's script, "model" for a model that plays the user.
        max_steps: maximum number of the assistant's model calls. A conversation that has not ended by then
            has the reward 0.
        max_tokens: maximum length of one response of the assistant.
    """

    def __init__(
        self, user: Literal["scripted", "model"] = "scripted", max_steps: int = 30, max_tokens: int = 1024
    ) -> None:
        super().__init__()
        self.user, self.max_steps, self.max_tokens = user, max_steps, max_tokens

    async def rollout_async(
        self, task: Row, resources: rl.NamedResources, rollout: rl.Rollout
    ) -> dict[str, float]:
        """Hold one conversation; returns its rewards: the primary one, and the factors of which it is the
        product."""
        rollout.mark_agent_as_trainable(ASSISTANT)
        environment, details = read_row(task)
        case = await asyncio.to_thread(find_domain(environment).open, details)  # loading tau2 takes a second
        assistant = Assistant(resources["llm"].for_agent(ASSISTANT), self.max_tokens)
        transcript = await converse(case, assistant, self._user(case.person, resources), self.max_steps)
        rl.emit_annotation(
            {"ending": transcript.ending, "steps": transcript.steps, "tool_errors": transcript.tool_errors}
        )
        return await asyncio.to_thread(case.grade, transcript)

    def _user(self, person: Person, resources: rl.NamedResources) -> User:
        if self.user == "scripted":
            return ScriptedUser(person)
        llm = resources["user"] if "user" in resources else resources["llm"]
        return ModelUser(person, llm.for_agent(USER))
