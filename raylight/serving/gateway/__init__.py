"""The outermost layers of a replica: keys, routes, limits, errors, metrics."""
