"""The attacks by name. Each module has the attacks on one part of the daemon."""

from __future__ import annotations

from bench.attack.attack import LOWER, STREAMING, Attack, Target, run_at_once

from . import (
    connections,
    descriptors,
    floods,
    gateway_clients,
    kept_bytes,
    large_requests,
    model_loads,
    places,
    templates,
    texts,
    validation,
)

_MODULES = (
    connections,
    descriptors,
    floods,
    gateway_clients,
    kept_bytes,
    large_requests,
    model_loads,
    places,
    templates,
    texts,
    validation,
)
ATTACKS: dict[str, Attack] = {
    attack.name: attack for module in _MODULES for attack in module.ATTACKS
}


def run_all(target: Target) -> None:
    """Run all attacks of one user at once."""
    mode = "gateway" if target.gateway else "equal"
    attacks = [a for a in ATTACKS.values() if mode in a.modes and a.users == 1 and a is not _ALL]
    run_at_once(target, [attack.program for attack in attacks])


_ALL = Attack("all", "All attacks of one user at once", run_all,
              ("share", "gap", "calls", "places"), STREAMING, LOWER)  # fmt: skip
ATTACKS[_ALL.name] = _ALL
