"""Automatic prompt optimisation: textual gradients and beam search."""
