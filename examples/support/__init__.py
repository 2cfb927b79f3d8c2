"""Route support tickets, and learn from what customers answer later."""
