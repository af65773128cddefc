"""Confinement of relative paths to their folder."""

from __future__ import annotations

from pathlib import Path


def check_confined(folder: Path, path: Path) -> None:
    """Check that *path* is below *folder* after its links and `..` are resolved. Of a path that
    does not exist yet, the existing part is resolved.

    :raises ValueError: the path is outside, or cannot be resolved.
    """
    try:
        home, real = folder.resolve(), path.resolve()
        loops = real.is_symlink()  # in later versions of Python, `resolve` raises no error for it
    except (OSError, RuntimeError) as exc:
        raise ValueError(f"{str(path)!r} cannot be resolved: {exc}") from None
    if loops:
        raise ValueError(f"{str(path)!r} cannot be resolved: its links form a loop")
    if not real.is_relative_to(home):
        raise ValueError(
            f"{str(path)!r} leads out of {str(folder)!r}, to {str(real)!r}: write an absolute path"
            " for a file elsewhere"
        )
