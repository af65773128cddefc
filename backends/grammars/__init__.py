"""Grammars that answers follow: compiled, checked and matched by llguidance.

`formats` makes a request of a turn's parameters. The package `trial` compiles its grammar in a
process of its own, with `languages` and `json_schema`, which write llguidance's form of it. Then
`compiler` compiles that form in the worker, and `state` matches an answer's tokens. Nothing here
needs llama.cpp.
"""
