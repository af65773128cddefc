"""The completion scripts of shells: typer's, changed so that bash adds no space after `key=`.

fish adds no space there by itself.
"""

from __future__ import annotations

import contextlib
from typing import Any

_LAST = "    return 0\n"
_NO_SPACE = '    [[ ${#COMPREPLY[@]} -eq 1 && "${COMPREPLY[0]}" == *= ]] && compopt -o nospace\n'


def install_scripts() -> None:
    """Replace typer's scripts by these, except scripts that typer has changed or moved."""
    with contextlib.suppress(ImportError, AttributeError, KeyError):
        from typer import _completion_classes, _completion_shared

        scripts: Any = _completion_shared._completion_scripts
        script = scripts["bash"]
        if _NO_SPACE not in script:
            scripts["bash"] = script.replace(_LAST, _NO_SPACE + _LAST)
            _completion_classes.BashComplete.source_template = scripts["bash"]
