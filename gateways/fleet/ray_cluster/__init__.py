"""Ray: the child processes that use it, and the replica that supervises a node.

Nothing else imports Ray. A process that does is a program of this package or a worker of Ray, and
ends without harm to the entry, the relay and the daemon.
"""
