"""Token-in conversations: a request that continues a conversation is sampled from that conversation's own
tokens."""
