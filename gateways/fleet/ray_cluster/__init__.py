"""Ray: the child processes that use it, the replica that supervises a node, and a router for calls.

Nothing else imports Ray. A process that does is a program of this package, a worker of Ray, or a
user's own, and ends without harm to the entry, the relay and the daemon.
"""
