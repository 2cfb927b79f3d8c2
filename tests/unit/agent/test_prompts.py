"""Prompt templates: two engines, safe for any template, and errors that name the missing values."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from raylight.agent.prompts import PromptTemplate
from raylight.errors import PromptError

NAMES = st.text(string.ascii_lowercase, min_size=1, max_size=8)


def jinja(template: str) -> PromptTemplate:
    return PromptTemplate(template=template, engine="jinja")


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("Hello {name}", "Hello Ada"),
        ("{name!r:>8}", "   'Ada'"),
        ("{{{name}}}", "{Ada}"),
        ("{name:{width}}|", "Ada  |"),
        ("", ""),
    ],
)
def test_f_strings(template: str, said: str) -> None:
    assert PromptTemplate(template=template, engine="f-string").format(name="Ada", width=5, unused=1) == said


@given(st.dictionaries(NAMES, st.text()), st.text("ab {}'", max_size=20))
def test_values_stand_in_the_text_as_they_are(values: dict[str, str], text: str) -> None:
    escaped = text.replace("{", "{{").replace("}", "}}")
    template = PromptTemplate(template=escaped + "".join(f"<{{{name}}}>" for name in values))
    assert template.format(**values) == text + "".join(f"<{value}>" for value in values.values())
    assert template.placeholders() == set(values)


@pytest.mark.parametrize(
    "template",
    ["{x.__class__}", "{x[0]}", "{0}", "{}", "{x.y[z].__init__.__globals__}", "{a:{x.b}}", '{"a": 1}'],
)
def test_f_strings_reach_no_further_than_a_name(template: str) -> None:
    for call in (
        PromptTemplate(template=template).placeholders,
        lambda: PromptTemplate(template=template).format(x="v", a=1),
    ):
        with pytest.raises(PromptError, match="not a plain name"):
            call()


@pytest.mark.parametrize("template", ["{", "}", "{x", "{x!}", "{x!zz}"])
def test_a_malformed_f_string_says_so(template: str) -> None:
    with pytest.raises(PromptError, match="malformed"):
        PromptTemplate(template=template).format(x=1)


def test_a_value_that_does_not_fit_its_format_says_so() -> None:
    with pytest.raises(PromptError, match="cannot be rendered: ValueError"):
        PromptTemplate(template="{x:d}").format(x="text")


@pytest.mark.parametrize(
    "template", [PromptTemplate(template="{a} {b} {c}"), jinja("{{ a }} {{ b }} {{ c }}")], ids=["f", "jinja"]
)
def test_missing_values_are_named_with_what_was_given(template: PromptTemplate) -> None:
    with pytest.raises(PromptError, match=r"needs 'a', 'c', but format\(\) got 'b', 'z'"):
        template.format(b=1, z=2)
    with pytest.raises(PromptError, match=r"format\(\) got nothing"):
        template.format()


def test_a_placeholder_may_be_called_self() -> None:
    assert PromptTemplate(template="{self}").format(self="me") == "me"


def test_jinja_renders_loops_and_conditions() -> None:
    template = jinja(
        "{% for m in shots %}{{ m.q }}={{ m['a'] }};{% endfor %}"
        "{% if hint is defined %}{{ hint }}{% endif %}\n"
    )
    assert template.format(shots=[{"q": 1, "a": 2}]) == "1=2;\n"
    assert template.placeholders() == {"shots", "hint"}


def test_jinja_does_not_escape() -> None:
    assert jinja("{{ x }}").format(x="<b>&") == "<b>&"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ x.__init__.__globals__ }}",
        "{{ items.append(1) }}",
        "{{ cycler.__init__.__globals__.os }}",
    ],
)
def test_jinja_is_sandboxed(template: str) -> None:
    items: list[int] = []
    with pytest.raises(PromptError, match="cannot be rendered"):
        jinja(template).format(x=object(), items=items)
    assert items == []


def test_a_malformed_jinja_template_says_so() -> None:
    for call in (jinja("{% if %}").format, jinja("{{ x ").placeholders):
        with pytest.raises(PromptError, match="malformed"):
            call()


def test_an_attribute_that_is_not_there_is_named() -> None:
    with pytest.raises(PromptError, match=r"missing.*format\(\) got 'x'"):
        jinja("{{ x.missing.more }}").format(x={})


def test_an_unknown_engine_is_refused_and_a_template_travels_as_json() -> None:
    with pytest.raises(ValidationError):
        PromptTemplate(template="", engine="poml")
    template = jinja("{{ x }}")
    assert PromptTemplate.model_validate_json(template.model_dump_json()) == template
    assert template.resource_type == "prompt_template"
