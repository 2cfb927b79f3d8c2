"""Executing rollouts: one of them (pure), an actor that runs many, and the pool of actors."""
