"""Sessions on disk: what is written, when, and how it is read again."""
