"""Benchmarks of models by name: their rows, the agent that answers a row, and the scores of answers."""
