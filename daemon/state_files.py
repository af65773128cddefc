"""The names of the files in the state directory that a backup has; writing of small ones."""

from __future__ import annotations

import os
from pathlib import Path

JOURNAL_FILE = "sessions.db"
"""The journal of sessions with an id."""
STATES_FILE = "states.db"
"""The journal of named states."""
SETTINGS_FILE = "models.json"
"""The persisted runtime settings of models."""
TUNING_FILE = "tuning.json"
"""The settings that were measured on this machine. A backup lacks it: another machine differs."""
DRAFTS_FILE = "drafts.json"
"""The gains of models by drafts in the last days, which a backup lacks, too."""
MEDIA_DIR = "media"
"""The folder of the images and sounds of sessions."""
JOBS_DIR = "jobs"
"""The folder of jobs and their files."""
KV_DIR = "kv"
"""The folder of KV files."""
JOURNALS = (JOURNAL_FILE, STATES_FILE)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file completely or not at all; only the user may read it. It is not synced.

    :raises OSError: it cannot be written.
    """
    new = path.with_suffix(".new")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        os.fchmod(file.fileno(), 0o600)  # a process that was killed may have left it
        file.write(content)
    new.replace(path)
