"""Engines of reward models: models with a scalar head, which score conversations."""
