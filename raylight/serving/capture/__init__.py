"""Capture: recording the calls of attempts, and delivery of the records to the store."""
