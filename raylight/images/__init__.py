"""Images that agents send: their files, checked and kept under their digests."""
