"""A turn's answer at the client's end: streamed or whole."""
