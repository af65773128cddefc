"""Fair shares of users over a fleet: tokens that a node computes count on all other nodes."""
