"""Write Python functions that pass hidden tests in a sandbox."""
