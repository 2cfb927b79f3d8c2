"""Small process simulator: `thermo` property packages, six unit operations, flowsheets, an HTTP service."""
