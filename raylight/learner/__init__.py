"""Learner: the ranks that update the policy on verl's engines, and the group that the driver calls."""
