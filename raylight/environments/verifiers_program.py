"""Program that runs one task of verifiers and prints the reward of its trace.

It runs with the Python of another environment, so it imports nothing but the standard library and verifiers.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

SERVICE_ERRORS = ("ProviderError", "InterceptionError", "TunnelError")
"""Errors of a trace that report a service that failed; exit status 75 has the rollout run again."""
EX_TEMPFAIL = 75


async def run(task: Any, settings: dict[str, Any]) -> float:
    """Return the reward of a task; end the program if the trace failed."""
    try:
        import verifiers.v1 as vf
    except ImportError as error:
        sys.exit(
            f"{sys.executable} has no verifiers 0.4 ({error}): pip install verifiers uv in its environment"
        )
    if not isinstance(task, dict) or not isinstance(task.get("idx"), int):
        sys.exit(f'the task {task!r:.80} is no {{"idx": NUMBER}}, the position of a task in the taskset')
    name, harness = settings["taskset"], settings["harness"]
    tasks = vf.load_taskset(vf.taskset_config_type(name)(id=name, **settings["config"]))
    found = next(iter(tasks.include(idx=[task["idx"]])), None)
    if found is None:
        sys.exit(f"the taskset {name} has no task {task['idx']}")
    chosen = json.loads(os.environ.get("RAYLIGHT_SAMPLING_PARAMETERS") or "{}")
    agent = vf.make_agent(
        vf.AgentConfig(
            harness=vf.harness_config_type(harness)(id=harness),
            runtime=vf.SubprocessConfig(),
            model=os.environ["OPENAI_MODEL"],
            client=vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY"),
            sampling=vf.SamplingConfig(**{**settings["sampling"], **chosen}),
            max_turns=settings["max_turns"],
        )
    )
    trace = await agent.run(found)
    if not trace.ok:
        last = trace.errors[-1]
        print(f"{last.type}: {last.message}", file=sys.stderr)
        sys.exit(EX_TEMPFAIL if last.type in SERVICE_ERRORS else 1)
    return trace.reward


if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())
    print(json.dumps(asyncio.run(run(json.load(sys.stdin), json.loads(os.environ["RAYLIGHT_VERIFIERS"])))))
