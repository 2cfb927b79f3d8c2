"""What users write with: agents and the resources they are given."""

from raylight.agent.litagent import LitAgent, rollout
from raylight.agent.resources import LLM, NamedResources

__all__ = ["LLM", "LitAgent", "NamedResources", "rollout"]
