"""The gateway of a replica: keys, routes, errors and metrics around all other layers."""
