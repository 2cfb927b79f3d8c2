"""HTTP pieces that engines and serving share: requests, server-sent events, error bodies."""
