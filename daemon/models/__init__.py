"""Models by name: loading, leases, swaps, adapters, and what is persisted of them."""
