"""Grammars of users in llguidance's dialect of Lark.

`gbnf` and `token_conflicts` translate GBNF, `user_lark` checks and rewrites Lark, and
`tags_lark` writes structural tags.
"""
