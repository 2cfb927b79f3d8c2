"""The agents: triage sends a ticket to a desk, and a solver at this desk acts. Each has its own reward."""

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from tickets import DESKS, PROBLEMS, Action, right_action, ticket_text

import raylight as rl

TRIAGE = f"Which desk: {', '.join(DESKS)}? Answer with its name only."
SOLVER = "You are at the desk {desk}. Act; forward a ticket of another desk."


@rl.rollout
async def answer_ticket(ticket: dict[str, str], llm: rl.LLM) -> float:
    """Return 1 if the ticket was settled: the right desk took the right action."""
    text = ticket_text(ticket)
    triage = Agent(model_of(llm, "triage"), instructions=TRIAGE)
    desk = (await triage.run(text)).output.strip(" .\n").lower()
    rl.emit_reward(float(desk == PROBLEMS[ticket["problem"]][0]), agent="triage")
    if desk not in DESKS:
        return 0.0

    def act(action: Action) -> Action:  # pydantic-ai reads the annotations, so they are not strings
        """Take an action."""
        return action

    solver = Agent(model_of(llm, "solver"), instructions=SOLVER.format(desk=desk), output_type=act)
    action = (await solver.run(text)).output
    is_right = action == right_action(ticket, desk)
    rl.emit_reward(float(is_right), agent="solver")  # no fault of the solver if the desk is wrong
    return float(is_right and action != "forward")


def model_of(llm: rl.LLM, agent: str) -> OpenAIChatModel:
    """Return the trained model for pydantic-ai, under the name of an agent."""
    named = llm.for_agent(agent)
    provider = OpenAIProvider(base_url=named.endpoint, api_key=named.api_key)
    return OpenAIChatModel(named.model, provider=provider, settings={"temperature": 1.0, "max_tokens": 64})
