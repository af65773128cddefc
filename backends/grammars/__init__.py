"""Grammars that answers follow: compiled, checked and matched by llguidance.

`gbnf` and `lark` translate GBNF; `schema` reads JSON schemas, and `refused_keyword` finds the one
that is not supported. `checker` compiles each grammar first in a process of its own, `compiler`
then in the worker; `state` matches an answer's tokens. Nothing here needs llama.cpp.
"""
