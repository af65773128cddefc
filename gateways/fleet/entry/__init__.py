"""The entry of a fleet: the daemon's protocol on a Unix socket, served by the nodes."""
