"""Environments of others as agents, and the tools of others for agents."""
