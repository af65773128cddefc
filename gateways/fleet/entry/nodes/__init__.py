"""The nodes of a fleet as an entry knows them."""
