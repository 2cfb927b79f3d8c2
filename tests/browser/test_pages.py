"""Every page in a real browser: no error, no text as HTML, every width, every key."""

import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from browser_pages import PATHS, ROLLOUT, Pages
from recorded_run import HOSTILE, LINEAGE, write_metrics

NARROW = 360


@pytest.mark.parametrize("path", PATHS)
def test_a_page_has_no_error_and_fits_a_narrow_screen(pages: Pages, path: str) -> None:
    pages.open(path, PATHS[path])
    assert pages.errors() == []
    pages.driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": NARROW, "height": 800, "deviceScaleFactor": 1, "mobile": True},
    )
    pages.open(path, PATHS[path])
    width = pages.run_script("return document.documentElement.scrollWidth")
    pages.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert width <= NARROW


@pytest.mark.parametrize("path", PATHS)
def test_what_agents_wrote_is_text(pages: Pages, path: str) -> None:
    pages.open(path, PATHS[path])
    assert (
        pages.run_script("return document.querySelectorAll('main img, main script, main iframe').length") == 0
    )
    if path.startswith(ROLLOUT) and "tokens" not in path and "spans" not in path:
        assert HOSTILE in pages.run_script("return document.querySelector('main').textContent")


def test_hidden_characters_are_shown(pages: Pages) -> None:
    pages.open("/")
    shown = pages.driver.execute_async_script(
        "import('/static/js/dom.js').then((dom) => "
        "arguments[0](dom.h('p', {}, dom.recorded('a\\u202eb\\u200b<b>')).textContent))"
    )
    assert shown == "aU+202EbU+200B<b>"
    tags = pages.driver.execute_async_script(
        "import('/static/js/dom.js').then((dom) => "
        "arguments[0](dom.h('p', {}, dom.recorded('a\\u{e0041}\\u3164')).textContent))"
    )
    assert tags == "aU+E0041U+3164"


def test_inline_scripts_are_refused(pages: Pages) -> None:
    pages.open("/")
    pages.run_script(
        "const script = document.createElement('script'); script.textContent = 'window.ran = 1'; "
        "document.body.append(script)"
    )
    assert pages.run_script("return window.ran") is None
    assert any("Content Security Policy" in error for error in pages.errors())


def test_search_filters_and_order(pages: Pages) -> None:
    pages.open("/runs/run/rollouts?q=zebra2", "main tbody tr")
    assert pages.run_script("return document.querySelectorAll('tbody tr').length") == 1
    assert "zebra2" in pages.run_script("return document.querySelector('mark').textContent")
    pages.open("/runs/run/rollouts", "main tbody tr")
    assert pages.run_script("return document.querySelector('tbody tr td:nth-of-type(2)').innerText") in (
        "train",
        "val",
    )
    pages.run_script("document.querySelector('th:nth-of-type(3) a').click()")
    pages.wait_until(
        "location.search.includes('sort=reward') && document.querySelector('[aria-sort=descending]')"
    )
    assert "1" in pages.run_script("return document.querySelector('tbody tr td:nth-of-type(3)').textContent")
    pages.open('/runs/run/rollouts?q="', ".empty")
    assert "is not a query" in pages.text


def test_keys(pages: Pages) -> None:
    pages.open("/runs/run/rollouts?order=asc", "main tbody tr")
    pages.press("j", "j", "\ue007")
    pages.wait_until(f"location.pathname.endsWith('{LINEAGE}-train-0-1')")
    pages.wait_for("a[rel=prev]")
    pages.press("[")
    pages.wait_until(f"location.pathname.endsWith('{LINEAGE}-train-0-0')")
    pages.press("2")
    pages.wait_until("location.search === '?tab=tokens'")
    pages.press("?")
    shown = pages.run_script("return document.querySelector('dialog[open]').innerText")
    assert "evaluations" in shown
    assert "Spans" in shown
    pages.press("\ue00c", "g", "r")
    pages.wait_until("location.pathname === '/' && document.querySelector('main table')")
    pages.press("/", "o", "t", "h")
    pages.wait_until("document.querySelectorAll('tbody tr').length === 1")
    pages.press("\ue003", "\ue003", "\ue003", "\ue00c", "j", "x", "j", "x", "c")
    pages.wait_until("location.pathname === '/compare'")
    before = pages.run_script("return document.documentElement.dataset.theme")
    pages.press("t")
    assert pages.wait_until(f"document.documentElement.dataset.theme !== '{before}'")


