"""One session, and the manager of all sessions."""
