"""The command for an extra fits how inferd was installed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from inferd.backends.library import install_command

PIP = f"{sys.executable} -m pip install "
URL = "https://example.com/inferd"


class Distribution:
    def __init__(self, record: Any):
        self._record = record

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return self._record if isinstance(self._record, str | None) else json.dumps(self._record)


@pytest.mark.parametrize(
    ("record", "argument"),
    [
        (None, "'inferd[top]'"),
        ("{", "'inferd[top]'"),
        ({"url": "file://FOLDER", "dir_info": {}}, "'FOLDER[top]'"),
        ({"url": "file://FOLDER", "dir_info": {"editable": True}}, "-e 'FOLDER[top]'"),
        ({"url": "file:///gone/inferd.whl", "archive_info": {}}, "'inferd[top]'"),
        ({"url": f"{URL}.whl", "archive_info": {}}, f"'inferd[top] @ {URL}.whl'"),
        (
            {"url": URL, "vcs_info": {"vcs": "git", "commit_id": "c0ffee"}},
            f"'inferd[top] @ git+{URL}@c0ffee'",
        ),
    ],
)
def test_an_extra_comes_from_where_inferd_came_from(
    record: Any, argument: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a clone"
    folder.mkdir()
    if isinstance(record, dict):
        record = record | {"url": record["url"].replace("FOLDER", str(folder).replace(" ", "%20"))}
    monkeypatch.setattr(importlib.metadata, "distribution", lambda _: Distribution(record))
    expected = argument.replace("FOLDER", str(folder))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    assert install_command("top") == PIP + expected
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert install_command("top") == f"uv pip install --python {sys.executable} {expected}"
