"""Connection of the driver to a Ray cluster, and its end."""
