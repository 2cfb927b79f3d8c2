"""The tables of the store's file, and the rules of their changes."""
