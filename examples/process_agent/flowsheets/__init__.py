"""A small process simulator: property packages of `thermo`, six unit operations, flowsheets of them, and an HTTP service."""
