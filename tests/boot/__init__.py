"""The service as it ships, under a systemd that is the first process of a machine of its own."""
