"""Serving the policy: engines, the capture of what they sample, and the Ray Serve deployment around them."""
