"""A suite that checks an implementation of the protocol from the outside.

It is based only on docs/protocol.md and its vectors. Except the command, nothing here imports
another package of the project, so that a second implementation can be checked by the same rules.
"""
