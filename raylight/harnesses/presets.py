"""Known harnesses: the command line, variables and configuration files with which each runs unattended.

With these settings a harness calls the rollout's model and nothing else: no login, no check for updates, no
telemetry, no list of models, no question to a user. Programs and their files are described in templates with
`{prompt}`, `{workspace}`, `{home}`, `{model}` and `{base_url}`. docs/harnesses.md has the versions that were
run.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from raylight.errors import AgentSignatureError, CommandError
from raylight.types import JsonObject

PLACEHOLDER = re.compile(r"\{(prompt|workspace|home|model|base_url)\}")


@dataclass(frozen=True)
class HarnessFacts:
    """Facts of a rollout that a harness is configured with."""

    prompt: str | None
    workspace: str
    """Working folder of the agent."""
    home: str
    """Folder of its configuration, one for each rollout."""
    model: str
    base_url: str
    """Base URL for OpenAI's clients."""
    max_context_tokens: int | None = None
    max_output_tokens: int | None = None

    def fill(self, template: str) -> str:
        """Return a text with its placeholders filled in.

        Raises:
            CommandError: it has `{prompt}`, and the task has no prompt.
        """
        return PLACEHOLDER.sub(lambda match: self._value(match[1]), template)

    def required_prompt(self) -> str:
        """Return the prompt.

        Raises:
            CommandError: the task has none.
        """
        if self.prompt is None:
            raise CommandError(
                'the task has no prompt; a task is a text or has the key "prompt", or pass '
                "CommandAgent(prompt=KEY or FUNCTION)"
            )
        return self.prompt

    def _value(self, name: str) -> str:
        return self.required_prompt() if name == "prompt" else str(getattr(self, name))


@dataclass(frozen=True)
class Preset:
    """Settings of a harness.

    Attributes:
        command: program and arguments.
        install: command line that installs it.
        protocol: protocol in which it calls the model.
        stdin: its standard input. A prompt there may be long and begin with any letter.
        env: variables; None removes one.
        configure: function that returns configuration files, by their path in the home folder.
        limits: variables of the largest context and answer, in tokens.
    """

    command: tuple[str, ...]
    install: str
    protocol: str
    stdin: str = "{prompt}"
    env: Mapping[str, str | None] = field(default_factory=dict)
    configure: Callable[[HarnessFacts], dict[str, str]] = lambda facts: {}
    limits: tuple[str, str] | None = None

    def variables(self, facts: HarnessFacts) -> dict[str, str | None]:
        given = (facts.max_context_tokens, facts.max_output_tokens)
        limits = {} if self.limits is None else dict(zip(self.limits, given, strict=True))
        filled = {name: None if text is None else facts.fill(text) for name, text in self.env.items()}
        return {**filled, **{name: str(value) for name, value in limits.items() if value is not None}}

    def input_for(self, command: Sequence[str | os.PathLike[str]] | None, facts: HarnessFacts) -> bytes:
        """Return the standard input: nothing if a command of the user's own has the prompt."""
        in_command = command is not None and any("{prompt}" in os.fspath(part) for part in command)
        return b"" if in_command else facts.fill(self.stdin).encode()


CODEX_FEATURES = (
    "apps",
    "plugins",
    "remote_plugin",
    "multi_agent",
    "goals",
    "image_generation",
    "view_image",
    "tool_suggest",
    "skill_search",
    "shell_snapshot",
    "enable_request_compression",
)
"""Features of Codex that are turned off: those that use other services, and tools that are not functions."""


def _codex(facts: HarnessFacts) -> dict[str, str]:
    """Return the config.toml of Codex. Its tools that providers run, and its subagents, are turned off."""
    top: JsonObject = {
        "model": facts.model,
        "model_provider": "raylight",
        "approval_policy": "never",
        "sandbox_mode": "danger-full-access",  # raylight's sandbox is around it
        "web_search": "disabled",
        "check_for_update_on_startup": False,
    }
    if facts.max_context_tokens is not None:
        top["model_context_window"] = facts.max_context_tokens
    provider = {
        "name": "raylight",
        "base_url": facts.base_url,
        "env_key": "OPENAI_API_KEY",
        "wire_api": "responses",
        "stream_idle_timeout_ms": 600_000,
    }
    tables: dict[str, JsonObject] = {
        "analytics": {"enabled": False},
        "features": dict.fromkeys(CODEX_FEATURES, False),
        "skills.bundled": {"enabled": False},
        "model_providers.raylight": provider,
    }
    lines = [f"{key} = {json.dumps(value)}" for key, value in top.items()]  # JSON's values are TOML's
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    return {".codex/config.toml": "\n".join(lines) + "\n"}


def _opencode(facts: HarnessFacts) -> dict[str, str]:
    """Return the opencode.json of OpenCode, and a lock file that keeps it from installing a package."""
    limits = {"context": facts.max_context_tokens or 131_072, "output": facts.max_output_tokens or 8192}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "raylight",
        "options": {"baseURL": "{env:OPENAI_BASE_URL}", "apiKey": "{env:OPENAI_API_KEY}"},
        "models": {facts.model: {"name": facts.model, "limit": limits}},
    }
    settings = {
        "autoupdate": False,
        "share": "disabled",
        "snapshot": False,
        "permission": "allow",
        "model": f"raylight/{facts.model}",
        "small_model": f"raylight/{facts.model}",
        "enabled_providers": ["raylight"],
        "provider": {"raylight": provider},
    }
    folder = ".config/opencode"
    lock = {"packages": {"": {"dependencies": {"@opencode-ai/plugin": "*"}}}}
    return {
        f"{folder}/opencode.json": json.dumps(settings, indent=1),
        f"{folder}/package-lock.json": json.dumps(lock),
        f"{folder}/node_modules/.keep": "",
    }


