"""A suite that checks an implementation of the protocol from the outside.

It knows docs/protocol.md and its vectors only: except the command, nothing here imports another
package of the project, so that a second implementation can be checked by the same rules.
"""
