"""Chats that ask models to criticise and to rewrite a prompt, in several variants, so that branches differ.

Prompts and transcripts are quoted between tags by concatenation, never by formatting, so braces in them stay
text.
"""

from __future__ import annotations

from raylight.agent.prompts import PromptTemplate
from raylight.algorithms.apo.edits import written_placeholders

CRITIC = (
    "You find out why a prompt for a language model gets low rewards. You are given the prompt, a template "
    "whose placeholders are filled in for each task, and some attempts made with it: the task, the "
    "conversation, and the reward, which is higher for better results. Judge the prompt and not the model: "
    "say which of its wording, its format or its omissions led to the result. Do not write a new prompt."
)
CRITIQUES = (
    "Compare the attempts with low rewards to those with high ones. Name the two or three faults of the "
    "prompt that explain the difference best, each with the words of the prompt or of an attempt that show "
    "it.",
    "Take the attempt with the lowest reward. Explain step by step how this prompt led to that answer, and "
    "what the prompt should have stated instead. Then explain which of this applies to the other attempts.",
    "Read the prompt as somebody who does not know its purpose. List what it leaves open: the form of the "
    "answer, how to work towards it, what to do in doubt, words that are unnecessary or misleading. Keep "
    "only what the attempts show to matter.",
)
"""Variants of the request for a critique (a textual gradient)."""

EDITOR = (
    "You rewrite prompts for a language model. You are given a prompt, a template, and a critique of it. "
    "Answer with the complete new template between <prompt> and </prompt>, and nothing after it."
)
EDITS = (
    "Fix every fault that the critique names, with as few changes as possible. Do not change what it does "
    "not mention.",
    "Write a new prompt from scratch for the same purpose, so that the critique no longer applies. Be "
    "short: every sentence must change what the model does.",
    "Choose the one remark of the critique that matters most, and act on it boldly: another form, another "
    "order, an example, or plainer words. Leave out what is then no longer needed.",
)
"""Variants of the request for a rewrite."""


def critique_messages(template: PromptTemplate, attempts: str, variant: int) -> list[dict[str, str]]:
    """Return the chat that asks for a critique.

    Args:
        attempts: text of `describe_trials`.
        variant: any number, which selects one of `CRITIQUES`.
    """
    return _chat(
        CRITIC,
        f"{_quoted(template)}\n\n<attempts>\n{attempts}\n</attempts>\n\n"
        f"{CRITIQUES[variant % len(CRITIQUES)]}",
    )


def edit_messages(template: PromptTemplate, critique: str, variant: int) -> list[dict[str, str]]:
    """Return the chat that asks for a rewrite.

    Args:
        variant: any number, which selects one of `EDITS`.
    """
    return _chat(
        EDITOR,
        f"{_quoted(template)}\n\n<critique>\n{critique}\n</critique>\n\n"
        f"{EDITS[variant % len(EDITS)]}\n\n{placeholder_rules(template)}",
    )


def _chat(system: str, user: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def _quoted(template: PromptTemplate) -> str:
    return f"<prompt>\n{template.template}\n</prompt>"


def placeholder_rules(template: PromptTemplate) -> str:
    jinja = template.engine == "jinja"
    names = (
        sorted(f"{{{{ {name} }}}}" for name in template.placeholders())
        if jinja
        else sorted(written_placeholders(template.template))
    )
    shown = ", ".join(names)
    syntax = (
        "It is a Jinja template."
        if jinja
        else "Braces mark placeholders: any other brace in the text must be doubled, {{ and }}."
    )
    if not names:
        return f"The template has no placeholders; do not add any. {syntax}"
    return f"Keep these placeholders as they are, each at least once: {shown}. Add no others. {syntax}"
