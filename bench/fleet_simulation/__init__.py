"""A simulation of a fleet of any size, at the level of turns: `python -m bench.fleet_simulation`.

The entry chooses nodes by the real routing function, and nodes plan slots and batches by the
scheduler's real functions, with step costs that a real node has learned.
"""
