"""A turn's answer as the client reads it: pushed, pulled, or whole."""
