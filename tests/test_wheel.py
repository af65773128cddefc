"""The wheel that pip builds in a clone that has built one before."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).resolve().parent.parent
NOT_PACKAGED = shutil.ignore_patterns(
    *(".*", "__pycache__", "node_modules", "*.egg-info"),
    *("tests", "tools", "bench", "examples", "clients", "build", "dist"),
)


def test_modules_of_an_earlier_version_do_not_get_into_the_wheel(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    shutil.copytree(ROOT, clone, symlinks=True, ignore=NOT_PACKAGED)
    for folder in ("build/lib/inferd", "build/bdist.linux-x86_64/wheel/inferd"):
        (clone / folder / "deleted").mkdir(parents=True)
        for name in ("deleted/__init__.py", "deleted.py"):
            (clone / folder / name).write_text("")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    command += ["--disable-pip-version-check", "--wheel-dir", str(tmp_path), str(clone)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert built.returncode == 0, built.stdout + built.stderr
    [wheel] = tmp_path.glob("*.whl")
    names = ZipFile(wheel).namelist()
    assert [name for name in names if "deleted" in name] == []
    assert "inferd/daemon/app.py" in names
    page = "gateways/http/web_page/files"
    packed = {name.removeprefix(f"inferd/{page}/") for name in names if page in name}
    assert {str(path.relative_to(ROOT / page)) for path in (ROOT / page).rglob("*.*")} <= packed
    assert any(name.endswith("/licenses/NOTICE") for name in names)
