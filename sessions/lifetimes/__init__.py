"""Open, dormant and ended sessions, and the places of open ones."""
