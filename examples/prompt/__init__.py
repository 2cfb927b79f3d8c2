"""Improve an agent's prompt, and then its model, in one store."""
