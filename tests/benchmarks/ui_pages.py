"""Seconds until the pages of `raylight ui` have their content, and memory of its server, for a large run.

    python tests/benchmarks/ui_pages.py [--rollouts 100000] [--tokens 1000000] [--folder DIR] [--browser]

Builds a run's directory with that many rollouts of two calls each, and one rollout with that many tokens, and
serves it. Prints the seconds of each page's first request and the median of ten further ones, the seconds
until the index is complete, and the resident memory of the server before, after, and after each of three
thousand further requests. `--browser` opens the pages in Chromium too, each twice, and prints the seconds to
the first paint and to the content, with the number of elements in the document. `--folder` keeps the
directory, and uses it again. Building 100,000 rollouts takes four minutes.
"""

import asyncio
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import yaml
from harness import make_parser, record_of

sys.path.append(str(Path(__file__).parents[1] / "helpers"))

BATCH = 200
GROUP = 8
STEP_GROUPS = 16
LINEAGE = "bench"
LONG = f"{LINEAGE}-train-0-0"
"""Id of the long rollout."""
REQUESTS = 10


def build(folder: Path, rollouts: int, tokens: int) -> None:
    """Write the directory of a run."""
    folder.mkdir(parents=True, exist_ok=True)
    steps = -(-rollouts // (GROUP * STEP_GROUPS))
    asyncio.run(record(folder / "store.db", rollouts, tokens, steps))
    run = {"name": "bench", "total_steps": steps}
    settings = {"agent": "bench", "algorithm": {"name": "GRPO"}, "run": run}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    rows = [
        {f"learner/metric_{i}": i + step / steps for i in range(60)}
        | {"step": step, "train/reward": step / steps, "weights/version": step, "time/total_s": 10.0 * step}
        for step in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


async def record(file: Path, rollouts: int, tokens: int, steps: int) -> None:
    """Record rollouts, and the steps that took them, in a store."""
    from raylight.store.client import StoreClient
    from raylight.store.service import StoreService
    from raylight.types import EnqueueRolloutRequest, StepGroups

    service = StoreService(file)
    store = StoreClient(service)
    for first in range(0, rollouts, BATCH):
        numbers = range(first, min(first + BATCH, rollouts))
        requests = [
            EnqueueRolloutRequest(
                input={"question": f"What is {number // GROUP} plus {number // GROUP % 97}?"},
                mode="train",
                group_id=f"train-{number // GROUP}",
                rollout_id=f"{LINEAGE}-train-{number // GROUP}-{number % GROUP}",
            )
            for number in numbers
        ]
        await store.enqueue_many_rollouts(requests)
        taken = await store.dequeue_many_rollouts(limit=len(requests), worker_id="runner-0")
        await asyncio.gather(*(execute(store, rollout, tokens) for rollout in taken))
    for step in range(steps):
        groups = tuple(range(step * STEP_GROUPS, (step + 1) * STEP_GROUPS))
        await store.record_step(LINEAGE, step + 1, StepGroups(groups, ()))
    await service.close()


async def execute(store: Any, rollout: Any, tokens: int) -> None:
    """Record two calls and a reward of a rollout; the long one has an answer of many tokens."""
    from raylight.semconv import ANNOTATION, reward_attributes
    from raylight.types import CallKey, Span

    number = int(rollout.rollout_id.rpartition("-")[2])
    ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
    length = tokens // 2 if rollout.rollout_id == LONG else 32
    prompt = list(range(20))
    question = {"role": "user", "content": rollout.input["question"]}
    answer = {"role": "assistant", "content": f"Let me think about it. The answer is {number}." * 4}
    messages = [question]
    for turn in range(2):
        key = CallKey(ids["rollout_id"], ids["attempt_id"], f"{turn:032x}")
        output = [turn + 1] * length
        messages.append(answer)
        call, span = record_of(key, prompt, output, [-0.5] * length, turn, messages)
        await store.capture([(key, float(turn))], [(key, call, span)])
        prompt = [*prompt, *output, 7]
        messages.append({"role": "user", "content": "Are you sure?"})
    reward = Span.from_attributes(
        name=ANNOTATION, attributes=dict(reward_attributes({"primary": number / GROUP})), **ids
    )
    await store.finish_attempt(rollout, "succeeded", spans=[reward])


def show(name: str, url: str) -> None:
    """Print the seconds of a page."""
    first, later = get(url), statistics.median(get(url) for _ in range(REQUESTS))
    print(f"{name:26} first {first:6.3f} s, then {later:6.3f} s")


def get(url: str) -> float:
    """Return the seconds of a request."""
    started = time.perf_counter()
    with urllib.request.urlopen(url, timeout=60) as answer:
        answer.read()
    return time.perf_counter() - started


def show_in_browser(address: str, run: str) -> None:
    """Print the seconds of pages in Chromium, and the number of their elements."""
    from chromium import open_chromium
    from selenium.webdriver.support.ui import WebDriverWait

    rollout = f"runs/{run}/rollouts/{LONG}"
    pages = {
        "runs": "",
        "run": f"runs/{run}",
        "rollouts": f"runs/{run}/rollouts",
        "group": f"runs/{run}/groups/{LINEAGE}-train-1",
        "rollout": f"runs/{run}/rollouts/{LINEAGE}-train-1-0",
        "rollout with many tokens": rollout,
        "its tokens": f"{rollout}?tab=tokens",
    }
    ready = "return !!document.querySelector('main h1') && !document.querySelector('[aria-busy]')"
    paint = "return performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null"
    with tempfile.TemporaryDirectory() as profile:
        driver = open_chromium(Path(profile))
        for name, path in pages.items():
            for visit in ("first", "again"):
                started = time.perf_counter()
                driver.get(address + path)
                WebDriverWait(driver, 60, 0.01).until(lambda page: page.execute_script(ready))
                seconds = time.perf_counter() - started
                painted = WebDriverWait(driver, 60, 0.01).until(lambda page: page.execute_script(paint))
                elements = driver.execute_script("return document.querySelectorAll('*').length")
                print(
                    f"{name:26} {visit} paint {painted / 1e3:6.3f} s, content {seconds:6.3f} s, "
                    f"{elements} elements"
                )
        driver.quit()


def measure(folder: Path, in_browser: bool) -> None:
    """Serve a run and print the seconds of its pages."""
    command = [sys.executable, "-m", "raylight.cli", "ui", str(folder), "--until-closed"]
    started = time.perf_counter()
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    found = re.search(r"http://\S+/", server.stdout.readline())
    assert found, "it printed no address"
    print(f"start: {time.perf_counter() - started:.2f} s")
    run = f"{found[0]}api/runs/{folder.name}"
    process = psutil.Process(server.pid)
    before = process.memory_info().rss
    pages = {
        "run": run,
        "curves": f"{run}/metrics",
        "rollouts": f"{run}/rollouts?limit=100",
        "rollout with many tokens": f"{run}/rollouts/{LONG}",
        "its overview": f"{run}/rollouts/{LONG}/token_summary?bins=512",
        "its tokens": f"{run}/rollouts/{LONG}/tokens?offset=500000&limit=4096",
        "rollout": f"{run}/rollouts/{LINEAGE}-train-1-0",
        "group": f"{run}/groups/{LINEAGE}-train-1",
        "rollouts by reward": f"{run}/rollouts?limit=100&sort=reward&order=desc",
        "points": f"{run}/points?limit=5000",
    }
    for name, url in pages.items():
        show(name, url)
    while True:
        with urllib.request.urlopen(f"{run}/rollouts?limit=1", timeout=60) as answer:
            counts = json.load(answer)
        if counts["indexed"] == counts["known"]:
            break
        time.sleep(0.5)
    print(f"index complete after {time.perf_counter() - started:.1f} s ({counts['indexed']} rollouts)")
    for name, query in {"search for a word": "plus", "search for two": "sure AND 17"}.items():
        url = f"{run}/rollouts?limit=100&q={query.replace(' ', '%20')}"
        show(name, url)
    after = process.memory_info().rss
    if in_browser:
        show_in_browser(found[0], folder.name)
    memory = [before, after]
    for first in range(0, 3000, 1000):
        for number in range(first, first + 1000):
            get(f"{run}/rollouts/{LINEAGE}-train-{number}-{number % GROUP}")
        memory.append(process.memory_info().rss)
    print("memory of the server: " + ", ".join(f"{size / 1e6:.0f} MB" for size in memory))
    server.communicate()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--browser", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary, "run")
        if not (folder / "metrics.jsonl").exists():
            build(folder, options.rollouts, options.tokens)
        measure(folder, options.browser)


if __name__ == "__main__":
    main()
