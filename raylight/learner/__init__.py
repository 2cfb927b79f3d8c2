"""Learning: batches, the verl engine, and the group of LearnerActors."""
