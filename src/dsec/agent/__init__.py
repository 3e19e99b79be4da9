"""Host side of the in-sandbox agent: one channel, its streams, and a typed method for every operation."""
