"""Model class of mini-swe-agent, which calls the rollout's model with the client that it has for OpenRouter.

Its default class imports LiteLLM, which takes four seconds of CPU time in each rollout.
"""

from __future__ import annotations

import os
from typing import Any

from minisweagent.models.openrouter_textbased_model import OpenRouterTextbasedModel


class RolloutModel(OpenRouterTextbasedModel):
    """Chat completions of the model at OPENAI_BASE_URL, with one block of bash as the answer."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._api_url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
        self._api_key = os.environ["OPENAI_API_KEY"]
