"""Conversations with images, in earlier turns and in new ones: token-true, and compared by the images."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from conversation_helpers import SCOPE, Conversations, generation
from hypothesis import given, settings
from hypothesis import strategies as st
from image_helpers import make_image
from template_helpers import ADD, call_of, says, user
from tiny_vlms import FAMILIES, build_vlm
from transformers import AutoTokenizer

from raylight.experience.trajectories.trajectory import build_trajectories
from raylight.images.image import Image
from raylight.images.messages import image_url_of, image_urls, recorded_digest, recorded_url
from raylight.images.model_inputs import ModelImages
from raylight.serving.conversations.message_forms import message_forms
from raylight.types import Generation, HistoryNote

RED, BLUE, WIDE = make_image("red"), make_image("blue"), make_image("red", (64, 32))
FILES = {image.sha256: image for image in (RED, BLUE, WIDE)}


def part(image: Image) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": recorded_url(image.sha256)}}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_vlm(request.param, tmp_path_factory.mktemp(request.param))


class Seeing:
    """An engine of a model with images, and an agent that sends all messages again in each turn."""

    def __init__(self, folder: str) -> None:
        images = ModelImages.load(folder)
        assert images is not None
        self.images, self.tokenizer = images, AutoTokenizer.from_pretrained(folder)
        self.reset()

    def reset(self) -> None:
        self.conversations = Conversations(self.tokenizer, images=self.images)
        self.messages: list[dict[str, Any]] = []
        self.calls: list[Generation] = []

    def turn(self, messages: list[dict[str, Any]], answer: str, calls: Any = ()) -> None:
        self.messages = [*self.messages, *messages]
        body = {"messages": self.messages, "tools": [ADD]}
        sent = self.conversations.read(SCOPE, body)
        prompt = self.conversations.prompt(sent, FILES)
        self.note: HistoryNote = prompt.note
        shown = [FILES[recorded_digest(url) or ""] for _, url in image_urls(self.messages)]
        ids = prompt.tokens or self.images.encode(self._render(), shown)[0]
        # another tokenisation than the tokenizer's own: letter by letter
        output = [token for letter in answer for token in self.tokenizer.encode(letter)]
        output += self.tokenizer.encode("<|im_end|>")
        message = says(answer, *calls)
        places = self.images.place(ids, shown)
        call = replace(generation(len(self.calls), ids, output), images=places)
        self.calls.append(call)
        tokens = np.array([*ids, *output], np.int32)
        self.conversations.remember(sent, message, tokens, len(ids))
        self.messages = [*self.messages, message]

    def _render(self) -> str:
        messages = [
            message | {"content": self.images.template_content(message["content"])}
            for message in self.messages
        ]
        for message in messages:
            message["tool_calls"] = [
                {"function": {"name": call["function"]["name"], "arguments": {}}}
                for call in message.get("tool_calls", ())
            ]
        return str(
            self.tokenizer.apply_chat_template(
                messages, tools=[ADD], add_generation_prompt=True, tokenize=False
            )
        )


@pytest.fixture(scope="module")
def seeing(folder: str) -> Seeing:
    return Seeing(folder)


contents = st.lists(
    st.one_of(st.sampled_from([RED, BLUE, WIDE]).map(part), st.sampled_from(["the cat", " sat\n"]).map(text)),
    min_size=1,
    max_size=4,
)


@given(
    turns=st.lists(st.tuples(contents, st.text("the cat", min_size=1, max_size=5)), min_size=2, max_size=5)
)
@settings(max_examples=10, deadline=None)
def test_a_conversation_is_one_row_with_its_images(seeing: Seeing, turns: list[tuple[Any, str]]) -> None:
    seeing.reset()
    for content, answer in turns:
        seeing.turn([user(content)], answer.strip() or "a")
    for before, call in zip(seeing.calls, seeing.calls[1:], strict=False):
        assert call.compared_ids[: len(before.token_ids)].tolist() == before.compared_ids.tolist()
    trajectories = build_trajectories(seeing.calls)
    (row,) = trajectories.rows
    assert row.token_ids.tolist() == seeing.calls[-1].token_ids.tolist()
    assert row.images == seeing.calls[-1].images
    assert seeing.conversations.counts.spliced == len(turns) - 1


def test_an_image_of_a_tool_is_continued(seeing: Seeing) -> None:
    seeing.reset()
    seeing.turn([user("look")], "", [call_of("add", "{}", "c1")])
    result = {"role": "tool", "tool_call_id": "c1", "content": [text("seen"), part(BLUE)]}
    seeing.turn([result], "blue")
    assert (seeing.note.kind, seeing.conversations.counts.spliced) == ("continued", 1)
    assert [place.sha256 for place in seeing.calls[-1].images] == [BLUE.sha256]
    seeing.turn([user([part(WIDE)])], "wide")
    assert [place.sha256 for place in seeing.calls[-1].images] == [BLUE.sha256, WIDE.sha256]
    assert len(build_trajectories(seeing.calls).rows) == 1


def test_another_image_in_an_earlier_turn_is_another_conversation(seeing: Seeing) -> None:
    """Both have the same tokens."""
    seeing.reset()
    seeing.turn([user([text("which?"), part(RED)])], "red")
    seeing.messages = [user([text("which?"), part(BLUE)]), says("red")]
    seeing.turn([user("sure?")], "yes")
    assert seeing.conversations.counts.spliced == 0
    assert seeing.note.reason == "the images of an earlier message were changed"
    assert len(build_trajectories(seeing.calls).rows) == 2


def test_text_that_stands_for_an_image_is_left_to_the_engine(seeing: Seeing) -> None:
    """The engine refuses it: a prompt with more places than images."""
    seeing.reset()
    seeing.turn([user([part(RED)])], "red")
    placeholder = seeing.images._placeholder
    sent = {"messages": [*seeing.messages, user(f"and {placeholder}?")], "tools": [ADD]}
    assert seeing.conversations.splice(SCOPE, sent) is None


def test_an_engine_without_a_conversion_renders_images_itself(seeing: Seeing) -> None:
    conversations = Conversations(seeing.tokenizer)
    first = {"messages": [user([part(RED)])]}
    conversations.store(SCOPE, first, says("red"), [1, 2, 3])
    more = {"messages": [*first["messages"], says("red"), user([part(BLUE)])]}
    assert conversations.prompt(conversations.read(SCOPE, more), FILES).tokens is None


FORMS: dict[str, list[Any]] = {
    "an image": [part(RED)],
    "another": [part(BLUE)],
    "a text": [text(recorded_url(RED.sha256))],
    "an image before a text": [part(RED), text("a")],
    "and behind it": [text("a"), part(RED)],
    "between two": [text("a"), part(RED), text("b")],
    "behind two": [text("a"), text("b"), part(RED)],
    "twice": [part(RED), part(RED)],
    "in another order": [part(RED), part(BLUE)],
    "and back": [part(BLUE), part(RED)],
}


def test_forms_of_messages_with_images_differ() -> None:
    forms = [message_forms([user(content)])[0] for content in FORMS.values()]
    assert len({form.digest for form in forms}) == len(FORMS)
    assert len({form.loose_digest() for form in forms}) == len(FORMS)


def test_white_space_and_details_do_not_count() -> None:
    assert image_url_of(part(RED)) == recorded_url(RED.sha256)
    detailed = {"type": "image_url", "image_url": {"url": recorded_url(RED.sha256), "detail": "low"}}
    forms = [message_forms([user([text(" a "), one])])[0] for one in (part(RED), detailed)]
    forms.append(message_forms([user([text("a"), part(RED)])])[0])
    assert len({form.loose_digest() for form in forms}) == 1
