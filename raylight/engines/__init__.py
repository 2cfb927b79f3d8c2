"""The engines behind one protocol (`raylight.engines.protocol`): transformers, vLLM, and any
OpenAI-compatible URL."""
