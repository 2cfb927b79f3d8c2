"""Weight synchronisation: a coordinator issues orders, and every engine replica executes them."""
