"""Families of models by how they write tool calls and reasoning.

Chat template, tokenizer and architecture decide. A family's row has to match in full: all its markers in the
template, its tokens in the vocabulary, its architecture. No single marker decides, because families share
them; Hermes, Qwen3-Coder and GLM all write `<tool_call>`. A template that no row matches has an unknown
notation, which is reported, not guessed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from raylight.types import Tokenizer


@dataclass(frozen=True)
class ReasoningNotation:
    """A notation of reasoning.

    Attributes:
        open: text before it.
        close: text after it.
        gap: pattern of what may follow, before the answer.
        answer: text before the answer.
    """

    open: str
    close: str
    gap: str = r"\n{0,2}"
    answer: str = ""


THINK = ReasoningNotation("<think>", "</think>")
HARMONY = ReasoningNotation(
    "<|channel|>analysis<|message|>",
    "<|end|>",
    r"<\|start\|>assistant",
    "<|channel|>final<|message|>",
)
REASONINGS = {
    "<seed:think>": ReasoningNotation("<seed:think>", "</seed:think>"),
    "[THINK]": ReasoningNotation("[THINK]", "[/THINK]"),
    "<|START_THINKING|>": ReasoningNotation("<|START_THINKING|>", "<|END_THINKING|>"),
    "<|channel>": ReasoningNotation("<|channel>thought\n", "<channel|>"),
    "<|channel|>analysis": HARMONY,
    "<think>": THINK,
}
"""Marker in a chat template -> the notation of reasoning; the first match counts."""


@dataclass(frozen=True)
class Family:
    """Models that write tool calls in one notation, and how to recognize them.

    Attributes:
        notation: name of the notation of tool calls.
        markers: texts that are all in the chat template.
        vllm_tools: vLLM's parser of the calls; None: it has none.
        vllm_reasoning: vLLM's parser of the family's reasoning, where the template shows any.
        tokens: texts that are all tokens of the tokenizer.
        model_types: architectures, one of which it must be; empty: any.
    """

    notation: str
    markers: tuple[str, ...]
    vllm_tools: str | None
    vllm_reasoning: str | None = None
    tokens: tuple[str, ...] = ()
    model_types: tuple[str, ...] = ()


DSML, DEEPSEEK, LLAMA = "｜DSML｜", "<｜tool▁calls▁begin｜>", '{"name": function name, "parameters":'
FUNCTION = ("<tool_call>", "<function=", "<parameter=")
GLM = ("<tool_call>", "<arg_key>", "<arg_value>")
HERMES = ("<tool_call>", '"name', '"arguments')
LFM2 = ("<|tool_call_start|>", "<|tool_call_end|>")
COHERE = ("<|START_ACTION|>", "tool_name", "parameters")
FAMILIES = (
    Family("qwen_xml", FUNCTION, "step3p5", "step3p5", model_types=("step3p5",)),
    Family("qwen_xml", FUNCTION, "qwen3_coder", "nemotron_v3", model_types=("nemotron_h",)),
    Family("qwen_xml", FUNCTION, "qwen3_coder", "qwen3"),
    Family("seed_xml", ("<seed:tool_call>", "<function=", "<parameter="), "seed_oss", "seed_oss"),
    Family("glm", GLM, "poolside_v1", "poolside_v1", model_types=("laguna",)),
    Family("glm", GLM, "glm45", "glm45"),
    Family(
        "minimax_m2", ("<minimax:tool_call>", "<invoke name=", "<parameter name="), "minimax_m2", "minimax_m2"
    ),
    Family("deepseek_v32", (DSML, "function_calls", "invoke name="), "deepseek_v32", "deepseek_v3"),
    Family("deepseek_v4", (DSML, "tool_calls", "invoke name="), "deepseek_v4", "deepseek_v4"),
    Family("deepseek_v3", (DEEPSEEK, "<｜tool▁sep｜>", "```json"), "deepseek_v3", "deepseek_r1"),
    Family("deepseek_v31", (DEEPSEEK, "<｜tool▁sep｜>"), "deepseek_v31", "deepseek_v3"),
    Family("kimi_k2", ("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>"), "kimi_k2", "kimi_k2"),
    Family("mistral_args", ("[TOOL_CALLS]", "[ARGS]"), "mistral", "mistral"),
    Family("mistral_json", ("[TOOL_CALLS]", "[AVAILABLE_TOOLS]"), "mistral", "mistral"),
    Family("gemma4", ("<|tool_call>call:", "<tool_call|>"), "gemma4", "gemma4"),
    Family("harmony", ("<|channel|>", "<|call|>", "to=functions."), "openai", "openai_gptoss"),
    Family("harmony", ("<|channel|>", "<|call|>", '"functions."'), "openai", "openai_gptoss"),
    Family("cohere", COHERE, "cohere_command3", "cohere_command3", model_types=("cohere", "cohere2")),
    Family("cohere", COHERE, "cohere_command4", "cohere_command4"),
    Family("nemotron_json", ("<TOOLCALL>", "</TOOLCALL>"), None, "deepseek_r1"),
    Family("granite", ("<|tool_call|>", "JSON list of tools"), "granite"),
    Family("functools", ("functools[", "arguments"), "phi4_mini_json"),
    Family("phi4_mini", ("<|tool|>", "<|/tool|>"), None, tokens=("<|tool_call|>", "<|/tool_call|>")),
    Family("lfm2", LFM2, "lfm2", "qwen3"),
    Family("lfm2", ("List of tools: ",), "lfm2", "qwen3", tokens=LFM2),
    Family("olmo3", ("<function_calls>", "</function_calls>", "<functions>"), "olmo3", "olmo3"),
    Family("llama_json", (LLAMA,), "llama3_json"),
    Family("hermes", HERMES, "granite4", model_types=("granitemoehybrid", "granite")),
    Family("hermes", HERMES, "hermes", "qwen3"),
)
"""The first row that matches counts. Rows with an architecture come before the same row without."""


@dataclass(frozen=True)
class Style:
    """A model's notations of tool calls and reasoning, and how they were found.

    Attributes:
        template: text of the chat template; "" if there is none.
        family: the family of its tool calls; None: none, or an unknown notation.
        reasoning: the notation of its reasoning; None if the template shows none.
        reason: the findings that decided, for people.
        closes_reasoning: True if the template ends the reasoning itself, unless a request turns it on.
    """

    template: str
    family: Family | None
    reasoning: ReasoningNotation | None
    reason: str
    closes_reasoning: bool = False

    @property
    def takes_tools(self) -> bool:
        """True if the template shows tools to the model."""
        return "tools" in self.template

    @property
    def notation(self) -> str | None:
        """Name of the notation of its tool calls; None: none, or not known."""
        return self.family.notation if self.family else None

    @property
    def vllm_tools(self) -> str | None:
        """vLLM's parser of its tool calls."""
        return self.family.vllm_tools if self.family else None

    @property
    def vllm_reasoning(self) -> str | None:
        """vLLM's parser of its reasoning.

        None if the template closes the reasoning: vLLM's parsers would take the whole answer for reasoning.
        """
        if self.reasoning is None or self.closes_reasoning:
            return None
        if self.family and self.family.vllm_reasoning:
            return self.family.vllm_reasoning
        return "deepseek_r1" if self.reasoning is THINK and not self.takes_tools else None


