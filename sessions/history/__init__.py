"""A session's history: a value, its packed form, retokenization, and reasoning in answers."""
