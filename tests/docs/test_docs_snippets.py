"""Parsing and running of the Python blocks of a page."""

import traceback
from pathlib import Path

import pytest
from docs_snippets import snippet, snippets, write_files

PAGE = """# Title

```python
a = 1
```

```bash
ls
```

- In a list:

  <!-- run: second -->
  ```python
  def double():
      return 2 * a
  ```

<!-- not run: it needs a GPU -->

```python
1 / 0
```
"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    return path


def test_blocks_with_names_lines_and_reasons(page: Path) -> None:
    found = list(snippets(page))
    assert [(block.name, block.not_run, block.line) for block in found] == [
        ("", "", 4),
        ("second", "", 15),
        ("", "it needs a GPU", 22),
    ]
    assert found[1].code == "def double():\n    return 2 * a\n"


def test_later_blocks_know_the_names_of_earlier_ones(page: Path) -> None:
    first, *_ = snippets(page)
    assert snippet(page, "second").run(first.run())["double"]() == 2


def test_errors_show_the_line_of_the_page(page: Path) -> None:
    *_, last = snippets(page)
    with pytest.raises(ZeroDivisionError) as failed:
        last.run()
    frame = traceback.extract_tb(failed.value.__traceback__)[-1]
    assert (frame.filename, frame.lineno, frame.line) == (str(page), 22, "1 / 0")


def test_files_in_any_language(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- file: a.mjs -->\n```js\nlet a;\n```\n<!-- file: b.py -->\n```python\nb = 1\n```\n")
    assert [(block.file, block.name) for block in snippets(page)] == [("b.py", "")]
    write_files(page, tmp_path)
    assert (tmp_path / "a.mjs").read_text() == "let a;\n"
    assert (tmp_path / "b.py").read_text() == "b = 1\n"


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("# Title\n", "no Python block"),
        ("```python\n1\n", "does not end"),
        ("<!-- not run: -->\n```python\n1\n```\n", "say why"),
        ("<!-- run: x -->\nwords\n```python\n1\n```\n", "right above"),
        ("<!-- run: x -->\n```bash\nls\n```\n", "Python block only"),
        ("```python\n1\n```\n<!-- run: x -->\n", "has none"),
    ],
)
def test_pages_that_are_not_clear(tmp_path: Path, text: str, match: str) -> None:
    path = tmp_path / "page.md"
    path.write_text(text)
    with pytest.raises(ValueError, match=match):
        list(snippets(path))


def test_no_such_name(page: Path) -> None:
    with pytest.raises(ValueError, match="0 blocks named 'third'"):
        snippet(page, "third")
