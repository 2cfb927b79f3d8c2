"""Conversations as tokens: multi-turn exactness."""
