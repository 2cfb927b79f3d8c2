"""Two agents in one rollout: an assistant with tools, which is trained, and the user that it serves, which is not."""
