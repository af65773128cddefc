"""Sessions that are on other daemons: moves and copies."""
