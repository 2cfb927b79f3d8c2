"""Experience: finished rollouts to training batches. Nothing in this package imports torch, verl or Ray.

The driver and the learner ranks share it: trajectories and batches, the settings of a policy update, the
registry of advantage estimators and policy losses, the order of the training tasks, and the bookkeeping of
training states.
"""
