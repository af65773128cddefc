"""Draining a node of a fleet: its sessions move to other nodes."""
