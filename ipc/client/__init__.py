"""The client library: `AsyncClient` and its calls."""
