"""Rollouts as trajectories: which calls and tokens are trained, with which rewards."""
