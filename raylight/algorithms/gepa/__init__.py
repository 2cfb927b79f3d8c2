"""GEPA, through the package gepa."""
