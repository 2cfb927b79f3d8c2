"""A small engine on plain transformers, for a CPU or one small GPU."""
