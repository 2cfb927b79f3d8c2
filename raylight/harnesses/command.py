"""Agent that is a command line: a program of one's own in any language, or a known harness, in a sandbox."""

from __future__ import annotations

import asyncio
import inspect
import os
import posixpath
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic_core import PydanticSerializationError, to_json

from raylight._utils.no_proxy import no_proxy_variables
from raylight.agent.litagent import LitAgent, RolloutResult
from raylight.agent.resources import LLM, NamedResources
from raylight.errors import AgentSignatureError, CommandError
from raylight.harnesses.harbor import describe_harbor_task, is_harbor_task
from raylight.harnesses.model_environment import home_environment, model_environment
from raylight.harnesses.presets import HarnessFacts, get_preset
from raylight.harnesses.program import CommandResult, HarnessProgram
from raylight.harnesses.reward_command import (
    RewardCommand,
    check_command,
    is_reward_file,
    reward_in_file,
    reward_in_output,
)
from raylight.harnesses.task import HarnessTask
from raylight.sandboxes.file_bundle import FileSource, bundle_files, resolve_files
from raylight.sandboxes.registry import SandboxPool, SandboxSpec
from raylight.sandboxes.sandbox import Sandbox
from raylight.types import Rollout

Command = Sequence[str | os.PathLike[str]]
NAME = "CommandAgent"
WORK, HOME = "work", "home"
"""Folders of a sandbox's workspace: for work and for configuration."""


Reward = str | Sequence[str] | RewardCommand | Callable[[Any, CommandResult], Any]


