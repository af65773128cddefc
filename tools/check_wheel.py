"""Check of the bare wheel in an empty environment without a compiler.

It builds wheel and sdist, and installs the wheel into a new virtual environment with a PATH without
compilers. There `import inferd` must load neither numpy nor llama_cpp, `inferd --version` must
work, units, manual pages and the web page's files must exist, and `inferd serve` must name the
missing packages. The client must work with a daemon on the echo model, which this tool's own
environment runs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMPILERS = frozenset(("cc", "c++", "gcc", "g++", "clang", "clang++", "cmake", "ninja", "make"))
PAGE = "gateways/http/web_page/files"
START_S_MAX = 30.0
STOP_S_MAX = 15.0
IMPORT_CHECK = """\
import sys, inferd
heavy = {"numpy", "llama_cpp", "jinja2", "prometheus_client"} & set(sys.modules)
assert not heavy, f"import inferd loads {heavy}"
"""


def check(what: str, holds: bool, detail: str = "") -> None:
    """Print the result of one check.

    :raises SystemExit: the check failed.
    """
    print(f"{'ok  ' if holds else 'FAIL'} {what}", flush=True)
    if not holds:
        raise SystemExit(detail)


def build(scratch: Path) -> Path:
    """Build the sdist, and the wheel from it, as distributions do; return the wheel."""
    target, python = scratch / "dist", scratch / "build" / "bin" / "python"
    venv.create(scratch / "build", with_pip=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", "build"], check=True)
    log = subprocess.run(
        [python, "-m", "build", "--outdir", target, ROOT], capture_output=True, text=True
    )
    check("sdist and wheel build", log.returncode == 0, log.stdout + log.stderr)
    (wheel,) = target.glob("inferd-*.whl")
    return wheel


def path_without_compilers(target: Path) -> str:
    """Return a PATH of one folder with links to all programs in PATH except compilers."""
    target.mkdir()
    for folder in map(Path, os.environ["PATH"].split(os.pathsep)):
        for tool in folder.iterdir() if folder.is_dir() else ():
            link = target / tool.name
            if not _is_compiler(tool.name) and not link.is_symlink():
                link.symlink_to(tool)
    return str(target)


def _is_compiler(name: str) -> bool:
    # Also with a prefix or version, such as x86_64-linux-gnu-gcc-12.
    return not COMPILERS.isdisjoint((name, *name.split("-")))


class Bare:
    """The empty environment with the bare wheel."""

    def __init__(self, scratch: Path, wheel: Path, socket: Path):
        self.bin = scratch / "bare" / "bin"
        venv.create(scratch / "bare", with_pip=True)
        self.env = {**os.environ, "PATH": path_without_compilers(scratch / "path")}
        self.env |= {"INFERD_SOCKET": str(socket), "XDG_DATA_HOME": str(scratch)}
        self.env.pop("PYTHONPATH", None)
        self.scratch = scratch
        found = [c for c in COMPILERS if shutil.which(c, path=self.env["PATH"])]
        check("no compiler is in PATH", not found, f"found {found}")
        begin = time.monotonic()
        self.run("python", "-m", "pip", "install", "--quiet", str(wheel), check=True)
        print(f"     the bare wheel is installed in {time.monotonic() - begin:.0f} s")

    def run(self, tool: str, *args: str, check: bool = False) -> subprocess.CompletedProcess[str]:
        """Run a tool of the environment outside of the source tree."""
        return subprocess.run(
            [str(self.bin / tool), *args],
            env=self.env,
            cwd=self.scratch,
            capture_output=True,
            text=True,
            timeout=300,
            check=check,
        )


def files_below(folder: Path) -> set[str]:
    """Return the paths of all files of a folder and its folders."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def check_alone(bare: Bare) -> None:
    """Check the commands that need no daemon, and the errors of the others."""
    imported = bare.run("python", "-c", IMPORT_CHECK)
    check("import inferd loads no engine", imported.returncode == 0, imported.stderr)
    version = bare.run("inferd", "--version")
    check("inferd --version answers", version.returncode == 0, version.stderr)
    units = bare.run("inferd", "install-service", "--apply", "--root", str(bare.scratch / "root"))
    unit = bare.scratch / "root" / "etc" / "systemd" / "system" / "inferd.service"
    check("inferd install-service has the units", unit.is_file(), units.stdout + units.stderr)
    manual = bare.bin.parent / "share" / "man" / "man1" / "inferd-run.1"
    check("the manual pages are beside the command", manual.is_file())
    (page,) = bare.bin.parent.glob(f"lib/python*/site-packages/inferd/{PAGE}")
    missing = files_below(ROOT / PAGE) - files_below(page)
    check("the files of the web page are in the wheel", not missing, f"missing {missing}")
    served = bare.run("inferd", "serve")
    output = served.stdout + served.stderr
    check("inferd serve names the extra daemon", "[daemon]" in output, output)
    check("inferd serve answers with an exit code", served.returncode != 0)


@contextmanager
def daemon(socket: Path, home: Path) -> Iterator[None]:
    """Run a daemon from this tool's environment with the built-in models."""
    command = [str(Path(sys.executable).parent / "inferd"), "serve"]
    env = {**os.environ, "INFERD_SOCKET": str(socket), "XDG_DATA_HOME": str(home)}
    with subprocess.Popen(command, env=env) as process:
        try:
            wait_for(socket, process)
            yield
        finally:
            process.terminate()
            process.wait(STOP_S_MAX)


def wait_for(socket: Path, process: subprocess.Popen[bytes]) -> None:
    """Wait until the daemon's socket exists.

    :raises SystemExit: the daemon ended, or took too long.
    """
    until = time.monotonic() + START_S_MAX
    while not socket.exists():
        if process.poll() is not None or time.monotonic() > until:
            raise SystemExit(f"the daemon did not come up; status {process.poll()}")
        time.sleep(0.05)


def main() -> None:
    """Run all checks."""
    with tempfile.TemporaryDirectory(prefix="inferd-wheel-") as name:
        scratch = Path(name)
        socket = scratch / "inferd.sock"
        bare = Bare(scratch, build(scratch), socket)
        check_alone(bare)
        with daemon(socket, scratch / "data"):
            echo = bare.run("inferd", "run", "echo", "hello")
        answered = echo.returncode == 0 and echo.stdout.strip() == "hello"
        check("inferd run echo hello prints hello", answered, echo.stdout + echo.stderr)


if __name__ == "__main__":
    main()
