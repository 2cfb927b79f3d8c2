"""From what was recorded to what is learned from."""
