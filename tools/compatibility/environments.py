"""Environments of the programs. Each is installed from its registry, apart from the others."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ("PROGRAMS", "Program")

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).parent / "programs"
ENVIRONMENTS = ROOT / ".cache" / "compatibility"
INSTALL_S_MAX = 600


@dataclass(frozen=True, slots=True)
class Program:
    """A package with the packages *beside* it. A script of its name in `programs/` checks it."""

    package: str
    beside: tuple[str, ...] = ()
    node: bool = False

    @property
    def title(self) -> str:
        """The name of the program in the table."""
        return f"`{self.package}` (npm)" if self.node else f"`{self.package}`"

    @property
    def name(self) -> str:
        """The name of its script, and of its folder."""
        return self.package.removeprefix("@").replace("/", "-")

    @property
    def folder(self) -> Path:
        """The folder of its environment."""
        return ENVIRONMENTS / f"{self.name}{'-npm' if self.node else ''}"

    @property
    def command(self) -> list[str]:
        """The command that checks the program, once it is installed."""
        if self.node:
            return ["node", str(self.folder / f"{self.name}.mjs")]
        return [str(self.folder / "bin" / "python"), str(SCRIPTS / f"{self.name}.py")]

    def install(self) -> None:
        """Install the latest version.

        :raises subprocess.SubprocessError: the installer fails or takes too long.
        """
        if self.node:
            self.folder.mkdir(parents=True, exist_ok=True)
            for script in SCRIPTS.glob("*.mjs"):  # node looks for packages beside the script
                shutil.copy(script, self.folder)
            self._run("npm", "install", "--no-audit", "--no-fund", "--silent", "--prefix", ".")
        elif not self.folder.exists():
            subprocess.run([sys.executable, "-m", "venv", self.folder], check=True)
        if not self.node:
            pip = str(self.folder / "bin" / "python")
            self._run(pip, "-m", "pip", "install", "-qq", "--upgrade")

    def _run(self, *command: str) -> None:
        words = [*command, self.package, *self.beside]
        subprocess.run(words, cwd=self.folder, check=True, timeout=INSTALL_S_MAX)

    def find_version(self) -> str:
        """Return the installed version."""
        if self.node:
            package = self.folder / "node_modules" / self.package / "package.json"
            return str(json.loads(package.read_text())["version"])
        code = f"import importlib.metadata as m; print(m.version({self.package!r}))"
        words = [self.command[0], "-c", code]
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


PROGRAMS = (
    Program("llm"),
    Program("langchain-openai"),
    Program("openai-agents"),
    Program("langchain-ollama"),
    Program("litellm"),
    Program("instructor"),
    Program("openai", ("zod",), node=True),
    Program("@anthropic-ai/sdk", node=True),
    Program("ollama", node=True),
    Program("ai", ("@ai-sdk/openai", "@ai-sdk/openai-compatible", "zod"), node=True),
)
