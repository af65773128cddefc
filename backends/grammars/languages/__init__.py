"""Grammars of users in llguidance's dialect of Lark.

`gbnf` and `token_conflicts` translate GBNF; `lark` checks and rewrites users' Lark, and writes
structural tags.
"""
