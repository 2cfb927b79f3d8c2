"""Tools for writing agents: agent classes, resources, emitters and hooks. `raylight` exports the public
names."""
