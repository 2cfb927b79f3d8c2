"""The agent with LangGraph: a graph of a model node and a node with the MCP server's tools."""

from __future__ import annotations

from typing import Any

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.tools import BaseTool, StructuredTool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from mcp.types import Tool
from pydantic import SecretStr, ValidationError

import raylight as rl
from examples.math_agent.calculator import Calculator, calculator
from examples.math_agent.config import MathSettings
from examples.math_agent.prompts import instructions


async def solve(question: str, llm: rl.LLM, settings: MathSettings) -> str:
    """See `examples.math_agent.clients.Solve`."""
    key = None if llm.api_key is None else SecretStr(llm.api_key)
    model = ChatOpenAI(model=llm.model, base_url=llm.endpoint, api_key=key, **llm.sampling_parameters)
    messages = [SystemMessage(instructions(settings.extractor)), HumanMessage(question)]
    async with calculator(settings.command) as calls:
        graph = _graph(model, [_tool(calls, tool) for tool in calls.tools])
        try:  # a model call is a step, and so is a tool call
            final = await graph.ainvoke({"messages": messages}, {"recursion_limit": 2 * settings.max_turns})
        except (GraphRecursionError, ValidationError):  # the latter: a tool call whose arguments are a list
            return ""
    last = final["messages"][-1]
    return last.text if isinstance(last, AIMessage) else ""


def _graph(model: ChatOpenAI, tools: list[BaseTool]) -> Any:
    bound = model.bind_tools(tools)

    async def ask(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await bound.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("model", ask)
    graph.add_node("tools", ToolNode(tools))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    return graph.compile()


def _tool(calls: Calculator, tool: Tool) -> StructuredTool:
    """Convert a tool of the server to LangChain.

    An error of the tool is returned as text; a lost server raises.
    """

    async def call(**arguments: Any) -> str:
        return await calls.call(tool.name, arguments)

    return StructuredTool(
        name=tool.name, description=tool.description or "", args_schema=tool.input_schema, coroutine=call
    )
