"""Learner: the ranks that update the policy on verl's engines, and the group that the driver calls.

Each room imports only the ones before it: `tokens`, `model`, `losses`, `updates`, `state`, `ranks`.
"""
