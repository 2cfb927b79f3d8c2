"""Tracing of agents, and conversion of recorded spans to rewards, messages, triplets and text."""
