"""The choice of a node for a new context, as pure functions of the nodes' reports."""
