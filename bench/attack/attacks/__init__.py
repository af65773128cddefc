"""The attacks by name; each module has those on one part of the daemon."""

from __future__ import annotations

from bench.attack.attack import Attack

from . import connections, templates, texts, validation, worker_deaths

ATTACKS: dict[str, Attack] = {
    attack.name: attack
    for module in (connections, templates, texts, validation, worker_deaths)
    for attack in module.ATTACKS
}
