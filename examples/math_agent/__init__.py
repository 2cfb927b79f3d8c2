"""Agent that solves word problems with a calculator: an MCP server, four client libraries, training with
`VERL`."""
