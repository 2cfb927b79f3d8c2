"""Teachers of rows: the choice of one of several by the task, and prompts of one that reads other messages
than the trained model did, such as ones with the answer.

A row begins with the prompt of a call, the first of its conversation. The function of the user changes the
messages of this prompt alone. All tokens after it, sampled ones and observations, stay as they are.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from raylight.errors import ConfigError, TeacherPromptError
from raylight.experience.trajectories.trajectory import common_prefix
from raylight.semconv import CALL_ID, DIALECT, INPUT_MESSAGES, REQUEST_PARAMETERS, TOOL_DEFINITIONS
from raylight.types import FinishedRollout, Generation, IntArray, JsonObject, Message, Trajectory
from raylight.types.images import compared_ids

TeacherPrompt: TypeAlias = Callable[[Any, list[Message]], Sequence[Message]]
"""Function from the task and the messages of a call to the messages that the teacher reads instead."""
TeacherChoice: TypeAlias = str | Callable[[Any], str]
"""Key of a task, or a function of it, that gives the name of the task's teacher."""

RENDERED_FIELDS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")
"""Fields of a chat request, other than messages and tools, that its chat template reads."""


@dataclass(frozen=True)
class ChangedPrompt:
    """The prompt with which a row begins, and the one that the teacher reads instead."""

    rollout_id: str
    tokens: IntArray
    """Tokens of the prompt that the model read, int32 of shape (tokens,)."""
    own: str
    """Fields of a request that the chat template renders into these tokens, as JSON."""
    teacher: str
    """The same with the teacher's messages."""


def choose_teachers(
    rows: Sequence[Trajectory],
    finished: Sequence[FinishedRollout],
    names: Sequence[str],
    choice: TeacherChoice,
) -> list[int]:
    """Return the number of each row's teacher among the names.

    Args:
        finished: the rollouts of the rows.

    Raises:
        ConfigError: a task has no such key, the function fails, or no teacher has the name.
    """
    tasks = {item.rollout.rollout_id: item.rollout.input for item in finished}
    known = {
        rollout_id: _choose(tasks[rollout_id], names, choice, rollout_id)
        for rollout_id in dict.fromkeys(row.rollout_id for row in rows)
    }
    return [known[row.rollout_id] for row in rows]


def check_prompt_function(function: Any) -> None:
    """Check that a function takes a task and messages.

    Raises:
        ConfigError: it does not, or is a coroutine function.
    """
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        raise ConfigError(
            "the prompt of a teacher is a coroutine function; give a plain one, and put what it would wait "
            "for into the tasks"
        )
    try:
        inspect.signature(function).bind(None, [])
    except TypeError as error:
        raise ConfigError(
            f"the prompt of a teacher must take two arguments, the task and the messages of a call: {error}"
        ) from None
    except ValueError:  # written in C, without a signature
        return


def changed_prompts(
    rows: Sequence[Trajectory],
    finished: Sequence[FinishedRollout],
    function: TeacherPrompt | None,
    renders_all: bool = False,
) -> list[ChangedPrompt | None]:
    """Return the changed prompt of each row; None for one whose messages the function left as they are.

    The function is called once for each call with which rows begin.

    Args:
        finished: the rollouts of the rows, with their spans.
        function: None leaves all messages as they are.
        renders_all: also return the prompts of unchanged messages, which the teacher renders otherwise. None
            is then for a call without messages.

    Raises:
        TeacherPromptError: a row's call has no messages, or the function fails or returns no messages.
    """
    rollouts = {item.rollout.rollout_id: item for item in finished}
    known: dict[str, ChangedPrompt | None] = {}
    found = []
    for row in rows:
        item = rollouts[row.rollout_id]
        call = first_call(row, item.generations)
        if call.key.call_id not in known:
            known[call.key.call_id] = _change(call, item, function, renders_all)
        found.append(known[call.key.call_id])
    return found


def first_call(row: Trajectory, calls: Sequence[Generation]) -> Generation:
    """Return the call with which a row begins: its prompt, then its answer. If there are several, the one
    with the shortest prompt. A row may be cut within the answer.

    Raises:
        AssertionError: no call begins the row.
    """
    tokens = compared_ids(row.token_ids, row.images)
    for call in sorted(calls, key=lambda call: len(call.prompt_ids)):
        prompt = len(call.prompt_ids)
        answer = call.output_ids[: max(len(tokens) - prompt, 0)]
        if (
            len(answer)
            and common_prefix(call.compared_ids[:prompt], tokens) == prompt
            and np.array_equal(answer, tokens[prompt : prompt + len(answer)])
        ):
            return call
    raise AssertionError(f"rollout {row.rollout_id} has a row that no call of it begins")


