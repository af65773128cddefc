"""Models by name: loading, leases, swaps, adapters, persisted settings."""
