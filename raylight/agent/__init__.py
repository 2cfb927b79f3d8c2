"""Tools for writing agents: agent classes, resources, emitters and hooks."""
