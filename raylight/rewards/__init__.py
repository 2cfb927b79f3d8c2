"""Rewards of groups of rollouts: relative ranking, rubrics, terms, and their sums."""
