"""Programs that people use, run against the HTTP gateway on a real model."""
