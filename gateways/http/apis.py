"""The list of the APIs that the gateway serves."""

from __future__ import annotations

from collections.abc import Sequence

from .anthropic import ANTHROPIC
from .exchange import Api
from .inferd_api import INFERD
from .ollama import OLLAMA
from .openai import OPENAI
from .web_page import PAGE

APIS: Sequence[Api] = (PAGE, ANTHROPIC, OLLAMA, INFERD, OPENAI)
"""Longer prefixes of paths come first. The last API shapes the errors of paths that belong to
none.
"""
