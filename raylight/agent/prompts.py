"""Prompt templates. A template may come from a model (prompt optimisation), so that rendering it must be harmless."""

from __future__ import annotations

import functools
import string
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from raylight.agent.resources import Resource
from raylight.errors import PromptError

if TYPE_CHECKING:
    from jinja2.sandbox import SandboxedEnvironment


class PromptTemplate(Resource):
    """A prompt with placeholders.

    With the engine `f-string`, `{name}` is a placeholder, with a conversion and a format if wanted (`{name!r:>8}`), and `{{` is a
    brace. With `jinja`, it is a Jinja template in a sandbox; a final newline is kept.
    """

    resource_type: Literal["prompt_template"] = "prompt_template"
    template: str
    engine: Literal["f-string", "jinja"] = "f-string"

    def format(self, /, **values: Any) -> str:
        """Fill the placeholders; values that have none are ignored.

        Raises:
            PromptError: a value is missing, or the template is malformed or reaches for the inside of a value.
        """
        if self.engine == "jinja":
            return _render_jinja(self.template, values)
        missing = sorted(_fields(self.template) - values.keys())
        if missing:
            raise PromptError(_missing(missing, values))
        try:
            return _PlainFormatter().vformat(self.template, (), values)
        except PromptError:
            raise
        except Exception as error:  # a value's own __format__ may raise anything
            raise PromptError(
                f"the prompt template cannot be filled: {type(error).__name__}: {error}"
            ) from error

    def placeholders(self) -> set[str]:
        """Names of the values that the template asks for.

        Raises:
            PromptError: the template is malformed.
        """
        return _jinja_names(self.template) if self.engine == "jinja" else _fields(self.template)


def _missing(names: Sequence[str], given: Mapping[str, Any]) -> str:
    return (
        f"the prompt template needs {', '.join(map(repr, names))}; "
        f"given: {', '.join(map(repr, sorted(given))) or 'nothing'}. Pass it to format(), or take it out of the template"
    )


class _PlainFormatter(string.Formatter):
    """Fills `{name}` and nothing else: an attribute or an index would show the inside of a value."""

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, str]:
        return kwargs[_checked(field_name)], field_name


def _checked(field: str) -> str:
    if not field.isidentifier():
        raise PromptError(
            f"the prompt template has the placeholder {{{field}}}; only a name may stand there, without attribute or index. "
            "Write {{ and }} for braces in the text"
        )
    return field


def _fields(template: str, depth: int = 2) -> set[str]:
    """Names in an f-string template, also those within a format, as in `{value:{width}}`."""
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise PromptError(
            f"the prompt template is malformed: {error}. Write {{{{ and }}}} for braces in the text"
        ) from error
    found = set()
    for _, field, layout, _ in parts:
        if field is not None:
            found.add(_checked(field))
            if layout and depth > 1:
                found |= _fields(layout, depth - 1)
    return found


@functools.cache
def _jinja() -> SandboxedEnvironment:
    from jinja2 import StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    return ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)


def _jinja_names(template: str) -> set[str]:
    from jinja2 import TemplateError, meta

    try:
        return meta.find_undeclared_variables(_jinja().parse(template))
    except TemplateError as error:
        raise PromptError(f"the prompt template is malformed: {error}") from error


def _render_jinja(template: str, values: dict[str, Any]) -> str:
    from jinja2 import UndefinedError

    names = _jinja_names(template)
    try:
        return _jinja().from_string(template).render(values)
    except UndefinedError as error:
        missing = sorted(names - values.keys())
        said = (
            _missing(missing, values)
            if missing
            else f"given: {', '.join(map(repr, sorted(values))) or 'nothing'}"
        )
        raise PromptError(f"the prompt template cannot be filled: {error}; {said}") from error
    except Exception as error:  # the sandbox's refusal, or whatever an expression of the template raises
        raise PromptError(f"the prompt template cannot be filled: {type(error).__name__}: {error}") from error
