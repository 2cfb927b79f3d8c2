"""Dockerfiles: the files, folders and variables that a sandbox without images takes from them."""

from pathlib import Path

import pytest

from raylight.errors import DatasetError
from raylight.harbor.dockerfile import read_build_steps


def write(folder: Path, text: str) -> Path:
    path = folder / "Dockerfile"
    path.write_text(text)
    return path


def test_the_steps_of_a_dockerfile(tmp_path: Path) -> None:
    (tmp_path / "src" / "deep").mkdir(parents=True)
    (tmp_path / "src" / "a.py").write_text("a")
    (tmp_path / "src" / "deep" / "b.py").write_text("b")
    (tmp_path / "one.txt").write_text("1")
    steps = read_build_steps(
        write(
            tmp_path,
            """
FROM ubuntu:24.04
# a comment
ENV HOME_DIR=/data MODE="a b"
ENV OLD style value
WORKDIR $HOME_DIR
WORKDIR app
RUN echo one && \\
    echo two
RUN ["touch", "a b"]
COPY --chown=1:1 src ./
COPY one.txt /etc/one.conf
COPY one.txt sub/
ADD *.txt ${HOME_DIR}/
""",
        )
    )
    assert steps.workdir == "/data/app"
    assert steps.env == {"HOME_DIR": "/data", "MODE": "a b", "OLD": "style value"}
    assert steps.commands == [("/data/app", "echo one && echo two"), ("/data/app", "touch 'a b'")]
    assert [(path.name, target) for path, target in steps.copies] == [
        ("a.py", "/data/app/a.py"),
        ("b.py", "/data/app/deep/b.py"),
        ("one.txt", "/etc/one.conf"),
        ("one.txt", "/data/app/sub/one.txt"),
        ("one.txt", "/data/one.txt"),
    ]


@pytest.mark.parametrize(
    ("value", "expanded"),
    [
        ("${UNSET:-/app}", "/app"),
        ("${EMPTY:-$A}", "1"),
        ("${A:-other}", "1"),
        ("/x${A:+:${A}}", "/x:1"),
        ("/x${UNSET:+:${UNSET}}", "/x"),
        ("$UNSET${B}", "2"),
        ("/opt/bin:$PATH", "/opt/bin:${PATH}"),
    ],
)
def test_references_to_variables(tmp_path: Path, value: str, expanded: str) -> None:
    text = f'ARG UNSET B=2\nENV A=1 EMPTY=\nENV A=3 VALUE="{value}"\n'
    steps = read_build_steps(write(tmp_path, text))
    assert steps.env == {"A": "3", "EMPTY": "", "VALUE": expanded}
    assert steps.args == {"B": "2"}


def test_only_the_last_stage_counts(tmp_path: Path) -> None:
    text = "FROM a AS build\nENV X=1\nWORKDIR /b\nRUN make\nFROM b\nWORKDIR /app"
    steps = read_build_steps(write(tmp_path, text))
    assert (steps.workdir, steps.env, steps.commands) == ("/app", {}, [])


def test_a_stage_has_what_the_stage_before_has_that_it_is_based_on(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    base = "FROM a AS Base\nENV A=1\nWORKDIR /app\nCOPY x .\nRUN make\n"
    rest = "FROM base AS tools\nENV B=2\nFROM --platform=linux/amd64 base\nENV C=$A$B\nRUN test\n"
    steps = read_build_steps(write(tmp_path, base + rest))
    assert (steps.workdir, steps.env) == ("/app", {"A": "1", "C": "1"})
    assert steps.commands == [("/app", "make"), ("/app", "test")]
    assert steps.copies == [(tmp_path / "x", "/app/x")]


def test_the_whole_folder_is_copied_by_a_dot(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    steps = read_build_steps(write(tmp_path, "WORKDIR /app\nCOPY . ."))
    assert [target for _, target in steps.copies] == ["/app/Dockerfile", "/app/x"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("COPY missing /app/", r"line 1: missing is not in"),
        ("COPY ../secret /app/", "leads out of|not in"),
        ("COPY . /app/", "link leads out of"),
        ("COPY --from=build /a /b", "needs an image"),
        ("ADD https://example.org/x /x", "would be downloaded"),
        ("FROM x\nONBUILD RUN x", "line 2: ONBUILD needs an image"),
        ('COPY "a b', "No closing quotation"),
    ],
)
def test_a_step_that_cannot_be_taken_is_an_error(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path.parent / "secret").write_text("")
    (tmp_path / "link").symlink_to(tmp_path.parent / "secret")
    with pytest.raises(DatasetError, match=message):
        read_build_steps(write(tmp_path, text))
