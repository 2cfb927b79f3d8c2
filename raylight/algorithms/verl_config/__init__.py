"""Translation of verl's and agent-lightning's nested configuration into raylight's settings."""
