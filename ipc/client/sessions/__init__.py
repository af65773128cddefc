"""Sessions at the client's end: attaching, turns, resuming."""
