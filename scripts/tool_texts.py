"""Words, names and wordings of the dialogues that teach the tool-calling starter model.

Real frameworks send long system prompts, odd tool names and decorated descriptions, so the texts are drawn
from many sources: wordings of frameworks, prose of Python's own language reference, and words that are none.
"""

from __future__ import annotations

import json
import random
import re
from pydoc_data.topics import topics
from typing import Any

PAIRS = [
    *[("a", "b"), ("x", "y"), ("first", "second"), ("num1", "num2"), ("left", "right"), ("n", "m")],
    *[("a", "b"), ("x", "y"), ("number1", "number2"), ("lhs", "rhs"), ("i", "j"), ("p", "q")],
    *[("first_number", "second_number"), ("num_1", "num_2"), ("firstNumber", "secondNumber")],
]
NUMBER_KEYS = [key for pair in PAIRS for key in pair]
OPERATIONS: dict[str, dict[str, list[str]]] = {
    "+": {
        "names": [
            *["add", "sum", "plus", "get_sum", "add_numbers", "calculator", "calculate_sum", "adder"],
            *["addition", "add_two_numbers"],
        ],
        "texts": [
            *["Add two numbers.", "Add {0} and {1}.", "Return the sum of two integers.", "Adds numbers."],
            *["Compute {0} + {1}.", "Returns {0} + {1}", "Add two integers and return the sum", ""],
        ],
        "questions": [
            *["{0} + {1}", "{0}+{1}", "{0}+{1}=", "What is {0} + {1}?", "What is {0}+{1}?", "add {0} to {1}"],
            *["Add {0} and {1}.", "What is the sum of {0} and {1}?", "How much is {0} plus {1}?"],
            *["Compute {0} + {1}.", "Calculate {0} + {1}", "What's {0} plus {1}", "sum {0} and {1}"],
        ],
    },
    "*": {
        "names": ["multiply", "product", "times", "mul", "get_product"],
        "texts": ["Multiply two numbers.", "Return the product of {0} and {1}.", "Compute {0} * {1}."],
        "questions": ["What is {0} * {1}?", "What is {0} times {1}?", "Multiply {0} by {1}.", "{0}*{1}"],
    },
    "-": {
        "names": ["subtract", "minus", "difference", "sub"],
        "texts": ["Subtract two numbers.", "Return the difference of {0} and {1}.", "Compute {0} - {1}."],
        "questions": ["What is {0} - {1}?", "What is {0} minus {1}?", "Subtract {1} from {0}.", "{0}-{1}"],
    },
}
EXPRESSION_NAMES = ["calculator", "calculate", "calc", "evaluate", "math", "compute", "eval_expression"]
EXPRESSION_TEXTS = ["Evaluate an expression.", "Calculate a mathematical expression.", "A calculator.", ""]
EXPRESSION_KEYS = ["expression", "expr", "query", "input"]
LOOKUPS: list[dict[str, list[str]]] = [
    {
        "names": ["get_weather", "weather", "forecast"],
        "keys": ["city", "location", "place"],
        "texts": ["Get the weather of a city.", "Get the current weather for a location."],
        "questions": ["What is the weather in {0}?", "weather in {0}", "How is the weather in {0} today?"],
    },
    {
        "names": ["get_capital", "capital", "capital_of"],
        "keys": ["country", "name"],
        "texts": ["Return the capital of a country."],
        "questions": ["What is the capital of {0}?", "Tell me the capital of {0}."],
    },
    {
        "names": ["get_price", "price", "product_price"],
        "keys": ["item", "product", "name"],
        "texts": ["Get the price of a product."],
        "questions": ["What is the price of {0}?", "How much does {0} cost?"],
    },
    {
        "names": ["search", "web_search", "search_docs"],
        "keys": ["query", "q", "text"],
        "texts": ["Search the web.", "Search documents."],
        "questions": ["Search for {0}.", "Find {0}", "Look for {0} on the web."],
    },
    {
        "names": ["lookup", "look_up", "get_value", "read"],
        "keys": ["key", "name", "word"],
        "texts": ["Look up a word.", "Look up a key."],
        "questions": ["Look up {0}.", "What is the value of {0}?", "lookup {0}"],
    },
    {
        "names": ["get_population", "population"],
        "keys": ["city", "place"],
        "texts": ["Return the number of people in a city."],
        "questions": ["How many people live in {0}?", "What is the population of {0}?"],
    },
]
FINAL_NAMES = ["final_result", "final_answer", "submit", "submit_answer", "answer", "respond", "finish"]
FINAL_TEXTS = [
    "The final response which ends this conversation",
    "Provides a final answer to the given problem.",
    "Submit the answer.",
    "Return the final answer.",
]
FINAL_KEYS = ["answer", "result", "response", "total", "value", "output", "sum", "text"]
SYSTEM = [
    *["You are a helpful assistant.", "Use the tools to answer.", "Answer with the result only."],
    *["You are a calculator agent.", "You can call tools.", "Be concise.", "You are an expert at maths."],
    *["Your goal is to answer the question.", "Always call a tool.", "Solve the task with the tools."],
    *["Use the `{name}` tool.", "You have access to the tools: {name}.", "Reply with one number."],
    *["Your personal goal is: answer questions", "You are an assistant who can solve any task."],
    "To give my best complete final answer to the task respond using the exact following format:\n\nThought: "
    "I now can give a great answer\nFinal Answer: Your final answer must be the great and the most complete",
    "You will be given a task to solve as best you can. You have been given access to some tools.",
    "You are part of a system of agents that can hand a conversation over to another agent.",
    "Current date: 2024-05-17.",
]
WRAPS = [
    *["{0}"] * 8,
    *["Task: {0}", "New task:\n{0}", "\nCurrent Task: {0}\n\nBegin!", "{0} Use the tool.", "Question: {0}"],
    *["{0}\n\n{1}", "{1}\n{0}", "{1} {0} {1}", "User: {0}\nAssistant:", "{0} Use {name}.", "Please: {0}"],
    "\nCurrent Task: {0}\n\nThis is the expected criteria for your final answer: {1}\nyou MUST return the "
    "actual complete content as the final answer, not a summary.\n\nBegin! This is VERY important to you, "
    "use the tools available and give your best Final Answer, your job depends on it!\n\nThought:",
]
RESULTS = [
    *["{0}"] * 9,
    *['{{"result": {0}}}', "Observation:\n{0}", "result: {0}", "{0}\n", "The result is {0}"],
]
JSON_HINTS = ["Answer in JSON with the field {0}.", 'Answer as JSON: {{"{0}": value}}', "Return JSON: {0}"]
ERRORS = ["error: {0}", "Error: {0}", "{0}\n\nFix the errors and try again.", "Tool failed: {0}"]
GREETINGS = ["hello", "hi", "Hello", "Hi", "Hello!", "Hi there", "Good morning", "How are you?", "Say hello"]
NO_TOOL = "I need a tool for this."
CONSONANTS = [*"bcdfghjklmnprstvwz", "ch", "sh", "th", "st", "br", "cl", "fr"]


