"""Backups of the state directory: the archive, and its restoration in one step."""
