"""What users write with: agents, the resources they are given, emitters and hooks. `raylight` offers the names."""
