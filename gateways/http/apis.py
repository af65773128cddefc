"""The list of the APIs that the gateway serves."""

from __future__ import annotations

from collections.abc import Sequence

from .exchange import Api
from .ollama import OLLAMA
from .openai import OPENAI

APIS: Sequence[Api] = (OPENAI, OLLAMA)
"""The first one shapes the errors of paths that belong to none."""
