"""The names of the files in the state directory that a backup has."""

from __future__ import annotations

JOURNAL_FILE = "sessions.db"
"""The journal of sessions with an id."""
STATES_FILE = "states.db"
"""The journal of named states."""
SETTINGS_FILE = "models.json"
"""The persisted runtime settings of models."""
TUNING_FILE = "tuning.json"
"""The settings that were measured on this machine. A backup lacks it: another machine differs."""
KV_DIR = "kv"
"""The folder of KV files."""
JOURNALS = (JOURNAL_FILE, STATES_FILE)
