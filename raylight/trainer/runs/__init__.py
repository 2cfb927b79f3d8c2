"""Kinds of run: from what a user asks for to the summary."""
