"""`Client`: synchronous wrappers around the asynchronous client."""
