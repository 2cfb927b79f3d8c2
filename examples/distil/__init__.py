"""Teach a small model by a larger one, and then by rewards."""
