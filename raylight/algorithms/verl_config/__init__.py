"""verl's and agent-lightning's nested configuration, read as settings of raylight."""
