"""The models that criticise and rewrite prompts, behind an OpenAI client."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from raylight.agent.prompts import PromptTemplate
from raylight.algorithms.apo.edits import RejectedEdit
from raylight.algorithms.apo.prompts import critique_messages, edit_messages
from raylight.algorithms.apo.settings import ApoSettings
from raylight.algorithms.apo.trials import Trial, describe_trials
from raylight.errors import CriticError

if TYPE_CHECKING:
    from openai import AsyncOpenAI

NO_COMPLETION = (
    "answered with no chat completion (does the client's base_url end in /v1, or whatever its server wants?)"
)


@contextlib.asynccontextmanager
async def on_this_loop(client: AsyncOpenAI) -> AsyncIterator[AsyncOpenAI]:
    """The same client with connections of this event loop, closed in the end: a run has a loop of its own, and a connection that
    another loop has opened breaks. A client that was given its own `http_client` is left as it is."""
    import openai
    from openai._base_client import AsyncHttpxClientWrapper

    if not isinstance(getattr(client, "_client", None), AsyncHttpxClientWrapper):
        yield client
        return
    async with openai.DefaultAsyncHttpxClient() as connections:
        yield client.copy(http_client=connections)


class PromptCritic:
    """Asks the two models. Transient errors are retried by the client itself, as often as its `max_retries` says."""

    def __init__(self, client: AsyncOpenAI, settings: ApoSettings) -> None:
        self._client = client
        self._settings = settings

    async def critique(self, template: PromptTemplate, trials: Sequence[Trial], variant: int) -> str:
        """Why a prompt did not do better (a textual gradient).

        Raises:
            RejectedEdit: the model did not answer, or said nothing.
            CriticError: it never will: the key or the name of the model is wrong.
        """
        return await self._ask(
            self._settings.gradient_model, critique_messages(template, describe_trials(trials), variant)
        )

    async def edit(self, template: PromptTemplate, critique: str, variant: int) -> str:
        """The answer in which there is a rewritten prompt; raises as `critique` does."""
        return await self._ask(self._settings.apply_edit_model, edit_messages(template, critique, variant))

    async def _ask(self, model: str, messages: list[dict[str, str]]) -> str:
        import openai

        warmth = self._settings.diversity_temperature
        extra: dict[str, Any] = {} if warmth is None else {"temperature": warmth}
        messages = [message | {"content": writable(message["content"])} for message in messages]
        try:
            reply = await self._client.chat.completions.create(model=model, messages=messages, **extra)  # type: ignore[arg-type]
        except (openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError) as error:
            raise CriticError(
                f"{model!r} at {self._client.base_url} cannot be asked: {error}. Check the client's base_url and api_key, and the "
                "names given as gradient_model and apply_edit_model"
            ) from error
        except openai.OpenAIError as error:
            raise RejectedEdit(
                f"{model!r} did not answer: {type(error).__name__}: {error}", "endpoint"
            ) from error
        except ValueError as error:  # a body that is announced as JSON and is none
            raise RejectedEdit(f"{model!r} {NO_COMPLETION}: {error}", "endpoint") from error
        text, ending = _answer(reply, model)
        if ending == "length":
            raise RejectedEdit(f"the answer of {model!r} was cut off", "cut off", text)
        if not text:
            raise RejectedEdit(f"{model!r} gave an empty answer", "empty")
        return text


def _answer(reply: Any, model: str) -> tuple[str, str | None]:
    """The text of a reply and why it ended. The client takes whatever an endpoint sends for a completion, a web page too.

    Raises:
        RejectedEdit: it is no completion.
    """
    try:
        choice = reply.choices[0]
        content = choice.message.content
        if not isinstance(content, str | None):
            raise TypeError(f"its content is a {type(content).__name__}")
    except (AttributeError, TypeError, LookupError) as error:
        raise RejectedEdit(f"{model!r} {NO_COMPLETION}: {reply!r:.200} ({error})", "endpoint") from error
    return writable(content or "").strip(), choice.finish_reason


def writable(text: str) -> str:
    """The text without halves of surrogate pairs, which neither a request nor a file can hold."""
    return text.encode(errors="replace").decode()
