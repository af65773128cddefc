"""The compilation of each grammar in a process of its own, before the worker compiles it.

`checker` sends the requests, and `check_program` is the process.
"""
