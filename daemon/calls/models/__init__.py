"""Calls on models: graphs, the operations of operators, and the wait for a model."""
