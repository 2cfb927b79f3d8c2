"""Durable store of rollouts, spans and calls: state machine, SQLite journal, actor and client."""
