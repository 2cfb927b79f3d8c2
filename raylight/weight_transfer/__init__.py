"""Transports of weights from learners to engines."""
