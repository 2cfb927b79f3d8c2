"""Families of tasks for starter models: a function that yields demonstrations, and a line of the registry."""
