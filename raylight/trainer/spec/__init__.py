"""Settings of a run, and the inputs that they come from."""
