"""Dialects: the HTTP APIs that agents call, translated to and from the engine's chat completions."""
