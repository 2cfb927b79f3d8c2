"""Settings that follow from a cluster's hardware, and the memory plan of a run."""
