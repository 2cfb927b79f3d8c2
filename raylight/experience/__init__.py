"""From recorded rollouts to training batches, without torch."""
