"""`inferd top`: the daemon's current activity, on a screen or as plain tables."""
