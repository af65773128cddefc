"""The start of a turn: options, adapters, resumption."""
