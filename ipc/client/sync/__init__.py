"""The synchronous client: wrappers of the asynchronous one."""
