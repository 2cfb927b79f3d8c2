"""Execution of rollouts: one attempt (pure), an actor that executes many at once, and the pool of actors."""
