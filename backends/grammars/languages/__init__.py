"""Grammars of users in llguidance's dialect of Lark.

`gbnf`, `token_conflicts` and `gbnf_lark` translate GBNF, `user_lark` checks and rewrites Lark, and
`tags_lark` writes structural tags.
"""
