"""The options, adapters, start and sentence comparisons of a turn."""
