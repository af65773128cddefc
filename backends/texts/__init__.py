"""Regular expressions on growing texts, bytes that are not UTF-8, short forms of values."""
