"""Cost of a rollout beyond its agent: the same agent in a bare loop, and as rollouts of raylight's runners.

    python tests/benchmarks/rollout_overhead.py [--count 1280] [--runners 2] [--rounds 3]

The agent makes one request with `LLM.client()`. A mock engine in Ray Serve answers at once. 128 agents run at
once in:

- bare: a process with an event loop, against the engine itself;
- captured: the same, through raylight's gateway, each request in a running attempt;
- rollouts: raylight's runners, which take rollouts from the store, trace them and decide them, and whose
  calls are captured.

The three take turns. Prints the milliseconds of time and of CPU time (of all processes of the cluster) for a
rollout, as median and range of the rounds, and the differences. Takes about a minute.
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from typing import Any

from capture import deploy
from harness import cpu_seconds, execute, make_parser, spread, start_attempts, start_store

import raylight as rl

AT_ONCE = 128
SECRET = "secret"


async def solve(llm: rl.LLM) -> float:
    reply = await llm.client().chat.completions.create(
        model=llm.model, messages=[{"role": "user", "content": "hi " * 100}], max_tokens=32
    )
    return float(bool(reply.choices[0].message.content))


@rl.rollout
async def agent(task: int, llm: rl.LLM) -> float:
    return await solve(llm)


class BareLoop:
    """Actor that runs agents at once."""

    async def run(self, models: list[rl.LLM]) -> None:
        left = iter(models)

        async def work() -> None:
            for llm in left:
                await solve(llm)

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))


def start_runners(store: Any, n: int) -> list[Any]:
    """Start runners; return their actors and the endless calls that execute rollouts."""
    import ray

    from raylight.config import RunnerConfig
    from raylight.runner.actor import RunnerActor, RunnerPayload

    payload = RunnerPayload(agent=agent, secret=SECRET).pickle()
    config = RunnerConfig(n=n, max_concurrent=AT_ONCE // n)
    actors = [
        ray.remote(RunnerActor).options(num_cpus=0).remote(f"runner-{i}", store, payload, config)
        for i in range(n)
    ]
    return [(actor, actor.serve.remote()) for actor in actors]


Work = Callable[[], Awaitable[Any]]


def measure(prepare: Callable[[int], Work], count: int) -> tuple[float, float]:
    """Return the milliseconds of time and of CPU time for a rollout."""
    asyncio.run(_wait(prepare(AT_ONCE)))  # opens the connections
    work = prepare(count)
    used, started = cpu_seconds(), time.perf_counter()
    asyncio.run(_wait(work))
    seconds = time.perf_counter() - started
    return seconds / count * 1e3, (cpu_seconds() - used) / count * 1e3


async def _wait(work: Work) -> None:
    await work()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--count", type=int, default=1280)
    parser.add_argument("--runners", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    import ray

    from raylight.agent.attempt_keys import attempt_key, attempt_path

    with tempfile.TemporaryDirectory() as folder:
        ray.init(address="local", log_to_driver=False, logging_level="ERROR")
        try:
            store = start_store("overhead", folder)
            bare_url, captured_url = deploy(store, SECRET, 0.0)
            model = rl.LLM(endpoint=f"{captured_url}/v1", model="m", traced=True)
            asyncio.run(store.add_resources({"llm": model}))
            bare = rl.LLM(endpoint=bare_url, model="m")
            loop = ray.remote(BareLoop).options(num_cpus=0).remote()
            runners = start_runners(store, args.runners)

            def captured(ids: tuple[str, str]) -> rl.LLM:
                key = attempt_key(SECRET, *ids, "train")
                return rl.LLM(endpoint=f"{captured_url}{attempt_path(*ids)}/v1", model="m", api_key=key)

            def run_bare(count: int) -> Work:
                return lambda: loop.run.remote([bare] * count)

            def run_captured(count: int) -> Work:
                models = list(map(captured, asyncio.run(start_attempts(store, count))))
                return lambda: loop.run.remote(models)

            def run_rollouts(count: int) -> Work:
                return lambda: execute(store, range(count))

            modes = {"bare": run_bare, "captured": run_captured, "rollouts": run_rollouts}
            figures: dict[str, list[tuple[float, float]]] = {name: [] for name in modes}
            for _ in range(args.rounds):
                for name, run in modes.items():
                    figures[name].append(measure(run, args.count))
                    wall, cpu = figures[name][-1]
                    print(f"{name:9} {wall:6.2f} ms, {cpu:6.2f} ms of CPU time", flush=True)
            report(figures)
            ray.kill(loop)
            for actor, _ in runners:
                ray.kill(actor)
        finally:
            ray.shutdown()


def report(figures: dict[str, list[tuple[float, float]]]) -> None:
    """Print the medians and ranges, and the differences between the modes."""
    print()
    for place, unit in enumerate(("ms a rollout", "ms of CPU time a rollout")):
        medians = {}
        for name, rounds in figures.items():
            values = [figure[place] for figure in rounds]
            medians[name] = statistics.median(values)
            print(f"{name:9} {spread(values, 2)} {unit}")
        overhead = medians["rollouts"] - medians["bare"]
        capture = medians["captured"] - medians["bare"]
        print(f"overhead  {overhead:6.2f} {unit}, of it capture {capture:.2f}\n")


if __name__ == "__main__":
    main()
