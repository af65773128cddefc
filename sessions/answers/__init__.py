"""Answers of a model: text, reasoning and tool calls."""
