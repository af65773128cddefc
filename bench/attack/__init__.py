"""Attacks of one user on a shared daemon, measured by another user's stream and cheap calls."""
