"""Images of tools' results that move to the user's next message: none is lost, and errors find them."""

import itertools
import re
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from raylight.images.messages import image_url_of, image_urls
from raylight.serving.dialects.dialect import FieldNames
from raylight.serving.dialects.tool_images import ToolImages
from raylight.types.chat_messages import image_part, text_part

parts = st.one_of(
    st.integers(0, 99).map(lambda number: image_part(f"data:{number}")),
    st.sampled_from(["a", "b"]).map(text_part),
)
contents = st.one_of(st.sampled_from(["", "text"]), st.none(), st.lists(parts, max_size=4))
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool", "tool"]), "content": contents}
    ),
    max_size=8,
)


def at(messages: list[Any], path: str) -> Any:
    """Return the value at a path such as `messages[1].content[0]`."""
    value: Any = {"messages": messages}
    for name, index in re.findall(r"(\w+)|\[(\d+)\]", path):
        value = value[name] if name else value[int(index)]
    return value


@given(messages)
def test_images_keep_their_order_and_their_sources(given: list[Any]) -> None:
    placed, sources = ToolImages(None).place(given)
    if sources is None:
        assert placed is given
        return
    assert sorted(url for _, url in image_urls(placed)) == sorted(url for _, url in image_urls(given))
    assert len(placed) == len(sources)
    for message in placed:
        if message["role"] == "tool":
            assert not any(map(image_url_of, message["content"] or ()))
    names = FieldNames({}).behind(sources)
    for path, url in image_urls(placed):
        if placed[int(re.findall(r"\d+", path)[0])]["role"] == "user":
            assert image_url_of(at(given, names.of(path))) == url


@given(messages)
def test_results_of_one_answer_stay_together(given: list[Any]) -> None:
    placed, sources = ToolImages(None).place(given)
    assert [m["role"] for m in placed if m["role"] == "tool"] == [
        m["role"] for m in given if m["role"] == "tool"
    ]
    for before, after in itertools.pairwise(given):
        if before["role"] == after["role"] == "tool" and sources is not None:
            index = next(i for i, source in enumerate(sources) if at(given, source[""]) is before)
            assert placed[index + 1]["role"] == "tool"
