"""Calls between daemons: sessions that move, copies of sessions, and files of models."""
