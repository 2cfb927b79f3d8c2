"""Batches: rows of an update, their shards for the ranks, and the records of their tokens."""
