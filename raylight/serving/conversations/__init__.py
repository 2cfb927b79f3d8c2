"""Token-in conversations: a continued conversation is sampled from its own tokens."""
