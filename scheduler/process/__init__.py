"""The worker process and its end of the socket pair."""
