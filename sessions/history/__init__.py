"""The tokens of a conversation: a value, its packed form, other vocabularies, full contexts."""
