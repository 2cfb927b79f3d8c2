"""Updates of the models of a rank: a policy, its critic, several policies, or learning from examples."""
