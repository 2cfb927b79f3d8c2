"""Training states: their folders, the shards that ranks save and load, and their export."""
