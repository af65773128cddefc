"""Copies of sessions on second nodes, from which the sessions go on after the loss of their own."""