class CommandAgent(LitAgent[Any]):
    """Agent that runs a program once for each rollout: `["python", "agent.py"]`, or `preset="codex"`.

    The program finds the model in environment variables, where OpenAI's and Anthropic's clients look for it:
    OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY and
    ANTHROPIC_MODEL. RAYLIGHT_SAMPLING_PARAMETERS has the model's `sampling_parameters` as JSON;
    RAYLIGHT_ROLLOUT_ID, RAYLIGHT_ATTEMPT_ID and RAYLIGHT_MODE describe the rollout. NO_PROXY has the model's
    host in addition. With `sends_spans`, OpenTelemetry's exporters find the run's endpoint for spans, and its
    key, in OTEL_EXPORTER_OTLP_TRACES_*.

    With `preset`, `sandbox` or `files`, each rollout has a sandbox with a working folder, and a home folder
    for configuration (HOME, XDG_*). Otherwise the program runs in the runner's folder. Its standard input is
    the task as JSON, or what the preset says. Status, seconds and the ends of both outputs are recorded as a
    span.

    A status other than 0 fails the rollout, and the failure shows the end of the standard error. Status 75
    (EX_TEMPFAIL) reports a failed service: the rollout is retried. When a rollout is cancelled or takes too
    long, the program's process group is sent SIGTERM, and SIGKILL after 3 s. Processes that it leaves behind
    are killed.

    Args:
        command: program and arguments, or a function that returns them for a task. `{prompt}`, `{workspace}`,
            `{home}`, `{model}` and `{base_url}` are filled in. Never put a key there: all users of a machine
            can read command lines. None: the preset's.
        preset: name of a known harness, see docs/harnesses.md.
        sandbox: place in which programs run: "process", "podman:IMAGE", or a `SandboxSpec`.
        max_sandboxes: sandboxes at once in each runner process; further rollouts wait in their order, within
            their time limits. None: as many as rollouts.
        files: files of the working folder: a folder that is copied, a dict of paths and contents, or a
            function of the task that returns one. The files in `task["files"]` are written over them.
        prompt: key of the prompt in a task that is not a text itself, or a function of the task.
        reward: origin of the reward. "stdout": the last line of the standard output, a JSON number, an object
            of named rewards (the primary one first), or null for none. "exit_status": 1.0 for status 0, 0.0
            for status 1, with which Python and Node also end after an uncaught exception. A command, as a
            list or a `RewardCommand`: it judges the workspace after the agent's end. A path that ends in
            .json or .txt: a file of the workspace. A function, which may be asynchronous, receives the task
            and a `CommandResult`, and returns what a rollout may return. None: "stdout", but a preset needs
            another, because a harness prints no reward.
        timeout_s: seconds after which the program is ended. The rollout's own limit holds too.
        scores_failures: determine the reward even if the program ended with another status than 0 or was
            ended by `timeout_s`. Otherwise the rollout fails.
        max_context_tokens: context of the model, which a preset passes to its harness.
        max_output_tokens: largest answer, likewise.
        env: further environment variables. None as a value removes a variable. The runner's own variables are
            inherited by programs on its machine, except its Python environment's, such as PYTHONPATH.
        cwd: working folder, in place of the sandbox's own.
        llm: name of the resource with the model. None: `llm`, or the first model.
        sends_spans: give the program the key for spans too. Spans may be rewards, so that everything that
            runs in the program, the model's own code included, can then set rewards.
        trained_agents: as in `LitAgent`.

    Raises:
        AgentSignatureError: an argument has the wrong type. ConfigError: the sandbox is unknown, or
            `max_sandboxes` is not a positive number.
    """

    def __init__(
        self,
        command: Command | Callable[[Any], Command] | None = None,
        *,
        preset: str | None = None,
        sandbox: str | SandboxSpec | None = None,
        max_sandboxes: int | None = None,
        files: FileSource | None = None,
        prompt: str | Callable[[Any], str] = "prompt",
        reward: Reward | None = None,
        timeout_s: float | None = None,
        scores_failures: bool = False,
        max_context_tokens: int | None = None,
        max_output_tokens: int | None = None,
        env: Mapping[str, str | None] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        llm: str | None = None,
        sends_spans: bool = False,
        trained_agents: str | None = None,
    ) -> None:
        super().__init__(trained_agents=trained_agents)
        self._preset_name = preset
        self._preset = None if preset is None else get_preset(preset)
        if command is None and self._preset is None:
            raise AgentSignatureError("CommandAgent needs a command, or preset=NAME of a known harness")
        if command is not None and not callable(command):
            command = check_command(command, NAME)
        self._command = command
        self._sandbox = SandboxSpec.parse("process" if sandbox is None else sandbox)
        self._pool = SandboxPool(max_sandboxes)
        self._isolated = not (preset is None and sandbox is None and files is None)
        self._files, self._prompt = files, prompt
        self._reward = _check_reward("stdout" if reward is None and preset is None else reward)
        self._timeout_s, self._scores_failures = timeout_s, scores_failures
        self._max_tokens = (max_context_tokens, max_output_tokens)
        self._env = dict(env or {})
        self._cwd = None if cwd is None else os.fspath(cwd)
        self._llm = llm
        self._sends_spans = sends_spans

    async def rollout_async(self, task: object, resources: NamedResources, rollout: Rollout) -> RolloutResult:
        llm = self._model(resources).with_attempted_rollout(rollout)
        asked = await self.describe(task)
        async with self._pool.started(asked.sandbox or self._sandbox) as sandbox:
            if asked.prepare is not None:
                asked = await asked.prepare(sandbox)
            if llm.endpoint:
                llm = llm.model_copy(update={"endpoint": await sandbox.forward(llm.endpoint)})
            while True:
                program = await self._configure(sandbox, task, asked, llm, rollout)
                reward = await self._run(program, task, asked)
                following = None if asked.follow is None else await asked.follow(sandbox)
                if following is None:
                    return reward
                asked = following

    async def _run(self, program: HarnessProgram, task: Any, asked: HarnessTask) -> RolloutResult:
        """Run the program, and return the reward of what it left."""
        result = await program.run(asked.timeout_s or self._timeout_s)
        is_exit = self._reward == "exit_status" and asked.score is None and not result.timed_out
        if is_exit and result.status in (0, 1):
            return 1.0 - result.status
        if not self._scores_failures and not (asked.scores_timeouts and result.timed_out):
            program.check(result)
        if asked.score is not None:
            return await asked.score(program.sandbox)
        return await self._score(program, task, result)

    async def describe(self, task: Any) -> HarnessTask:
        """Return what a task asks of the command.

        Raises:
            CommandError: the prompt is not text. DatasetError: a task of `HarborTasks` is damaged.
        """
        if is_harbor_task(task):
            return await describe_harbor_task(task, self._sandbox)
        files = task.get("files") if self._isolated and isinstance(task, Mapping) else None
        return HarnessTask(prompt=self._read_prompt(task), files=files)

    def check(self, resources: Any, modes: Any = (), *, more_may_come: bool = False) -> None:
        super().check(resources, modes, more_may_come=more_may_come)
        if isinstance(resources, Mapping) and not more_may_come:
            self._model(resources)

    @property
    def display_name(self) -> str:
        if self._preset_name is not None:
            return f"CommandAgent {self._preset_name}"
        return "CommandAgent" if callable(self._command) else f"CommandAgent {(self._command or [''])[0]}"

    async def _configure(
        self, sandbox: Sandbox, task: object, asked: HarnessTask, llm: LLM, rollout: Rollout
    ) -> HarnessProgram:
        isolated = self._isolated or asked.sandbox is not None
        cwd, home = asked.cwd or self._cwd, posixpath.join(sandbox.workspace, HOME)
        base, default = (sandbox.workspace, WORK) if isolated else (os.getcwd(), "")
        work = posixpath.join(base, cwd or default)
        facts = HarnessFacts(asked.prompt, work, home, llm.model, llm.endpoint, *self._max_tokens)
        variables = {**asked.image_env, **model_environment(llm, rollout, self._sends_spans)}
        if isolated:
            variables |= home_environment(home)
            configuration = self._preset.configure(facts) if self._preset else None
            made = [home] if cwd else [home, work]
            trees = [(home, configuration), (work, resolve_files(self._files, task)), (work, asked.files)]
            await (await bundle_files(trees, folders=made)).extract(sandbox, "/")
        command = self._command(task) if callable(self._command) else self._command
        parts = check_command(self._preset.command if self._preset and command is None else command, NAME)
        if self._preset is None:
            stdin = _task_json(task)
        else:
            variables |= self._preset.variables(facts)
            stdin = self._preset.input_for(command, facts)
        variables |= {**self._env, **asked.env}
        return HarnessProgram(
            sandbox=sandbox,
            command=[facts.fill(part) for part in parts],
            env=variables | no_proxy_variables([llm.direct_host], {**os.environ, **variables}),
            cwd=work,
            stdin=stdin,
            hidden=tuple(key for key in (llm.api_key, llm.traces_key) if key and key != "unused"),
            install=self._preset.install if self._preset else None,
        )

    async def _score(self, program: HarnessProgram, task: object, result: CommandResult) -> Any:
        """Return the reward from the origin that the agent was given."""
        sandbox, reward = program.sandbox, self._reward
        if reward is None:
            raise AgentSignatureError(
                f"{self.display_name} has no reward; give CommandAgent(reward=...) a function, a command "
                "that judges the workspace, or the path of a reward file"
            )
        if isinstance(reward, RewardCommand):
            return await reward.score(sandbox, program.cwd, task, self._sandbox if self._isolated else None)
        if is_reward_file(reward):
            return await reward_in_file(sandbox, posixpath.join(program.cwd, str(reward)))
        if not callable(reward):
            return (
                float(result.status == 0 and not result.timed_out)
                if reward == "exit_status"
                else reward_in_output(program.command[0], result.stdout)
            )
        if inspect.iscoroutinefunction(reward):
            return await reward(task, result)
        return await asyncio.to_thread(reward, task, result)

    def _read_prompt(self, task: object) -> str | None:
        """Return the prompt of a task, or None if it has none."""
        found: object
        if callable(self._prompt):
            found = self._prompt(task)
        elif isinstance(task, str):
            found = task
        elif isinstance(task, Mapping):
            found = task.get(self._prompt)
        else:
            found = getattr(task, self._prompt, None)
        if isinstance(found, str) or found is None:
            return found
        raise CommandError(
            f"the prompt of the task {task!r:.80} is of type {type(found).__name__}; give a text, or "
            "CommandAgent(prompt=FUNCTION)"
        )

    def _model(self, resources: Mapping[str, object]) -> LLM:
        """Return the resource that the program receives as its model."""
        models = {
            name: resource
            for name, resource in resources.items()
            if isinstance(resource, LLM) and not resource.tokenizer_only
        }
        name = self._llm or ("llm" if "llm" in models else next(iter(models), None))
        if name not in models:
            raise AgentSignatureError(
                f"CommandAgent has no model {name or 'at all'}; the models of this run are "
                f"{', '.join(models) or 'none'}. Pass llm=NAME, or give the Trainer one in initial_resources"
            )
        return models[name]


def _check_reward(reward: object) -> object:
    """Return an origin of rewards; a list becomes a `RewardCommand`."""
    if reward is None or callable(reward) or isinstance(reward, RewardCommand):
        return reward
    if isinstance(reward, str):
        if reward in ("stdout", "exit_status") or is_reward_file(reward):
            return reward
    elif isinstance(reward, Sequence):
        return RewardCommand(reward)
    raise AgentSignatureError(
        f'CommandAgent: reward={reward!r:.80} is unknown; give "stdout", "exit_status", the path of a .json '
        "or .txt file, a command as a list, a RewardCommand, or a function of the task and the result"
    )


def _task_json(task: object) -> bytes:
    try:
        return to_json(task) + b"\n"
    except PydanticSerializationError as error:
        raise CommandError(
            f"the task {task!r:.80} cannot be sent to the agent's command, because it is not JSON ({error}); "
            "use dicts, lists, strings, numbers, dataclasses or pydantic models"
        ) from None
