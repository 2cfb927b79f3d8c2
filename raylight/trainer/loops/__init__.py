"""Training loops, evaluations and the rollouts that they wait for."""
