"""Sessions on disk: the SQLite file, and the schedule of writes."""
