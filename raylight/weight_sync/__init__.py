"""The replicas of an engine as one: weights, adapters, sleep and waking reach all of them in one order."""
