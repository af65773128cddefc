"""Grammars that answers follow: compiled, checked and matched by llguidance.

`formats` makes a request of a turn's parameters. `gbnf`, `token_conflicts` and `lark` translate
GBNF; `user_lark` checks Lark, `tags_lark` writes structural tags as Lark; `schema` reads JSON
schemas, and `refused_keyword` finds the one that is not supported. `checker` compiles each grammar
first in a process of its own, `check_program`, and `compiler` then in the worker; `state` matches
an answer's tokens. Nothing here needs llama.cpp.
"""
