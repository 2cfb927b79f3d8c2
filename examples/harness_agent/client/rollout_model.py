"""Model class of mini-swe-agent, which calls the rollout's model by plain HTTP.

The default class imports LiteLLM, which takes four seconds of CPU time in each rollout.
"""

from __future__ import annotations

import os
from typing import Any

import requests
from minisweagent.models.openrouter_textbased_model import OpenRouterTextbasedModel

TIMEOUT_S = 600


class RolloutModel(OpenRouterTextbasedModel):
    """Chat completions of the model at OPENAI_BASE_URL, with one block of bash as the answer."""

    def _query(self, messages: list[dict[str, str]], **settings: Any) -> dict[str, Any]:
        name = self.config.model_name.removeprefix("openai/")  # the preset writes it for LiteLLM
        body = {"model": name, "messages": messages, **self.config.model_kwargs, **settings}
        answer = requests.post(
            f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
            json=body,
            headers={"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
            timeout=TIMEOUT_S,
        )
        answer.raise_for_status()
        return answer.json()
