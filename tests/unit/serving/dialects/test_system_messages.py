"""System messages later than first, with the real chat templates of TRL's package."""

from typing import Any

import pytest
from template_helpers import make_tokenizer, says, template, user
from trl_templates import read_template

from raylight.serving.dialects.chat_normalizer import ChatNormalizer, SystemMessages


def system(text: Any, role: str = "system") -> dict[str, Any]:
    return {"role": role, "content": text}


CHAT = [system("S1"), user("U1"), says("A1"), system("S2", "developer"), user("U2")]
FOLDED = [system("S1\n\nS2"), user("U1"), says("A1"), user("U2")]


@pytest.mark.parametrize(
    ("name", "folds"),
    [
        ("qwen2_5", False),
        ("qwen3", False),
        ("qwen3_5_think", True),
        ("qwen3_6", True),
        ("gemma3", True),
        ("gptoss", True),
        ("glm4moe", False),
        ("lfm2", False),
        ("llama3_1", False),
        ("nemotron_3_nano", None),
    ],
)
def test_messages_are_folded_where_the_template_refuses_or_omits_them(name: str, folds: bool | None) -> None:
    tokenizer = make_tokenizer(read_template(name))
    placed = SystemMessages(tokenizer).place(CHAT)
    if folds is not None:
        assert placed == (FOLDED if folds else [*CHAT[:3], system("S2"), CHAT[4]])
    text = str(tokenizer.apply_chat_template(placed, tokenize=False))
    assert all(word in text for word in ("S1", "S2", "U1", "A1", "U2"))


def test_messages_in_their_places_are_the_same_list() -> None:
    places = SystemMessages(make_tokenizer(read_template("qwen3_6")))
    for messages in ([], [user("U1")], [system("S1"), user("U1")], None, "no list", [None, 3]):
        assert places.place(messages) is messages
    assert places.place([user("U1"), system("S1")]) == [system("S1"), user("U1")]
    parts = [{"type": "text", "text": "P"}, {"type": "image_url"}]
    assert places.place([system(parts), system(None), user("U1")]) == [system("P"), user("U1")]
    refusing = SystemMessages(make_tokenizer(read_template("gemma")))
    later = [user("U1"), system("S1")]
    assert refusing.place(later) is later, "the engine names the reason"


def test_a_later_message_keeps_the_conversation_before_it() -> None:
    """A message of a developer amid a chat must not change what precedes it."""
    normalizer = ChatNormalizer("", make_tokenizer(template("chatml")))
    first = normalizer.normalize({"messages": CHAT[:2]})["messages"]
    second = normalizer.normalize({"messages": CHAT})["messages"]
    assert second[:2] == first
    assert [message["role"] for message in second] == ["system", "user", "assistant", "system", "user"]
