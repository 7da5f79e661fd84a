"""Server side: what the clients' descriptors say about who should help whom."""