@pytest.mark.parametrize(("width", "content"), [(1280, '"g o"'), (NARROW, "none")])
def test_keys_are_written_where_they_are_used(pages: Pages, width: int, content: str) -> None:
    pages.driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width == NARROW},
    )
    pages.open("/runs/run")
    hint = "getComputedStyle(document.querySelector('[data-keys=\"g o\"]'), '::after').content"
    shown = pages.run_script(f"return {hint}")
    pages.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert shown.startswith(content)


def test_runs_are_compared_by_the_settings_that_differ(pages: Pages) -> None:
    pages.open("/compare?runs=run,other", ".u-legend")
    labels = pages.run_script("return document.querySelector('.u-legend').innerText")
    assert "lr 0.1" in labels
    assert "lr 0.2" in labels
    first = pages.run_script("return document.querySelector('main table').innerText")
    assert "validation reward" in first
    marks = pages.run_script("return [...document.querySelectorAll('mark')].map((mark) => mark.innerText)")
    assert "0.2" in marks
    assert "0.1" not in marks


def test_points_of_equal_values_are_told_apart(pages: Pages) -> None:
    """A hundred rollouts with the rewards 0 and 1 cover an area each, with a gap between both."""
    pages.open("/")
    pages.driver.execute_async_script(
        "const done = arguments[0]; import('/static/js/chart.js').then(({ scatter }) => {"
        "const x = Array(100).fill(7), y = x.map((_, i) => i % 2), no = x.map(() => false);"
        "document.querySelector('main').replaceChildren("
        "scatter('rewards', { x, y, isGood: no, isRing: no }, String, () => {})); done(); })"
    )
    pages.wait_until("document.querySelector('canvas').width !== 300")  # that of an undrawn canvas
    rows = pages.run_script(
        "const canvas = document.querySelector('canvas'), { width, height } = canvas;"
        "const pixels = canvas.getContext('2d').getImageData(0, 0, width, height).data;"
        "return Array.from({ length: height }, (_, row) => Array.from({ length: width }, (_, column) => {"
        "const at = 4 * (row * width + column);"
        "return pixels[at] > pixels[at + 1] + 60 && pixels[at + 3] > 100;"
        "}).filter(Boolean).length)"
    )
    bands = "".join("#" if row else " " for row in rows).split()
    assert len(bands) == 2
    assert min(sum(rows[: len(rows) // 2]), sum(rows[len(rows) // 2 :])) > 1000  # of 1,400 without an overlap


def test_tokens_show_what_is_known(pages: Pages) -> None:
    pages.open(f"{ROLLOUT}?tab=tokens", ".token")
    pages.point_at(".token:nth-child(4)")
    pages.wait_until("document.querySelector('.token-facts').innerText.includes('-0.5')")
    assert "1.5" in pages.run_script("return document.querySelector('.token-facts').innerText")
    assert pages.run_script("return document.querySelectorAll('.token.trained').length") == 4


def test_an_address_has_the_place_among_the_tokens(pages: Pages) -> None:
    pages.open(f"{ROLLOUT}?tab=tokens&call=2&by=logprob", ".token-facts dd:nth-of-type(1)")
    pages.wait_until("location.search.includes('token=')")
    focused = "document.activeElement.dataset.position"
    assert pages.wait_until(focused) == "7"  # the first token of the second call
    assert pages.run_script("return document.querySelector('.controls select:nth-of-type(1)').value")
    pages.driver.refresh()
    assert pages.wait_until(focused) == "7"
    assert "by=logprob" in pages.driver.current_url


def test_an_address_has_the_rollouts_of_a_difference(pages: Pages) -> None:
    path = f"/runs/run/groups/{LINEAGE}-train-0/diff/{LINEAGE}-val-1-0?first={LINEAGE}-train-0-1"
    pages.open(path, ".difference")
    assert pages.run_script("return document.querySelector('.bar select').selectedIndex") == 1
    assert "zebra1" in pages.text


def test_failures_have_their_kind_and_their_rollout(pages: Pages) -> None:
    css = "section[aria-label=Failures] td"
    pages.open("/runs/run", css)
    texts = pages.run_script(f"return [...document.querySelectorAll('{css}')].map((cell) => cell.innerText)")
    assert texts == ["agent", "ValueError: no zebra", "1", f"{LINEAGE}-train-1-1"]


def test_a_click_on_a_curve_opens_the_rollouts_of_its_step(pages: Pages) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    pages.open("/runs/run", "main .u-over")
    over = pages.run_script("return document.querySelector('.u-over')")
    ActionChains(pages.driver).move_to_element_with_offset(
        over, over.size["width"] // 2 - 2, 0
    ).click().perform()
    pages.wait_until("location.pathname.endsWith('/rollouts') && location.search.startsWith('?step=')")
    pages.wait_for("main tbody tr")


def test_a_text_is_copied_without_a_secure_context(pages: Pages) -> None:
    pages.open(ROLLOUT, ".message")
    pages.run_script(
        "Object.defineProperty(navigator, 'clipboard', {value: undefined}); "
        "window.copied = []; document.execCommand = () => copied.push(document.activeElement.value)"
    )
    pages.run_script(
        "[...document.querySelectorAll('button')].find((b) => b.textContent === 'copy as curl').click()"
    )
    assert pages.wait_until("window.copied[0]").startswith("curl ")


def test_a_run_is_live(pages: Pages) -> None:
    pages.open("/runs/run", "main .uplot")
    write_metrics(pages.run.folder, [{"step": 3, "train/reward": 0.987, "train/rollouts": 8.0}])
    pages.wait_until("document.querySelector('.plot').getAttribute('aria-label').includes('0.987')")
    assert pages.errors() == []


def test_there_may_be_more_tabs_than_connections(pages: Pages) -> None:
    """Browsers open six connections to a server, and each page of a run in progress keeps one."""
    first = pages.driver.current_window_handle
    for _ in range(8):
        pages.driver.switch_to.new_window("tab")
        pages.open("/runs/run", "main .uplot")
    for handle in pages.driver.window_handles:
        if handle != first:
            pages.driver.switch_to.window(handle)
            pages.driver.close()
    pages.driver.switch_to.window(first)


def test_links_can_be_reloaded_and_gone_back(pages: Pages) -> None:
    pages.open("/", "main table")
    pages.run_script("document.querySelector('a.main[href=\"/runs/run\"]').click()")
    pages.wait_until("document.querySelector('h1').textContent === 'run'")
    pages.driver.refresh()
    pages.wait_until("document.querySelector('h1')?.textContent === 'run'")
    pages.driver.back()
    pages.wait_until("document.querySelector('h1')?.textContent === 'Runs'")


@pytest.mark.parametrize("path", ["/nowhere", "/runs/%", "/runs/none", "/runs/run/rollouts/none", "/compare"])
def test_an_unknown_page_says_so(pages: Pages, path: str) -> None:
    pages.open(path, ".empty")
    assert pages.run_script("return document.querySelector('.empty').textContent.length") > 20


@pytest.fixture(scope="session")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The script of axe-core, which npm packs."""
    folder = tmp_path_factory.mktemp("axe")
    npm = shutil.which("npm")
    packed = npm and subprocess.run([npm, "pack", "axe-core@4"], cwd=folder, capture_output=True, check=False)
    archives = list(Path(folder).glob("*.tgz"))
    if not packed or not archives:
        message = "axe-core cannot be had from npm"
        (pytest.fail if os.environ.get("RAYLIGHT_REQUIRE_BROWSER") else pytest.skip)(message)
    with tarfile.open(archives[0]) as archive:
        script = archive.extractfile("package/axe.min.js")
        return script.read().decode()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("path", PATHS)
def test_accessibility(pages: Pages, axe: str, path: str, theme: str) -> None:
    pages.open("/")
    pages.run_script(f"localStorage.setItem('theme', '{theme}')")
    pages.open(path, PATHS[path])
    pages.driver.execute_script(axe)
    found = pages.driver.execute_async_script("axe.run().then((found) => arguments[0](found.violations))")
    serious = [
        f"{item['id']}: {item['help']}: {json.dumps([node['html'][:150] for node in item['nodes'][:3]])}"
        for item in found
        if item["impact"] in ("serious", "critical")
    ]
    assert serious == []
