"""Experience: finished rollouts to training batches. Nothing in this package imports torch, verl or Ray.

The driver and the learner ranks share it. `settings` has the settings of an update, with the advantage
estimators and policy losses; `trajectories` turns the calls of rollouts into rows; `batches` makes batches of
them and shards these for the ranks.
"""
