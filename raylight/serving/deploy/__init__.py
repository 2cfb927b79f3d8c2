"""Engines as Ray Serve deployments: replicas, applications, ingress."""
