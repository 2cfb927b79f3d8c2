"""The teacher of an on-policy distillation."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_serializer, field_validator

from raylight.base_config import Config
from raylight.bounds import MAX_COUNT, MAX_PROCESSES, MAX_SECONDS
from raylight.components import dotted_name, import_dotted_name
from raylight.config import EngineConfig
from raylight.experience.teacher_prompts import TeacherPrompt, check_prompt_function
from raylight.ray_resources import CustomResources


class TeacherConfig(Config):
    """A fixed model in engines of its own, which scores the tokens that the trained model samples.

    Args:
        model: folder of a Hugging Face model, or its name in the local cache. Its tokenizer must have the
            tokens of the trained model's.
    """

    model: str
    prompt: TeacherPrompt | None = None
    """Function from the task and the messages of a call to the messages that the teacher reads instead, such
    as ones with the answer; or its dotted name. None: the teacher reads the model's own prompts."""
    kind: Literal["auto", "transformers", "vllm"] = "auto"
    """"auto" is vllm if replicas have a GPU and it is installed, else transformers."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM, such as {"tensor_parallel_size": 2}."""
    replicas: int = Field(default=1, ge=1, le=MAX_PROCESSES)
    """Serve replicas, each with an engine of its own. The rows of a step are divided among them."""
    num_cpus: float = Field(default=0.5, ge=0, le=MAX_PROCESSES)
    """CPUs that Ray reserves for a replica."""
    num_threads: int | None = Field(default=None, ge=1, le=MAX_PROCESSES)
    """Threads that compute on the CPU. None: as many as `num_cpus`, at least one."""
    num_gpus: float = Field(default=0, ge=0, le=1)
    """GPUs that Ray reserves for a replica, and for each worker of vLLM. They are the teacher's alone: the
    defaults of learners and engines are for the others."""
    resources: CustomResources = Field(default_factory=dict)
    """Custom resources that Ray reserves for a replica, and for each worker of vLLM."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Data type of weights and computation. If not set: bfloat16 on a GPU."""
    max_model_len: int | None = Field(default=None, ge=8, le=MAX_COUNT)
    """Tokens of the longest row. None: those of the model's rows; with `prompt`, up to 1024 more."""
    start_timeout_s: float = Field(default=180.0, gt=0, le=MAX_SECONDS)
    """Seconds within which the replicas must be ready."""
    timeout_s: float = Field(default=600.0, gt=0, le=MAX_SECONDS)
    """Seconds within which a part of a step's rows must be scored, the replacement of lost replicas
    included; and `prompt` must return for all rows of a step."""

    @field_validator("prompt", mode="before")
    @classmethod
    def _parse_prompt(cls, value: Any) -> Any:
        function = import_dotted_name(value, "prompt") if isinstance(value, str) else value
        if callable(function):
            check_prompt_function(function)
        return function

    @field_serializer("prompt", when_used="json")
    def _name_prompt(self, value: TeacherPrompt | None) -> str | None:
        return None if value is None else dotted_name(value)

    def engine(self) -> EngineConfig:
        """Return the settings of its engine."""
        own = {"model", "prompt", "max_model_len", "timeout_s"}
        return EngineConfig(**self.model_dump(exclude_unset=True, exclude=own))
