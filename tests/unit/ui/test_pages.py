"""Pages: each row of `PAGES` has a script, and each address that a script reads has a route."""

import re
from pathlib import Path

import httpx2 as httpx
import pytest
from recorded_run import record_run
from starlette.applications import Starlette
from starlette.routing import Match

from raylight.ui import app as module
from raylight.ui.app import STATIC, build_app
from unit.ui.toy_page import ROW, ToyUi


def pages_without_script(scripts: dict[str, str]) -> set[str]:
    table = scripts["app.js"].partition("const PAGES = [")[2].partition("\n];")[0]
    shown = set(re.findall(r"/, (\w+)", table))
    imported = re.findall(r'^import \{ ([\w, ]+) \} from "\./(\w+\.js)";', scripts["app.js"], re.M)
    found = {
        name
        for names, script in imported
        for name in names.split(", ")
        if re.search(rf"^export (async )?function {name}\(", scripts[script], re.M)
    }
    assert len(shown) >= 9
    return shown - found


def reads_without_route(scripts: dict[str, str], app: Starlette) -> set[str]:
    reads = {read for script in scripts.values() for read in re.findall(r"get\(runPath\(([^)]*)\)", script)}
    assert len(reads) >= 10
    return {read for read in reads if not has_route(app, [part.strip('"') for part in read.split(", ")])}


def has_route(app: Starlette, parts: list[str]) -> bool:
    scope = {"type": "http", "method": "GET", "path": "/api/runs/" + "/".join(parts)}
    found = [route for route in app.routes if route.matches(scope)[0] is Match.FULL]
    return "rest" not in found[0].path  # type: ignore[attr-defined]


async def test_a_page_is_a_script_a_row_a_route_and_a_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = {path.name: path.read_text() for path in (STATIC / "js").glob("*.js")}
    assert (pages_without_script(scripts), reads_without_route(scripts, build_app([tmp_path]))) == (
        set(),
        set(),
    )

    scripts["app.js"] = scripts["app.js"].replace("const PAGES = [", f"const PAGES = [\n  {ROW}")
    assert pages_without_script(scripts) == {"showToy"}
    scripts["toy.js"] = Path(__file__).with_name("toy_page.js").read_text()
    scripts["app.js"] = f'import {{ showToy }} from "./toy.js";\n{scripts["app.js"]}'
    assert pages_without_script(scripts) == set()

    await record_run(tmp_path / "run")
    app = build_app([tmp_path])
    assert reads_without_route(scripts, app) == {'run, "toy"'}
    app.routes.insert(0, module._json_route("/runs/{run}/toy", ToyUi([tmp_path]).toy))
    assert reads_without_route(scripts, app) == set()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        assert (await client.get("/api/runs/run/toy")).json() == {"first": 0.5, "last": 0.75}
