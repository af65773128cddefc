"""Parts of the event loop's time, and of other bounds, that no user can take from others."""
