"""APO: automatic prompt optimisation by textual gradients and beam search."""