def template_of(tokenizer: Tokenizer) -> str:
    """Return the text of a tokenizer's chat templates; "" if it has none."""
    templates = getattr(tokenizer, "chat_template", None)
    return "\n".join(templates.values()) if isinstance(templates, dict) else templates or ""


def find_family(template: str, vocabulary: Collection[str] = (), model_type: str = "") -> Family | None:
    """Return the family of a model that writes tool calls; None if no row matches.

    Args:
        template: its chat template.
        vocabulary: tokens of its tokenizer.
        model_type: its architecture; "" if it is not known.
    """
    return next(
        (
            family
            for family in FAMILIES
            if all(marker in template.replace('\\"', '"') for marker in family.markers)
            and all(token in vocabulary for token in family.tokens)
            and (not family.model_types or model_type in family.model_types)
        ),
        None,
    )


def find_style(tokenizer: Tokenizer, model_type: str = "", template: str | None = None) -> Style:
    """Find how a model writes.

    Args:
        tokenizer: its Hugging Face tokenizer.
        model_type: its architecture; "" if it is not known.
        template: chat template in place of the tokenizer's own.
    """
    template = template_of(tokenizer) if template is None else template
    vocabulary = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}
    family = find_family(template, vocabulary, model_type) if "tools" in template else None
    reasoning = next((found for marker, found in REASONINGS.items() if marker in template), None)
    closes = reasoning is not None and _prompt_end(tokenizer, template).endswith(reasoning.close)
    return Style(template, family, reasoning, _reason(template, family, model_type), closes)


def _prompt_end(tokenizer: Tokenizer, template: str) -> str:
    """Return the end of a short prompt; "" if it cannot be rendered."""
    try:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": "hi"}],
            chat_template=template,
            add_generation_prompt=True,
            tokenize=False,
        )
    except Exception:  # a template is the model authors' program and may raise anything
        return ""
    return str(text).rstrip()


def _reason(template: str, family: Family | None, model_type: str) -> str:
    if not template:
        return "there is no chat template"
    if family is None:
        return (
            "the template shows tools and matches no known notation of calls"
            if "tools" in template
            else "the template shows no tools"
        )
    found = [f"the template has {' and '.join(family.markers)}"]
    if family.tokens:
        found.append(f"the tokenizer has {' and '.join(family.tokens)}")
    if family.model_types:
        found.append(f"the architecture is {model_type}")
    return ", ".join(found)
