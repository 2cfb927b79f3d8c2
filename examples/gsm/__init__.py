"""GSM: sums in words, with a chain of thought."""
