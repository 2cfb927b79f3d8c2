"""Reports, displays, metric loggers, and the records of a run."""
