"""The agent, with LangGraph: it writes a query, and another one if the database refuses it."""

from __future__ import annotations

import sqlite3
from typing import Any

from database import SCHEMA, make_database, run_query
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import BaseTool, tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from pydantic import ValidationError

import raylight as rl

SYSTEM = f"Answer by one query. {SCHEMA}"
MAX_QUERIES = 3


@rl.rollout
async def ask_database(task: dict[str, Any], llm: rl.LLM) -> float:
    """Return 1 if the last query has the rows that the task's query has, and 0 otherwise.

    Args:
        task: `question`, `query`, and the `seed` of the database.
    """
    database = make_database(task["seed"])
    results: list[Any] = []
    model = ChatOpenAI(
        model=llm.model,
        async_client=llm.client().chat.completions,
        max_completion_tokens=128,
        **llm.sampling_parameters,
    )
    graph = build_graph(model, query_tool(database, results), results)
    messages = [SystemMessage(SYSTEM), HumanMessage(task["question"])]
    try:
        await graph.ainvoke({"messages": messages}, {"recursion_limit": 2 * MAX_QUERIES + 2})
    except (ValidationError, GraphRecursionError):  # arguments that are not an object, or never fit the tool
        return 0.0
    return float(results[-1:] == [run_query(database, task["query"])])


def query_tool(database: sqlite3.Connection, results: list[Any]) -> BaseTool:
    """Return the tool, which appends the rows of each query to `results`, or None for one that is wrong.

    It is asynchronous, because LangGraph runs synchronous tools in other threads.
    """

    @tool
    async def query(sql: str) -> str:
        """Run a query."""
        try:
            results.append(run_query(database, sql))
        except (sqlite3.Error, sqlite3.Warning) as error:
            results.append(None)
            return f"error: {error}"
        return str(results[-1])

    return query


def build_graph(model: ChatOpenAI, query: BaseTool, results: list[Any]) -> Any:
    """Return the graph: the model and its tool in turn, until a query has a result."""
    bound = model.bind_tools([query])

    async def ask(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await bound.ainvoke(state["messages"])]}

    def after_query(state: MessagesState) -> str:
        return "model" if results[-1:] in ([], [None]) and len(results) < MAX_QUERIES else END

    graph = StateGraph(MessagesState)
    graph.add_node("model", ask)
    graph.add_node("tools", ToolNode([query]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_conditional_edges("tools", after_query)
    return graph.compile()