def replace_prompt(row: Trajectory, own: IntArray, prompt: Sequence[int]) -> tuple[IntArray, int]:
    """Return the tokens of a row after another prompt, int32 of shape (tokens,), and the index of the first
    trained one.

    Args:
        own: tokens of the prompt with which the row begins.
    """
    rest = row.token_ids[len(own) :]
    ids = np.concatenate([np.asarray(prompt, np.int32), rest])
    start = row.prompt_length + len(prompt) - len(own)
    assert start, "a chat template renders no empty prompt"
    return ids, start


def _choose(task: object, names: Sequence[str], choice: TeacherChoice, rollout_id: str) -> int:
    if callable(choice):
        try:
            name = choice(task)
        except Exception as error:  # the user's code
            raise ConfigError(
                f"teacher_of raised {type(error).__name__} for rollout {rollout_id}: {error}"
            ) from error
    elif isinstance(task, Mapping) and choice in task:
        name = task[choice]
    else:
        raise ConfigError(
            f"the task of rollout {rollout_id} has no key {choice!r}, by which teacher_of chooses its "
            "teacher; add it to the tasks, or give a function of the task"
        )
    if name not in names:
        raise ConfigError(
            f"teacher_of gives the teacher {name!r:.80} for rollout {rollout_id}, and there are: "
            f"{', '.join(names)}; add it to teachers, or change the task"
        )
    return names.index(name)


def _change(
    call: Generation, item: FinishedRollout, function: TeacherPrompt | None, renders_all: bool
) -> ChangedPrompt | None:
    rollout_id = item.rollout.rollout_id
    attributes = _chat_attributes(call, item)
    if function is None and attributes is None:
        return None
    request = _rendered_request(call, item, attributes)
    if function is None:
        return ChangedPrompt(rollout_id, call.prompt_ids, json.dumps(request), json.dumps(request))
    messages: list[Message] = request["messages"]
    try:
        changed = function(copy.deepcopy(item.rollout.input), copy.deepcopy(messages))
    except Exception as error:  # the user's code
        raise TeacherPromptError(
            f"the teacher's prompt function raised {type(error).__name__} for rollout {rollout_id}: {error}"
        ) from error
    if isinstance(changed, str | bytes | Mapping) or not isinstance(changed, Sequence) or not changed:
        raise TeacherPromptError(
            f"the teacher's prompt function returned {changed!r:.80} for rollout {rollout_id}; return a list "
            "of messages, unchanged ones where the teacher shall read what the model read"
        )
    for message in changed:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise TeacherPromptError(
                f"the teacher's prompt function returned {message!r:.80} as a message for rollout "
                f"{rollout_id}; a message is a dict with role and content"
            )
    if list(changed) == messages and not renders_all:
        return None
    try:
        teacher = json.dumps(request | {"messages": list(changed)})
    except (TypeError, ValueError) as error:
        raise TeacherPromptError(
            f"the messages of the teacher's prompt function for rollout {rollout_id} are not JSON: {error}"
        ) from None
    return ChangedPrompt(rollout_id, call.prompt_ids, json.dumps(request), teacher)


def _chat_attributes(call: Generation, item: FinishedRollout) -> Mapping[str, object] | None:
    """Return the attributes of a call's span; None if it was none of chat."""
    spans = (span.attributes for span in item.spans if span.attributes.get(CALL_ID) == call.key.call_id)
    attributes = next((found for found in spans if DIALECT in found), {})
    return None if attributes.get(DIALECT, "completions") == "completions" else attributes


def _rendered_request(
    call: Generation, item: FinishedRollout, attributes: Mapping[str, object] | None
) -> JsonObject:
    """Return the fields of a chat request that its template reads.

    Raises:
        TeacherPromptError: the call was none of chat.
    """
    if attributes is None:
        raise TeacherPromptError(
            f"call {call.key.call_id} of rollout {item.rollout.rollout_id} has no messages that a teacher's "
            "prompt function could change, only a prompt as text or tokens; let the agent use chat "
            "completions, responses or messages, or leave TeacherConfig.prompt out"
        )
    parameters = json.loads(str(attributes[REQUEST_PARAMETERS]))
    request = {name: parameters[name] for name in RENDERED_FIELDS if parameters.get(name) is not None}
    if (effort := parameters.get("reasoning_effort")) is not None:  # as vLLM passes it on
        requested = request.get("chat_template_kwargs") or {}
        variables = {"enable_thinking": effort != "none"} | requested | {"reasoning_effort": effort}
        request["chat_template_kwargs"] = variables
    if tools := attributes.get(TOOL_DEFINITIONS):
        request["tools"] = json.loads(str(tools))
    return request | {"messages": json.loads(str(attributes[INPUT_MESSAGES]))}
