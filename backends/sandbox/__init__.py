"""Child processes that run a user's programs, such as templates and grammars, within limits."""
