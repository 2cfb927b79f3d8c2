"""Models that criticise and rewrite prompts, behind an OpenAI client."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from raylight._utils.printable import encodable
from raylight.agent.prompts import PromptTemplate
from raylight.algorithms.apo.edits import RejectedEdit
from raylight.algorithms.apo.prompts import critique_messages, edit_messages
from raylight.algorithms.apo.settings import ApoSettings
from raylight.algorithms.apo.trials import Trial, describe_trials
from raylight.errors import CriticError
from raylight.types import JsonObject

if TYPE_CHECKING:
    from openai import AsyncOpenAI

NO_COMPLETION = (
    "answered with no chat completion (check that the client's base_url ends in /v1, or in the server's own "
    "path)"
)


@contextlib.asynccontextmanager
async def client_on_current_loop(client: AsyncOpenAI) -> AsyncIterator[AsyncOpenAI]:
    """Yield a copy of a client whose connections belong to this event loop, and close them at the end.

    A run has its own event loop, and a connection that another loop opened fails there. A client with
    the user's own `http_client` is yielded unchanged.
    """
    import openai
    from openai._base_client import AsyncHttpxClientWrapper

    if not isinstance(getattr(client, "_client", None), AsyncHttpxClientWrapper):
        yield client
        return
    async with openai.DefaultAsyncHttpxClient() as connections:
        yield client.copy(http_client=connections)


class PromptCritic:
    """Client of the two models. The OpenAI client retries transient errors, up to its `max_retries`."""

    def __init__(self, client: AsyncOpenAI, settings: ApoSettings) -> None:
        self._client = client
        self._settings = settings

    async def critique(self, template: PromptTemplate, trials: Sequence[Trial], variant: int) -> str:
        """Return a critique of a prompt by its rollouts (a textual gradient).

        Raises:
            RejectedEdit: the model did not answer, or its answer is empty or truncated.
            CriticError: no request can succeed: the API key, the model's name or the base URL is wrong.
        """
        messages = critique_messages(template, describe_trials(trials), variant)
        return await self._ask(self._settings.gradient_model, messages)

    async def edit(self, template: PromptTemplate, critique: str, variant: int) -> str:
        """Return an answer that contains a rewritten prompt.

        Raises:
            RejectedEdit: as in `critique`.
            CriticError: as in `critique`.
        """
        return await self._ask(self._settings.apply_edit_model, edit_messages(template, critique, variant))

    async def _ask(self, model: str, messages: list[JsonObject]) -> str:
        return await ask_model(self._client, model, messages, self._settings.diversity_temperature)


async def ask_model(
    client: AsyncOpenAI, model: str, messages: list[JsonObject], temperature: float | None
) -> str:
    """Return a model's answer to a chat.

    Raises:
        RejectedEdit: the model did not answer, or its answer is empty or truncated.
        CriticError: no request can succeed: the API key, the model's name or the base URL is wrong.
    """
    import openai

    extra: JsonObject = {} if temperature is None else {"temperature": temperature}
    messages = [message | {"content": encodable(message["content"])} for message in messages]
    try:
        reply = await client.chat.completions.create(model=model, messages=messages, **extra)  # type: ignore[arg-type]
    except (openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError) as error:
        raise CriticError(
            f"requests to {model!r} at {client.base_url} are rejected: {error}. Check the client's base_url "
            "and api_key, and the names given as gradient_model, apply_edit_model or reflection_model"
        ) from error
    except openai.OpenAIError as error:
        raise RejectedEdit(
            f"{model!r} did not answer: {type(error).__name__}: {error}", "endpoint"
        ) from error
    except ValueError as error:  # the content type is JSON, the body is not
        raise RejectedEdit(f"{model!r} {NO_COMPLETION}: {error}", "endpoint") from error
    text, finish_reason = _parse_reply(reply, model)
    if finish_reason == "length":
        raise RejectedEdit(f"the answer of {model!r} is truncated", "cut off", text)
    if not text:
        raise RejectedEdit(f"the answer of {model!r} is empty", "empty")
    return text


def _parse_reply(reply: Any, model: str) -> tuple[str, str | None]:
    """Return the text of a reply and its finish reason.

    The OpenAI client accepts any body as a completion, a web page too.

    Raises:
        RejectedEdit: the reply is not a completion.
    """
    try:
        choice = reply.choices[0]
        content = choice.message.content
        if not isinstance(content, str | None):
            raise TypeError(f"its content is a {type(content).__name__}")
    except (AttributeError, TypeError, LookupError) as error:
        raise RejectedEdit(f"{model!r} {NO_COMPLETION}: {reply!r:.200} ({error})", "endpoint") from error
    return encodable(content or "").strip(), choice.finish_reason
