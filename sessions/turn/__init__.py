"""One turn: its options, its task, its output."""
