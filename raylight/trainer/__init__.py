"""The driver: a Trainer brings the components of a run up, runs the loop, and leaves the cluster clean."""
