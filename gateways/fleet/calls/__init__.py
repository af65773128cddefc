"""The calls of the protocol as an entry handles them: their routes, handles, and merged results.

Everything here is a pure function or a table.
"""
