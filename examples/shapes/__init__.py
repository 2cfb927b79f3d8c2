"""Read which of several drawn shapes an image has."""
