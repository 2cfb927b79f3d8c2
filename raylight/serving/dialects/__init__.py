"""What agents speak: OpenAI chat completions, completions and responses, and Anthropic messages."""
