"""Sessions on disk: the stored values, the SQLite file, and the schedule of writes."""
