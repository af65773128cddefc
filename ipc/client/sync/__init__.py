"""The synchronous client: the asynchronous one with a driver that blocks."""
