"""Prompt templates with f-string or Jinja placeholders.

APO lets a model write templates, so rendering must not execute code.
"""

from __future__ import annotations

import functools
import string
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from raylight.agent.resources import LLM, ProxyLLM, Resource
from raylight.errors import PromptError

if TYPE_CHECKING:
    from jinja2.sandbox import SandboxedEnvironment


class PromptTemplate(Resource):
    """A prompt with placeholders.

    With the engine `f-string`, `{name}` is a placeholder, optionally with a conversion and a format
    (`{name!r:>8}`), and `{{` is a literal brace. With `jinja`, the template is a Jinja template, rendered in
    a sandbox; a final newline is kept.
    """

    resource_type: Literal["prompt_template"] = "prompt_template"
    template: str
    engine: Literal["f-string", "jinja"] = "f-string"

    def format(self, /, **values: object) -> str:
        """Fill the placeholders. Values without a placeholder are ignored.

        Raises:
            PromptError: a value is missing, or the template is malformed or accesses attributes or items of a
                value.
        """
        if self.engine == "jinja":
            return _render_jinja(self.template, values)
        missing = sorted(_f_string_names(self.template) - values.keys())
        if missing:
            raise PromptError(_missing(missing, values))
        try:
            return _PlainFormatter().vformat(self.template, (), values)
        except PromptError:
            raise
        except Exception as error:  # a value's own __format__ may raise anything
            raise PromptError(
                f"the prompt template cannot be rendered: {type(error).__name__}: {error}"
            ) from error

    def placeholders(self) -> set[str]:
        """Return the names of the placeholders.

        Raises:
            PromptError: the template is malformed.
        """
        return _jinja_names(self.template) if self.engine == "jinja" else _f_string_names(self.template)


def _missing(names: Sequence[str], values: Mapping[str, object]) -> str:
    return (
        f"the prompt template needs {', '.join(map(repr, names))}, but format() got {_listed(values)}; "
        "pass the missing values, or remove the placeholders"
    )


def _listed(values: Mapping[str, object]) -> str:
    return ", ".join(map(repr, sorted(values))) or "nothing"


ResourceUnion = LLM | ProxyLLM | PromptTemplate
"""The resources that the package has, for annotations."""


class _PlainFormatter(string.Formatter):
    """Formatter for plain `{name}` placeholders; attributes and indices could expose internals of a value."""

    def get_field(
        self, field_name: str, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> tuple[object, str]:
        return kwargs[_check_name(field_name)], field_name


def _check_name(field: str) -> str:
    if not field.isidentifier():
        raise PromptError(
            f"the prompt template has the placeholder {{{field}}}, which is not a plain name. Remove its "
            "attribute or index, or write {{ and }} for braces in the text"
        )
    return field


def _f_string_names(template: str, depth: int = 2) -> set[str]:
    """Return the names in an f-string template, also those within a format, as in `{value:{width}}`."""
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise PromptError(
            f"the prompt template is malformed: {error}. Write {{{{ and }}}} for braces in the text"
        ) from error
    names = set()
    for _, field, layout, _ in parts:
        if field is not None:
            names.add(_check_name(field))
            if layout and depth > 1:
                names |= _f_string_names(layout, depth - 1)
    return names


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


def _render_jinja(template: str, values: dict[str, object]) -> str:
    from jinja2 import UndefinedError

    names = _jinja_names(template)
    try:
        return _jinja().from_string(template).render(values)
    except UndefinedError as error:
        missing = sorted(names - values.keys())
        detail = _missing(missing, values) if missing else f"format() got {_listed(values)}"
        raise PromptError(f"the prompt template cannot be rendered: {error}; {detail}") from error
    except Exception as error:  # raised by the sandbox, or by an expression in the template
        raise PromptError(
            f"the prompt template cannot be rendered: {type(error).__name__}: {error}"
        ) from error
