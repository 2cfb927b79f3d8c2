"""Server of the Tinker API: clients train LoRA adapters of one model, each with its own loop."""
