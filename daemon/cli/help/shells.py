"""What shells run to complete inferd's commands: typer's scripts, but that bash puts no blank
behind `key=`, whose value is still to come. (fish puts none there by itself.)
"""

from __future__ import annotations

import contextlib
from typing import Any

_LAST = "    return 0\n"
_NO_BLANK = '    [[ ${#COMPREPLY[@]} -eq 1 && "${COMPREPLY[0]}" == *= ]] && compopt -o nospace\n'


def use_scripts() -> None:
    """Have typer write and install these scripts. One that it has changed, or keeps in another
    place, is left as it is.
    """
    with contextlib.suppress(ImportError, AttributeError, KeyError):
        from typer import _completion_classes, _completion_shared

        scripts: Any = _completion_shared._completion_scripts
        script = scripts["bash"]
        if _NO_BLANK not in script:
            scripts["bash"] = script.replace(_LAST, _NO_BLANK + _LAST)
            _completion_classes.BashComplete.source_template = scripts["bash"]
