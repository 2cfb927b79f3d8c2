"""What is recorded of an attempt's calls, and how it reaches the store."""
