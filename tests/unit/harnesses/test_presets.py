"""Presets of harnesses: their configuration files, their variables, and a fake program in place of each."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from unit_helpers import make_context, make_rollout, within

from raylight.agent.resources import LLM
from raylight.errors import AgentSignatureError
from raylight.harnesses.command import CommandAgent
from raylight.harnesses.presets import PRESETS, HarnessFacts, get_preset
from raylight.runner.execute import execute
from raylight.runner.outcome import Outcome

POLICY = LLM(endpoint="http://host:8000/v1", model='odd "name"\\', traced=True)
FACTS = HarnessFacts("do it", "/w", "/h", POLICY.model, "http://host/v1", 4096, 512)
FAKE = """#!/bin/sh
echo "argv $0 $*"
echo "stdin $(cat)"
tr '\\0' '\\n' < /proc/$$/environ
cd "$HOME"; find . -type f | sort | while read -r name; do echo "file $name"; done
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake programs, which print what they were given."""
    for preset in PRESETS.values():
        (tmp_path / preset.command[0]).write_text(FAKE)
        (tmp_path / preset.command[0]).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


async def printed(agent: CommandAgent, task: Any) -> tuple[Outcome, str]:
    outputs = [""]
    agent._reward = lambda task, result: outputs.append(result.stdout)
    rollout = make_rollout(task=task, mode="train", timeout=30)
    context = make_context(agent)
    async with within(60):
        with context.tracer.attempt(rollout) as trace:
            outcome = await execute(context, rollout, {"llm": POLICY}, trace)
    return outcome, outputs[-1]


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.usefixtures("programs")
async def test_a_preset_needs_no_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy")
    prompt = "--help me\n'quoted' {workspace}"
    outcome, said = await printed(CommandAgent(preset=name), {"prompt": prompt})
    assert outcome == Outcome("succeeded"), outcome
    preset, lines = PRESETS[name], said.splitlines()
    assert lines[0].split()[1].endswith(preset.command[0])
    assert ("stdin --help me" in said) == bool(preset.stdin)
    assert "{home}" not in said
    variables = dict(line.split("=", 1) for line in lines if "=" in line)
    assert variables["HOME"].endswith("/home")
    assert variables["NO_PROXY"].endswith("host")
    assert ("HTTPS_PROXY" in variables) == (name != "qwen-code")
    assert variables["OPENAI_API_KEY"] == variables["ANTHROPIC_API_KEY"]
    files = {line.removeprefix("file ./") for line in lines if line.startswith("file ")}
    assert files == set(preset.configure(FACTS))


@pytest.mark.usefixtures("programs")
async def test_a_command_with_the_prompt_replaces_the_presets_own() -> None:
    _, said = await printed(CommandAgent(["codex", "exec", "{prompt}"], preset="codex"), "fix it")
    assert "codex exec fix it" in said
    assert "stdin \n" in said


@pytest.mark.usefixtures("programs")
async def test_a_preset_needs_a_prompt_and_a_reward() -> None:
    outcome, _ = await printed(CommandAgent(preset="mini-swe-agent"), {"text": "x"})
    assert "the task has no prompt" in outcome.failure.error
    agent = CommandAgent(preset="codex")
    rollout, context = make_rollout(task="x", mode="train", timeout=30), make_context(agent)
    with context.tracer.attempt(rollout) as trace:
        outcome = await execute(context, rollout, {"llm": POLICY}, trace)
    assert "CommandAgent codex has no reward" in outcome.failure.error


async def test_a_harness_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    for name, package in (("codex", "@openai/codex"), ("qwen-code", "@qwen-code")):
        outcome, _ = await printed(CommandAgent(preset=name), "x")
        assert f"npm install -g {package}" in outcome.failure.error


def test_unknown_presets_and_other_protocols_are_refused() -> None:
    with pytest.raises(AgentSignatureError, match=r"known are codex, opencode, claude-code"):
        CommandAgent(preset="aider")
    with pytest.raises(AgentSignatureError, match="generateContent"):
        CommandAgent(preset="gemini-cli")
    with pytest.raises(AgentSignatureError, match="needs a command"):
        CommandAgent()


# configuration files


def test_the_configuration_of_codex_is_toml() -> None:
    settings = tomllib.loads(get_preset("codex").configure(FACTS)[".codex/config.toml"])
    assert (settings["model"], settings["model_context_window"]) == (POLICY.model, 4096)
    provider = settings["model_providers"][settings["model_provider"]]
    assert (provider["base_url"], provider["env_key"]) == ("http://host/v1", "OPENAI_API_KEY")
    assert settings["skills"]["bundled"] == {"enabled": False}


def test_the_configuration_of_mini_swe_agent_is_yaml_with_the_task() -> None:
    settings = yaml.safe_load(get_preset("mini-swe-agent").configure(FACTS)["mini.yaml"])
    assert settings["run"] == {"task": "do it"}
    assert settings["model"]["model_kwargs"] == {"max_tokens": 512}


def test_limits_of_tokens_reach_the_other_harnesses() -> None:
    opencode = json.loads(get_preset("opencode").configure(FACTS)[".config/opencode/opencode.json"])
    (model,) = opencode["provider"]["raylight"]["models"].values()
    assert model["limit"] == {"context": 4096, "output": 512}
    qwen = json.loads(get_preset("qwen-code").configure(FACTS)[".qwen/settings.json"])
    assert qwen["model"]["generationConfig"]["samplingParams"] == {"max_tokens": 512}
    claude = get_preset("claude-code").variables(FACTS)
    assert claude["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "4096"
    assert claude["ANTHROPIC_DEFAULT_HAIKU_MODEL"] == POLICY.model


def test_no_configuration_holds_a_key() -> None:
    for preset in PRESETS.values():
        assert "rl-" not in "".join(preset.configure(FACTS).values())
