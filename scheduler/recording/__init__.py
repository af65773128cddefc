"""Counters, log events and the shared record that the daemon reads."""
