"""Two agents in one rollout: an assistant with tools, which is trained, and its simulated user, which is not."""
