"""The counters, log events and shared record that the daemon reads."""
