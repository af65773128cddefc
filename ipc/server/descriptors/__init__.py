"""Descriptors that clients pass: received, counted by user, used and closed without a wait."""
