"""Descriptors that clients pass: received, counted by user, used and closed off the event loop."""
