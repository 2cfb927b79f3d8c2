"""Sets of training tasks: lists, mixtures, curricula, stages and streams."""
