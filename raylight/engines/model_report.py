"""Report of how an engine reads a model: its context, its chat template, its tool calls and its reasoning."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from raylight.engines.families import THINK, find_style
from raylight.engines.registry import engine_traits
from raylight.engines.transformers.message import PARSERS
from raylight.engines.vllm.args import read_template
from raylight.errors import ModelNotFoundError
from raylight.types import JsonObject


@dataclass(frozen=True)
class ModelReport:
    """Report of how an engine reads a model.

    Attributes:
        engine: name of the engine.
        context_length: the model's own limit in tokens; None if its configuration has none.
        has_template: True if the model has a chat template, which all dialects but completions need.
        tools_in_template: True if the template shows tools to the model.
        tool_parser: name of the parser of the model's tool calls; None: they stay text.
        reason: the findings that decided about the parser.
        reasoning: format of the reasoning that is separated from the answer; None: none is.
        writes_reasoning: True if the template shows that the model writes its reasoning before its answer.
        has_vision: True if the model has a vision part.
        image_obstacle: the reason why the engine takes no images for it, and what to do; None if it takes
            them.
    """

    engine: str
    context_length: int | None
    has_template: bool
    tools_in_template: bool
    tool_parser: str | None
    reason: str
    reasoning: str | None
    writes_reasoning: bool
    has_vision: bool = False
    image_obstacle: str | None = "it has no vision part"

    def rows(self) -> dict[str, str]:
        """Return the report in words, by name."""
        template = (
            "it shows tools to the model" if self.tools_in_template else "it shows no tools to the model"
        )
        refused = "refused" if self.has_vision else f"refused ({self.image_obstacle})"  # see `remedies`
        return {
            "context length": f"{self.context_length} tokens" if self.context_length else "not stated",
            "chat template": template if self.has_template else "none",
            "tool calls": f"{self.tool_parser or 'not parsed'} ({self.reason})",
            "reasoning": self.reasoning or ("left in the answer" if self.writes_reasoning else "none"),
            "images": "taken" if self.image_obstacle is None else refused,
        }

    def remedies(self) -> dict[str, str]:
        """Return what is missing, and what to do about it."""
        found, traits = {}, engine_traits(self.engine)
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
                ("tool_call_parser", "a parser of vLLM, with enable_auto_tool_choice=True")
                if traits.vllm_parsers
                else ("tool_parser", f"one of {', '.join(PARSERS)}")
            )
            found[f"the {self.engine} engine does not know how the model calls tools: calls stay text"] = (
                f"set engine.args.{setting} ({known})"
            )
        if self.writes_reasoning and self.reasoning is None:
            setting = "reasoning_parser, such as qwen3" if traits.vllm_parsers else "reasoning=True"
            found[f"the {self.engine} engine leaves the model's reasoning in its answers"] = (
                f"set engine.args.{setting}"
            )
        if self.has_vision and self.image_obstacle is not None:
            problem, _, remedy = self.image_obstacle.rpartition("; ")
            found[f"the model has a vision part, and requests with images are refused: {problem}"] = remedy
        elif self.image_obstacle is None and (package := traits.image_package) and not find_spec(package):
            found[
                f"the {self.engine} engine loads this model only with {package}, which is not installed"
            ] = "install the version for this torch, or set engine={'kind': 'transformers'}"
        return found


def report_model(path: str, engine: str, args: JsonObject | None = None) -> ModelReport:
    """Read a model as an engine does.

    Args:
        path: the model's folder.
        engine: name of the engine, which loads a model.
        args: `EngineConfig.args`, which override what is detected.

    Raises:
        ModelNotFoundError: transformers cannot read the model's configuration.
    """
    from transformers import AutoConfig, AutoTokenizer

    from raylight.images.model_inputs import image_obstacle

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
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    vllm = engine_traits(engine).vllm_parsers
    override = read_template(args.get("chat_template")) if vllm else None
    style = find_style(tokenizer, config.model_type, override)
    if vllm:
        chosen = args.get("tool_call_parser")
        is_set, detected = chosen is not None, style.vllm_tools
        reasoning = args.get("reasoning_parser", style.vllm_reasoning)
    else:
        chosen, notation = args.get("tool_parser", "auto"), style.reasoning
        is_set, detected = chosen != "auto", style.notation
        if args.get("reasoning", "auto") != "auto":
            notation = (notation or THINK) if args["reasoning"] else None
        reasoning = f"{notation.open.strip()}...{notation.close}" if notation else None
    return ModelReport(
        engine=engine,
        context_length=limit,
        has_template=bool(style.template),
        tools_in_template=style.takes_tools,
        tool_parser=chosen if is_set else detected,
        reason="set in engine.args" if is_set else style.reason,
        reasoning=reasoning,
        writes_reasoning=style.reasoning is not None and not style.closes_reasoning,
        has_vision=getattr(config, "vision_config", None) is not None,
        image_obstacle=image_obstacle(path),
    )
