"""An agent that solves word problems with a calculator: an MCP server, four client libraries, and training by `VERL`."""
