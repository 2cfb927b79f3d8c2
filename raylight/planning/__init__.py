"""Memory of a run, computed from the model's shapes before anything starts."""
