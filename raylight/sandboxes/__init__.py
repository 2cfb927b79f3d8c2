"""Places in which the programs of agents run: local processes, containers, other machines."""
