"""Copies of sessions that are on other daemons, kept for the loss of these."""
