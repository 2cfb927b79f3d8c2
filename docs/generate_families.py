"""Writes the table of families in docs/models.md: `python docs/generate_families.py`.

It renders conversations with the real chat templates of the package `trl`, and continues them as the gateway
does.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from raylight.engines.families import find_style
from raylight.engines.transformers.message import PARSERS
from raylight.serving.conversations.rendering import Renderer, UnsupportedTemplate
from raylight.serving.dialects.chat_normalizer import SystemMessages

PAGE = Path(__file__).parent / "models.md"
BEGIN, END = "<!-- families -->\n", "<!-- end of the families -->\n"
TEMPLATES = {
    "qwen2_5": "Qwen 2.5",
    "qwen3": "Qwen 3",
    "qwen3_instruct_2507": "Qwen 3 2507",
    "qwen3_5_think": "Qwen 3.5",
    "qwen3_6": "Qwen 3.6",
    "qwen3_8": "Qwen 3.8",
    "llama3": "Llama 3",
    "llama3_1": "Llama 3.1",
    "llama3_2": "Llama 3.2",
    "gemma3": "Gemma 3",
    "gemma4_v5": "Gemma 4",
    "glm4moe": "GLM 4.5",
    "gptoss": "gpt-oss",
    "deepseek_r1_distill": "DeepSeek R1 distilled",
    "lfm2_v2": "LFM2",
    "lfm2_2_5": "LFM2.5",
    "nemotron_3_nano": "Nemotron 3 Nano",
    "cohere2": "Cohere 2",
    "phi3_5": "Phi 3.5",
}
"""Template of TRL -> the family, as the table names it."""
COLUMNS = (
    "chat",
    "system later",
    "tools",
    "text and tools",
    "parallel calls",
    "thinking",
    "thinking and tools",
)
SPECIAL = re.compile(
    r"</?[|｜]?[^<>\s'\"{}|｜]+[|｜]?>|<\|[^<>\s'\"{}]+\|?>|<[^<>\s'\"{}]+\|>|\[/?[A-Z_]{3,}\]"
)
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "description": "A number."}},
            "required": ["a"],
        },
    },
}
USER, MORE = {"role": "user", "content": "U1"}, {"role": "user", "content": "U2"}
THOUGHT = dict.fromkeys(("reasoning", "reasoning_content", "thinking"), "Hm.")


def call(number: int) -> dict[str, Any]:
    function = {"name": "add", "arguments": {"a": number}}
    return {"id": f"abcdefgh{number}", "type": "function", "function": function}


def result(number: int) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"abcdefgh{number}", "name": "add", "content": f"R{number}"}


def answer(text: str, *calls: dict[str, Any], **more: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text} | more | ({"tool_calls": list(calls)} if calls else {})


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "chat": [answer("A1"), MORE],
    "system later": [answer("A1"), {"role": "system", "content": "S2"}, MORE],
    "tools": [answer("", call(1)), result(1)],
    "text and tools": [answer("Let me.", call(1)), result(1)],
    "parallel calls": [answer("", call(1), call(2)), result(1), result(2)],
    "thinking": [answer("A1", **THOUGHT), MORE],
    "thinking and tools": [answer("", call(1), **THOUGHT), result(1)],
}


def read_template(name: str) -> str:
    """Return one of TRL's templates."""
    spec = importlib.util.find_spec("trl")
    assert spec is not None, "the package trl is installed"
    return (Path(str(spec.origin)).parent / "chat_templates" / f"{name}.jinja").read_text()


def make_tokenizer(template: str) -> Any:
    """Return a tokenizer of bytes that has the tokens of a template."""
    alphabet = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    raw = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<bos>", eos_token="<eos>")
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(set(SPECIAL.findall(template)))})
    tokenizer.chat_template = template
    return tokenizer


class Continuation(NamedTuple):
    """A conversation of two calls, as its second prompt.

    Attributes:
        sampled: tokens of the first call: its prompt and its answer.
        ids: the same, continued by the new turns; None if the template allows no continuation.
        whole: the text that the template makes of the second prompt.
        folded: True if a system message moved into the first message.
    """

    sampled: list[int]
    ids: list[int] | None
    whole: str
    folded: bool


def continue_row(tokenizer: Any, name: str) -> Continuation:
    """Continue a conversation as the gateway does."""
    tools = [ADD] if takes_tools(name) else None
    messages = [{"role": "system", "content": "S1"}, USER, *CONVERSATIONS[name]]
    placed = SystemMessages(tokenizer).place(messages)
    folded = len(placed) < len(messages)
    if name != "system later":
        placed = placed[1:]  # some templates take no system message
    at = next(index for index, message in enumerate(placed) if message["role"] == "assistant")
    render = tokenizer.apply_chat_template
    prompt = render(placed[:at], tools=tools, add_generation_prompt=True, tokenize=False)
    answered = render(placed[: at + 1], tools=tools, tokenize=False)
    whole = render(placed, tools=tools, add_generation_prompt=True, tokenize=False)
    sampled = answered[len(prompt) :].rstrip() if answered.startswith(prompt) else ""
    tokens = tokenizer.encode(prompt + sampled, add_special_tokens=False)
    try:
        ids = Renderer(tokenizer).extend(tokens, placed, at, tools)
    except UnsupportedTemplate:
        ids = None
    return Continuation(tokens, ids, whole, folded and name == "system later")


def takes_tools(name: str) -> bool:
    """Return True if a conversation has tools."""
    return "tools" in name or "calls" in name


def rows(tokenizer: Any, name: str) -> str:
    """Return the training rows of a conversation of two calls, or why the template has none."""
    if takes_tools(name) and "tools" not in tokenizer.chat_template:
        return "no tools"
    try:
        continued = continue_row(tokenizer, name)
    except Exception as error:  # a template is the model authors' program and may raise anything
        return f"refused: {str(error).rstrip('!.')}"
    if continued.folded:
        return "2, folded"
    return "2" if continued.ids is None else "1"


def lines() -> list[str]:
    """Return the table, a line each."""
    head = ["family", "tool calls", "vLLM's parsers", "reasoning", *CONVERSATIONS]
    table = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for name, title in TEMPLATES.items():
        tokenizer = make_tokenizer(read_template(name))
        style = find_style(tokenizer)
        known = f"`{style.notation}`" if style.notation in PARSERS else "text" if style.takes_tools else ""
        parsers = " ".join(f"`{parser}`" for parser in (style.vllm_tools, style.vllm_reasoning) if parser)
        reasoning = f"`{style.reasoning.open.strip()}`" if style.reasoning else ""
        cells = [rows(tokenizer, name) for name in CONVERSATIONS]
        cells[5:] = [cell if style.reasoning else "" for cell in cells[5:]]
        table.append(f"| {' | '.join([title, known, parsers, reasoning, *cells])} |")
    return table


def escaped(line: str) -> str:
    """Return a line whose markers do not end cells."""
    return re.sub(r"`[^`]*`", lambda match: match[0].replace("|", "\\|"), line)


def section() -> str:
    return "".join(f"{escaped(line)}\n" for line in lines())


def main() -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + BEGIN + section() + END + after)


if __name__ == "__main__":
    main()
