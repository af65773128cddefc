"""One conversation, and the manager of all of them."""