def _mini_swe_agent(facts: HarnessFacts) -> dict[str, str]:
    """Return a configuration of mini-swe-agent, which also has the task."""
    arguments = {} if facts.max_output_tokens is None else {"max_tokens": facts.max_output_tokens}
    settings = {
        "run": {"task": facts.required_prompt()},
        "agent": {"mode": "yolo", "confirm_exit": False, "cost_limit": 0},
        "model": {
            "model_name": f"openai/{facts.model}",  # LiteLLM's name of a model behind OPENAI_BASE_URL
            "cost_tracking": "ignore_errors",
            "model_kwargs": arguments,
        },
    }
    return {"mini.yaml": json.dumps(settings, indent=1)}  # JSON is YAML


def _qwen_code(facts: HarnessFacts) -> dict[str, str]:
    """Return the settings.json of Qwen Code."""
    generation: JsonObject = {}
    if facts.max_context_tokens is not None:
        generation["contextWindowSize"] = facts.max_context_tokens
    if facts.max_output_tokens is not None:
        generation["samplingParams"] = {"max_tokens": facts.max_output_tokens}
    settings = {
        "telemetry": {"enabled": False},
        "privacy": {"usageStatisticsEnabled": False},
        "general": {"enableAutoUpdate": False},
        "security": {"auth": {"selectedType": "openai"}},
        "model": {"name": facts.model, "generationConfig": generation},
    }
    return {".qwen/settings.json": json.dumps(settings, indent=1)}


NO_PROXIES: dict[str, str | None] = dict.fromkeys(
    ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")
)
"""Removal of proxies, for a harness that ignores NO_PROXY."""

CLAUDE_TOOLS = "Bash,Edit,Read,Write,Glob,Grep,Agent,Skill"
"""Tools of Claude Code for a workspace. Its others schedule work, search the web or reach other sessions."""

PRESETS: dict[str, Preset] = {
    "codex": Preset(
        command=("codex", "exec", "--skip-git-repo-check", "-"),
        install="npm install -g @openai/codex",
        protocol="OpenAI responses",
        env={"CODEX_HOME": "{home}/.codex"},
        configure=_codex,
    ),
    "opencode": Preset(
        command=("opencode", "run", "--pure", "--title", "rollout"),  # without a title it asks the model
        install="npm install -g opencode-ai",
        protocol="OpenAI chat completions",
        env={
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
            "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
            "OPENCODE_DISABLE_PROJECT_CONFIG": "1",  # it also reads the files of all folders above
        },
        configure=_opencode,
    ),
    "claude-code": Preset(
        command=("claude", "-p", "--dangerously-skip-permissions", "--tools", CLAUDE_TOOLS),
        install="npm install -g @anthropic-ai/claude-code",
        protocol="Anthropic messages",
        env={
            "CLAUDE_CONFIG_DIR": "{home}/.claude",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",  # fields that only Anthropic's servers have
            "ENABLE_TOOL_SEARCH": "false",  # tools whose schemas only Anthropic's servers load
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "DISABLE_AUTOUPDATER": "1",
            "IS_SANDBOX": "1",  # without it, it refuses to skip permissions as root
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": "{model}",
            "ANTHROPIC_DEFAULT_SONNET_MODEL": "{model}",
            "ANTHROPIC_DEFAULT_OPUS_MODEL": "{model}",
            "CLAUDE_CODE_SUBAGENT_MODEL": "{model}",
        },
        limits=("CLAUDE_CODE_MAX_CONTEXT_TOKENS", "CLAUDE_CODE_MAX_OUTPUT_TOKENS"),
    ),
    "mini-swe-agent": Preset(
        command=("mini", "-c", "mini.yaml", "-c", "{home}/mini.yaml", "-o", "{home}/trajectory.json"),
        install="pip install mini-swe-agent mcp",
        protocol="OpenAI chat completions, not streamed",
        stdin="",
        env={
            "MSWEA_CONFIGURED": "true",
            "MSWEA_SILENT_STARTUP": "1",
            "MSWEA_GLOBAL_CONFIG_DIR": "{home}",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "3",  # 10 take 4 minutes, after a spent budget too
        },
        configure=_mini_swe_agent,
    ),
    "qwen-code": Preset(
        command=("qwen", "--yolo", "--auth-type", "openai"),
        install="npm install -g @qwen-code/qwen-code",
        protocol="OpenAI chat completions",
        env={**NO_PROXIES, "QWEN_CODE_SUPPRESS_YOLO_WARNING": "1"},
        configure=_qwen_code,
    ),
}
OTHER_PROTOCOLS = {
    "gemini-cli": "Google's own protocol (generateContent), which the gateway does not serve; Qwen Code, "
    "which was made from it, calls chat completions: preset='qwen-code'",
}
"""Harnesses that cannot be trained, with the reason."""


def get_preset(name: str) -> Preset:
    """Return a preset.

    Raises:
        AgentSignatureError: it is unknown, or the harness calls its model in a protocol that only it has.
    """
    if name in OTHER_PROTOCOLS:
        raise AgentSignatureError(f"CommandAgent(preset={name!r}): {name} speaks {OTHER_PROTOCOLS[name]}")
    if name not in PRESETS:
        raise AgentSignatureError(
            f"CommandAgent(preset={name!r}) is unknown; known are {', '.join(PRESETS)}. Another harness "
            "needs its command: CommandAgent([program, ...])"
        )
    return PRESETS[name]
