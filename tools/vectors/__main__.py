"""`python -m tools.vectors` writes docs/protocol-vectors.json."""

from __future__ import annotations

import sys

from .file import PATH, text

PATH.write_text(text())
sys.stdout.write(f"wrote {PATH}\n")
