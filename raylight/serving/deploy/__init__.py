"""The engines on Ray Serve: replicas, applications, ingress."""
