"""The checks of one program. Each prints a line of JSON with its output or its error."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

URL = os.environ["GATEWAY_URL"]
MODEL = os.environ["GATEWAY_MODEL"]
IMAGE_MODEL = os.environ["GATEWAY_IMAGE_MODEL"]
IMAGE = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJg"
    "gg=="
)
"""A PNG file of one pixel, in base64."""
IMAGE_URL = f"data:image/png;base64,{IMAGE}"
KEY = "none"
QUESTION = "What is the capital of France? Answer in one sentence."
TEXT_MAX = 300


def run_checks(*checks: Callable[[], object]) -> None:
    """Run checks, whose docstrings name them; each returns something to show, or raises."""
    for check in checks:
        line = {"check": check.__doc__}
        try:
            line["output"] = str(check())[:TEXT_MAX]
            assert line["output"].strip(), "there is no output"
        except Exception as exc:  # the report has each program's own errors
            line["error"] = f"{type(exc).__name__}: {exc}"[:TEXT_MAX]
        print(json.dumps(line), flush=True)
