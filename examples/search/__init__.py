"""Search: questions that a tool answers."""
