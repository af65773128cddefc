"""Names of models: Ollama's clients may add the tag `latest` to the daemon's names."""

from __future__ import annotations

_LATEST = ":latest"


def daemon_name(name: str) -> str:
    """Return the daemon's name of a model."""
    return name.removesuffix(_LATEST)
