"""One conversation with one model."""
