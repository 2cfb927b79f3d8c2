"""Engines behind one protocol: transformers, vLLM, any OpenAI-compatible URL, and engines of the user."""
