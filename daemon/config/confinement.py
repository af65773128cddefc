"""Files that are named relative to a folder: nothing leads out of it."""

from __future__ import annotations

from pathlib import Path


def check_beneath(folder: Path, path: Path) -> None:
    """Check that *path*, which is written as one below *folder*, lies there, whatever links and
    `..` it has. One that does not exist yet is judged by the part that does.

    :raises ValueError: it lies elsewhere, or nowhere.
    """
    try:
        home, real = folder.resolve(), path.resolve()
    except (OSError, RuntimeError) as exc:
        raise ValueError(f"{str(path)!r} cannot be followed: {exc}") from None
    if real.is_symlink():  # later versions of Python give up without a word
        raise ValueError(f"{str(path)!r} cannot be followed: links in a circle")
    if not real.is_relative_to(home):
        raise ValueError(
            f"{str(path)!r} leads out of {str(folder)!r}, to {str(real)!r}: what lies elsewhere is"
            " named by its whole path"
        )
