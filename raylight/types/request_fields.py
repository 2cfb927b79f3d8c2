"""Classes of request fields, the same for every dialect and engine."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

logger = logging.getLogger(__name__)

LABELS = frozenset(
    {
        "access_programs",
        "billing_policy",
        "client_metadata",
        "diagnostics",
        "fallback_credit_token",
        "inference_geo",
        "max_tool_calls",
        "metadata",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "speed",
        "store",
        "user",
        "user_profile_id",
        "workspace_id",
    }
)
"""Fields of a request that describe its caller, or how a provider bills, caches, schedules or stores it.

They never change an answer. Every dialect and engine accepts them with any value.
"""
PROTECTED = frozenset(
    {
        *(
            "messages",
            "message",
            "prompt",
            "input",
            "instructions",
            "system",
            "role",
            "content",
            "text",
            "type",
        ),
        *("name", "id", "arguments", "output", "tool_calls", "tool_call_id", "call_id", "tool_use_id"),
        *("previous_response_id", "conversation", "documents", "suffix", "echo", "model", "n", "best_of"),
        *("tools", "tool_choice", "functions", "function_call", "function", "parameters", "input_schema"),
        *("parallel_tool_calls", "disable_parallel_tool_use", "strict", "schema", "json_schema", "format"),
        *("response_format", "output_config", "output_format", "structured_outputs", "chat_template"),
        *("chat_template_kwargs", "add_generation_prompt", "continue_final_message", "add_special_tokens"),
        *("kv_transfer_params", "prompt_token_ids", "truncate_prompt_tokens", "max_tokens", "min_tokens"),
        *("max_completion_tokens", "max_output_tokens", "stop", "stop_sequences", "stop_token_ids", "seed"),
        *("ignore_eos", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
        *("repetition_penalty", "length_penalty", "logit_bias", "bad_words", "allowed_token_ids"),
        *("use_beam_search", "logprobs", "top_logprobs", "prompt_logprobs", "logprob_token_ids"),
        *("include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens", "vllm_xargs"),
        *(
            "repetition_detection",
            "prompt_embeds",
            "truncation_side",
            "media_io_kwargs",
            "mm_processor_kwargs",
        ),
        *("return_token_ids", "stream", "stream_options", "include_usage", "thread"),
    }
)
"""Names of fields that shape what is sampled, recorded or answered, at any depth of a request."""


def drop_field(value: object, path: Sequence[str]) -> Any:
    """Return a decoded value without a field; the same object if it lacks the field.

    Args:
        path: names from the outermost field on. A list on the way stands for each of its entries.
    """
    if isinstance(value, list):
        entries = [drop_field(entry, path) for entry in value]
        return entries if any(new is not old for new, old in zip(entries, value, strict=True)) else value
    if not isinstance(value, dict) or path[0] not in value:
        return value
    if len(path) == 1:
        return {name: entry for name, entry in value.items() if name != path[0]}
    inner = drop_field(value[path[0]], path[1:])
    return value if inner is value[path[0]] else {**value, path[0]: inner}


@functools.cache
def log_dropped(field: str, reason: str) -> None:
    """Log that a field is dropped from all requests, once for each process.

    Args:
        reason: clause about the field, such as "this engine does not have".
    """
    logger.warning("a request has the field %s, which %s; it is dropped from all requests", field, reason)
