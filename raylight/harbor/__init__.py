"""Tasks in Harbor's format: an instruction, an environment, and tests that write a reward."""