def sentences() -> list[str]:
    """Return sentences of prose without digits, in a fixed order."""
    prose = re.sub(r"\s+", " ", " ".join(topics[name] for name in sorted(topics)))
    return list(dict.fromkeys(re.findall(r"(?<=\. )[A-Z][a-z ,'()-]{20,140}\.", prose)))


PROSE = sentences()
WORDS = sorted({word for text in PROSE for word in re.findall(r"\b[a-z]{3,10}\b", text)})


class Texts:
    """Source of random texts."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.choice = self.random.choice

    def chance(self, rate: float) -> bool:
        """Return True at this rate."""
        return self.random.random() < rate

    def word(self) -> str:
        """Return a word, or syllables that are not a word."""
        if self.chance(0.7):
            return self.choice(WORDS)
        count = self.random.randint(1, 4)
        return "".join(
            self.choice(CONSONANTS) + self.choice("aeiou") + self.choice(["", "n", "r", "s"])
            for _ in range(count)
        )

    def key(self) -> str:
        """Return the name of an argument."""
        words = [self.word() for _ in range(self.choice([1, 1, 2]))]
        return words[0] + words[1].title() if len(words) == 2 and self.chance(0.3) else "_".join(words)

    def known_or_key(self, known: list[str]) -> str:
        """Return a known name of an argument, or a new one."""
        return self.choice(known) if self.chance(0.7) else self.key()

    def name(self, known: list[str]) -> str:
        """Return the name of a tool: a known one, words, or both."""
        if self.chance(0.5):
            return self.choice(known)
        words = [self.word() for _ in range(self.random.randint(1, 3))]
        if self.chance(0.3):
            words[0] = self.choice(known)
        return self.choice(["_", "_", "_", "-", "__"]).join(words)

    def sentence(self) -> str:
        """Return a sentence of the language reference, or one of random words."""
        if self.chance(0.4):
            return self.choice(PROSE)
        words = [self.word() for _ in range(self.random.randint(3, 14))]
        words = [
            self.choice(["{}", "{}", "{}", "{}", "{}", "{},", "'{}'", "`{}`", "({})", "{}:"]).format(
                word.title() if self.chance(0.15) else word
            )
            for word in words
        ]
        if self.chance(0.1):
            words.insert(0, str(self.random.randint(1, 9)) + ".")
        text = " ".join(words)
        return text[0].upper() + text[1:] + self.choice([".", ".", ".", "!", ":", "\n", "\n\n- "])

    def prose(self, most: float) -> str:
        """Return up to `most` sentences."""
        return " ".join(self.sentence() for _ in range(int(self.random.random() * most)))

    def number(self) -> int:
        """Return a number of one to four digits."""
        digits = self.choice([1, 2, 2, 2, 3, 3, 4])
        return self.random.randint(10 ** (digits - 1) if digits > 1 else 0, 10**digits - 1)

    def function(self, name: str, text: str, types: dict[str, str]) -> dict[str, Any]:
        """Return the definition of a function as a request's `tools` have it, with its types by argument."""
        properties = {key: {} if type == "any" else {"type": type} for key, type in types.items()}
        if self.chance(0.15):
            text = f"{text} {self.sentence()}".strip()
        if self.chance(0.08):
            text = f"Tool Name: {name}\nTool Arguments: {json.dumps(properties)}\nTool Description: {text}"
        schema = {"type": "object", "properties": properties, "required": list(types)}
        return {"name": name, "description": text, "parameters": schema}

    def idle_tool(self) -> dict[str, Any]:
        """Return a tool that no question is about."""
        types = ["string", "integer", "number", "boolean", "array", "any"]
        keys = {self.key(): self.choice(types) for _ in range(self.random.randint(0, 3))}
        return self.function(f"{self.word()}_{self.word()}", self.sentence(), keys)
