"""The command `raylight doctor`: facts about the machine and the cluster, and what is missing."""
