"""vLLM behind the `Engine` protocol, on GPUs and CPUs."""
