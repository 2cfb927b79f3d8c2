"""Agents that are commands: coding harnesses and other programs, each with what it needs to be trained."""
