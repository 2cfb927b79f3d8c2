"""Two agents in one rollout: a trained assistant with tools, and a simulated user that is not trained."""
