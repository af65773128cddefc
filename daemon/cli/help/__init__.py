"""Help texts, manual pages, completion and versions."""
