"""Usage by hour: its counts in memory, its table in the journal's file."""
