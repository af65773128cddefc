"""Copies of sessions on second nodes, from which sessions continue when their own node is lost."""
