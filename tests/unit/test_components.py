"""Components given as instance, class, factory, dotted name or dict."""

import sys
from pathlib import Path
from typing import Any

import pytest

from raylight import components
from raylight.base_config import Config
from raylight.components import build_component, import_dotted_name
from raylight.errors import ConfigError


class Tool:
    def __init__(self, size: int = 1, store: str = "none") -> None:
        self.size = size
        self.store = store

    class Inner:
        pass


class Hammer(Tool):
    pass


class Sized(Tool):
    def __init__(self, size: int) -> None:
        super().__init__(size)


class Greedy(Tool):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)


class Typed(Config):
    size: int = 1


def make_tool(size: int = 5) -> Tool:
    return Tool(size)


TOOL = Tool(9)
NUMBER = 3
HERE = __name__


def build(spec: Any, **arguments: Any) -> Tool:
    return build_component(spec, Tool, "tool", **arguments)


def test_an_instance_is_taken_as_it_is() -> None:
    assert build(TOOL, default=Hammer, size=4) is TOOL
    assert TOOL.size == 9


@pytest.mark.parametrize(
    ("spec", "kind", "size"),
    [
        (Hammer, Hammer, 1),
        (make_tool, Tool, 5),
        (lambda: Hammer(7), Hammer, 7),
        (f"{HERE}:Hammer", Hammer, 1),
        (f"{HERE}.Hammer", Hammer, 1),
        (f"{HERE}:make_tool", Tool, 5),
        (f"{HERE}:TOOL", Tool, 9),
        ({"type": f"{HERE}:Hammer", "size": 3}, Hammer, 3),
        ({"type": Hammer, "size": 3}, Hammer, 3),
        ({"type": make_tool, "size": 3}, Tool, 3),
        ({"type": Greedy, "size": 3}, Greedy, 3),
        ({"type": TOOL}, Tool, 9),
    ],
)
def test_every_way_to_give_one(spec: Any, kind: type, size: int) -> None:
    made = build(spec)
    assert type(made) is kind
    assert made.size == size


def test_nothing_gives_the_default() -> None:
    assert type(build(None, default=Hammer)) is Hammer
    assert build(None, default=make_tool).size == 5


def test_defaults_go_where_they_are_taken_and_nothing_else_was_given() -> None:
    assert build(Tool, store="s", unknown=1).store == "s"
    assert build({"type": Tool, "store": "mine"}, store="s").store == "mine"
    assert build(make_tool, store="s").store == "none"
    assert build(Greedy, store="s").store == "none"
    assert build(None, default=Tool, store="s").store == "s"


def test_a_dict_is_not_changed() -> None:
    spec = {"type": Tool, "size": 2}
    build(spec)
    assert spec == {"type": Tool, "size": 2}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (None, "tool is missing; give a Tool, its class or its dotted name"),
        (3, "tool must be a Tool, its class, a dotted name or a dict with a 'type', not 3"),
        (int, "tool must be a Tool, its class, .* not <class 'int'>"),
        (lambda: 3, "tool must be a Tool, but <lambda> returned 3"),
        (lambda: None, "tool must be a Tool, but <lambda> returned None"),
        ("Hammer", "tool='Hammer' is not a dotted name; write 'package.module:Class'"),
        (
            "no_such_package.x:Hammer",
            "tool='no_such_package.x:Hammer': cannot import no_such_package.x: No module named",
        ),
        ("no_such_package:", "is not a dotted name"),
        (f"{HERE}:Hamer", "has no 'Hamer'; it has: Hammer"),
        (f"{HERE}:Tool.Iner", "Tool has no 'Iner'; it has: Inner"),
        (f"{HERE}:NUMBER", "tool must be a Tool, .* not 3"),
        ({}, "tool as a dict needs a 'type', the class or its dotted name; it has: nothing"),
        ({"size": 1}, "needs a 'type', the class or its dotted name; it has: 'size'"),
        ({"type": Tool, "sise": 1}, "tool: Tool takes no 'sise'; it has: size"),
        ({"type": TOOL, "size": 1}, "is an instance and takes no 'size'"),
        (Sized, "tool: Sized needs 'size'; give {'type': ..., 'size': ...}"),
    ],
)
def test_what_cannot_be_built_is_named(spec: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(spec)


@pytest.fixture
def isolated_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    monkeypatch.setattr(components, "CODE_FOLDERS", [])


@pytest.mark.usefixtures("isolated_imports")
def test_a_file_names_a_module_of_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "a folder" / "tools_here"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "sizes.py").write_text("SIZE = 4\n")
    (package / "hammers.py").write_text("from .sizes import SIZE\n\n\nclass Box:\n    size = SIZE\n")
    assert import_dotted_name(f"{package}/hammers.py:Box.size", "tool") == 4
    assert sys.modules["tools_here.hammers"].Box.size == 4
    folders = components.CODE_FOLDERS
    assert folders == [str(tmp_path / "a folder")]
    monkeypatch.chdir(package)
    assert import_dotted_name("hammers.py:Box", "tool").size == 4
    with pytest.raises(ConfigError, match=r"tool='nails.py:Nail': there is no file .*/tools_here/nails\.py"):
        import_dotted_name("nails.py:Nail", "tool")


@pytest.mark.usefixtures("isolated_imports")
def test_a_file_with_the_name_of_an_imported_module_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("SIZE = 4\n")
    with pytest.raises(ConfigError, match=r"another module json is imported already, from .*; rename the"):
        import_dotted_name(f"{tmp_path}/json.py:SIZE", "tool")


def test_a_dict_without_a_type_may_be_of_a_known_kind() -> None:
    made = build({"size": 3}, dict_default=Hammer)
    assert (type(made), made.size) == (Hammer, 3)
    assert type(build({}, dict_default=Hammer)) is Hammer
    assert type(build({"type": Greedy}, dict_default=Hammer)) is Greedy
    with pytest.raises(ConfigError, match="tool: Hammer takes no 'sise'; it has: size"):
        build({"sise": 3}, dict_default=Hammer)


@pytest.mark.parametrize(
    "spec", [Hammer, f"{HERE}:Hammer", {"type": Hammer}, lambda: Hammer(), Hammer(), f"{HERE}:TOOL"]
)
def test_anything_may_be_described(spec: Any) -> None:
    made: Any = build_component(spec, object, "thing")
    assert isinstance(made, Tool)
    assert made is spec or not isinstance(spec, Tool)


def test_of_anything_only_what_describes_something_is_called() -> None:
    class Callable:
        def __call__(self) -> int:
            raise AssertionError

    for made in (Callable(), 3, [1], object()):
        assert build_component(made, object, "thing") is made
    for spec, message in (("x", "thing='x' is not a dotted name"), ({}, "thing as a dict needs a 'type'")):
        with pytest.raises(ConfigError, match=message):
            build_component(spec, object, "thing")


def test_settings_of_pydantic_keep_their_own_messages() -> None:
    with pytest.raises(ConfigError, match=r"Typed.*'sise'.*size"):
        build_component({"type": Typed, "sise": 1}, Typed, "config")
    assert build_component({"type": Typed, "size": 4}, Typed, "config").size == 4


def test_what_a_component_raises_is_left_as_it_is() -> None:
    def broken() -> Tool:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        build(broken)
