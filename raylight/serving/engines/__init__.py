"""The engines behind one protocol (`raylight.serving.engine`): transformers, vLLM, and any OpenAI-compatible URL."""
