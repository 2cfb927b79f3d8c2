"""Tokens: a rank's rows as tensors, its micro-batches, and the log-probs of their tokens."""
