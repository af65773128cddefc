"""The attacks by name. Each module has the attacks on one part of the daemon."""

from __future__ import annotations

from bench.attack.attack import Attack

from . import (
    connections,
    descriptors,
    kept_bytes,
    model_loads,
    templates,
    texts,
    validation,
)

_MODULES = (
    connections,
    descriptors,
    kept_bytes,
    model_loads,
    templates,
    texts,
    validation,
)
ATTACKS: dict[str, Attack] = {
    attack.name: attack for module in _MODULES for attack in module.ATTACKS
}
