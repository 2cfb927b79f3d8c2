"""SQL: questions about a database, as queries."""
