"""Ranks: the Ray actor, the group that the driver calls, and the learners without ranks."""
