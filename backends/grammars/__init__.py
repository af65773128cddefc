"""Grammars that answers follow: compiled, checked and matched by llguidance.

`formats` makes a request of a turn's parameters. `trial` has its grammar compiled
by `trial_program`, a process of its own, with `languages` and `json_schema`, which write
llguidance's form of it. Then `compiler` compiles that form in the worker, and matches the tokens of
an answer. Nothing here needs llama.cpp.
"""
