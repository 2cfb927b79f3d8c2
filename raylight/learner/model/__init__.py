"""Models as ranks load them: verl's engines, attention, adapters, vision, optimizers and weights."""
