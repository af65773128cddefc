"""Sessions as the client holds them: attaching, turns, resuming."""
