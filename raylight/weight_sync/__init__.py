"""Weight synchronisation: a coordinator issues orders (weights, adapters, sleep, probes), and every replica
executes them."""
