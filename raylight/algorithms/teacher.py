"""Settings of the teacher of on-policy distillation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

from pydantic import Field, field_serializer, field_validator, model_validator

from raylight._utils.bounds import MAX_COUNT
from raylight.components import NotImportedError, dotted_name, import_dotted_name
from raylight.config import ScoringConfig
from raylight.experience.teachers import TeacherPrompt, check_prompt_function
from raylight.types import JsonObject


@dataclass(frozen=True)
class UnimportedFunction:
    """Function by its dotted name, for commands that only read a run file.

    Args:
        setting: the setting that names it.
    """

    name: str
    setting: str

    def __call__(self, *arguments: object) -> object:
        raise NotImportedError(f"{self.setting}={self.name!r:.200} is not imported; run `raylight train`")


class TeacherConfig(ScoringConfig):
    """A fixed model, in separate engines or on the learners' ranks, which judges what the trained model
    samples.

    Args:
        model: folder of a Hugging Face model, or its name in the local cache. Its tokenizer must have the
            tokens of the trained model's, except with `tokenizer="aligned"`.
    """

    prompt: TeacherPrompt | None = None
    """Function from the task and the messages of a call to the messages that the teacher reads instead, such
    as ones with the answer; or its dotted name. None: the teacher reads the model's own prompts. It
    must return for all rows of a step within `timeout_s`."""
    kind: Literal["auto", "transformers", "vllm", "learner"] = "auto"
    """learner: on the learners' ranks, divided among them as the trained model is, in their data type; it
    gives whole distributions, and reads no setting of engines. "auto" is learner if `rl.OPD` needs whole
    distributions, vllm if replicas have a GPU and it is installed, else transformers."""
    tokenizer: Literal["same", "aligned"] = "same"
    """aligned: the teacher has other tokens. It reads the model's text in its own chat template and tokens,
    and the log-probs of both are compared on spans that end at the same place of the text."""
    args: JsonObject = Field(default_factory=dict)
    """Further arguments of vLLM, such as {"tensor_parallel_size": 2}."""
    max_model_len: int | None = Field(default=None, ge=8, le=MAX_COUNT)
    """Tokens of the longest row. None: as many as the trained model's; with `prompt`, up to 1024 more."""

    @model_validator(mode="after")
    def _check_engine_read(self) -> Self:
        if self.kind == "learner" and (unread := sorted(self.model_fields_set - {"model", "kind"})):
            raise ValueError(
                f"a teacher with kind='learner' has no engine that reads {', '.join(unread)}; remove "
                f"{'it' if len(unread) == 1 else 'them'}, or choose kind='auto'"
            )
        return self

    @field_validator("prompt", mode="before")
    @classmethod
    def _parse_prompt(cls, value: object) -> object:
        function = value
        if isinstance(value, str):
            try:
                function = import_dotted_name(value, "prompt")
            except NotImportedError:
                return UnimportedFunction(value, "prompt")
        if callable(function):
            check_prompt_function(function)
        return function

    @field_serializer("prompt", when_used="json")
    def _name_prompt(self, value: TeacherPrompt | None) -> str | None:
        if isinstance(value, UnimportedFunction):
            return value.name
        return None if value is None else dotted_name(value)
