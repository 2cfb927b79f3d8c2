"""Report of how an engine reads a model: its context, its chat template, its tool calls and its reasoning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raylight.engines.transformers.message import END_THINK, THINK, find_style
from raylight.engines.transformers.tools import FORMATS
from raylight.engines.vllm.args import chat_template, find_tool_parser
from raylight.errors import ModelNotFoundError

REASONING = f"{THINK}...{END_THINK}"


@dataclass(frozen=True)
class ModelReport:
    """Report of how an engine reads a model.

    Attributes:
        engine: "transformers" or "vllm".
        context_length: the model's own limit in tokens; None if its configuration has none.
        has_template: True if the model has a chat template, which all dialects but completions need.
        tools_in_template: True if the template shows tools to the model.
        tool_parser: name of the parser of the model's tool calls; None: tools are rejected.
        reasoning: format of the reasoning that is separated from the answer; None: none is.
        writes_reasoning: True if the template shows that the model writes its reasoning before its answer.
    """

    engine: str
    context_length: int | None
    has_template: bool
    tools_in_template: bool
    tool_parser: str | None
    reasoning: str | None
    writes_reasoning: bool

    def rows(self) -> dict[str, str]:
        """Return the report in words, by name."""
        template = (
            "it shows tools to the model" if self.tools_in_template else "it shows no tools to the model"
        )
        return {
            "context length": f"{self.context_length} tokens" if self.context_length else "not stated",
            "chat template": template if self.has_template else "none",
            "tool calls": self.tool_parser or "not parsed",
            "reasoning": self.reasoning or ("left in the answer" if self.writes_reasoning else "none"),
        }

    def remedies(self) -> dict[str, str]:
        """Return what is missing, and what to do about it."""
        found = {}
        if not self.has_template:
            found["the model has no chat template, so that only /v1/completions works"] = (
                "set tokenizer.chat_template and save the tokenizer into the model's folder"
            )
        elif not self.tools_in_template:
            found["the model's chat template does not show the tools of a request to the model"] = (
                "use a model that was trained to call tools, or a chat template that renders `tools`"
            )
        elif self.tool_parser is None:
            setting, known = (
                ("tool_parser", f"one of {', '.join(FORMATS)}")
                if self.engine == "transformers"
                else ("tool_call_parser", "a parser of vLLM, with enable_auto_tool_choice=True")
            )
            found[f"the {self.engine} engine does not know the format of the model's tool calls"] = (
                f"set engine.args.{setting} ({known})"
            )
        if self.writes_reasoning and self.reasoning is None:
            setting = "reasoning=True" if self.engine == "transformers" else "reasoning_parser, such as qwen3"
            found[f"the {self.engine} engine leaves the model's reasoning in its answers"] = (
                f"set engine.args.{setting}"
            )
        return found


def report_model(path: str, engine: str, args: Mapping[str, Any] | None = None) -> ModelReport:
    """Read a model as an engine does.

    Args:
        path: the model's folder.
        engine: "transformers" or "vllm".
        args: `EngineConfig.args`, which override what is detected.

    Raises:
        ModelNotFoundError: transformers cannot read the model's configuration.
    """
    from transformers import AutoConfig, AutoTokenizer

    args = args or {}
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)  # no question to the user
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).partition("\n")[0].rstrip(" .")
        raise ModelNotFoundError(
            f"transformers cannot read {path}: {reason:.300}. Code in a model's folder (auto_map) is never "
            "run; choose a model of an architecture that transformers has, or copy the folder again"
        ) from None
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if engine == "vllm":
        template = chat_template(path, args.get("chat_template")) or ""
        parser = args.get("tool_call_parser") or find_tool_parser(template)
        reasoning = args.get("reasoning_parser")
    else:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        style = find_style(tokenizer, args.get("tool_parser", "auto"), args.get("reasoning", "auto"))
        template = style.template
        parser = next((name for name, known in FORMATS.items() if known is style.tool_format), None)
        reasoning = REASONING if style.thinks else None
    return ModelReport(
        engine, limit, bool(template), "tools" in template, parser, reasoning, THINK in template
    )
