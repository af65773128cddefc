"""Check of prose and names against the project's language rules, as far as patterns can tell.

`python tools/check_prose.py [PATH…]` reads the files named, or else those in `CHECKED`, prints one
line for each finding and exits with 1 if there are any. It reads docstrings, comments, messages and
names of Python files, and the text of Markdown files outside code blocks.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

CHECKED = (
    *("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "README.md", "docs"),
    "clients/typescript/README.md",
    *("backends", "cli", "daemon", "gateways", "ipc", "scheduler", "sessions", "src", "wire"),
    *("bench", "examples", "tools"),
    *("tests/backends", "tests/bench", "tests/boot", "tests/examples", "tests/faults", "tests/ipc"),
    *("tests/clients", "tests/gateways"),
    *("tests/docs", "tests/scheduler", "tests/sessions", "tests/wire", "tests/daemon/access"),
    *("tests/daemon/calls", "tests/cli"),
    *("tests/daemon/config", "tests/daemon/doctor", "tests/daemon/logs", "tests/daemon/metrics"),
    *("tests/daemon/models", "tests/daemon/pull", "tests/daemon/residency", "tests/daemon/service"),
    *("tests/daemon/traces", "tests/daemon/workers", "tests/daemon/command_line.py"),
    *("tests/daemon/conftest.py", "tests/daemon/log_events.py", "tests/daemon/manager.py"),
    *("tests/daemon/other_users.py", "tests/daemon/systemd_tools.py"),
    *("tests/daemon/test_real_models.py", "tests/conftest.py", "tests/echo.py"),
    *("tests/machine_speed.py", "tests/models.py", "tests/raw.py", "tests/sparse_gguf.py"),
    "tests/tiny_gguf.py",
    "tests/tiny_projector.py",
    *("tests/tiny_lora.py", "tests/typing_client.py"),
)
"""Files and folders whose text follows the rules. A package is added when it is finished."""

SKIPPED = (
    "tests/backends/llama/test_embedding_context.py",  # it quotes a novel
    "tools/check_prose.py",  # it names the patterns
    "tests/docs/test_prose_check.py",  # it quotes text that breaks them
)

PHRASES = {
    r"^(Tell|Tells|Hear|Hears|Ask|Asks|Reckon|Reckons)\b": "open with a standard verb",
    r"(?:^|[.:;] )(?:Who|Whoever|Whom|Whose|What|Whatever|That which|Which)\b(?![^.]*\?)": (
        "name the thing instead of a headless 'who' or 'what'"
    ),
    r"(?<![Tt]here )\b(?:is|are|was|were) no\b(?! longer\b| more\b)": "write 'is not a …'",
    r"\bbut for\b": "write 'except'",
    r"\bso many as\b|\bas many as it takes\b": "write 'more than needed' or the number",
    r"\bthe one before\b|\bthe ones before\b": "write 'previous'",
    r"\banother one than\b|\bother than he\b": "write 'another'",
    r"\b(?:he|him|his|himself)\b": "a person is 'they', a program is 'it'",
    r"\bwhoever\b": "write 'any client', 'the caller' or 'any user'",
    r"\bany more\b": "write 'no longer'",
    r"\breckon\w*\b": "write 'estimate'",
    r"\bturnstile\b": "write 'residency gate'",
    r"\bthrift\w*\b": "write 'low-memory mode'",
    r"\bheirs?\b": "write 'successor'",
    r"\bretell\w*\b": "write 'retokenize' or 'migrate'",
}
"""By pattern within one sentence, the advice on what to write instead."""

RETIRED = re.compile(
    "turnstile|reckon(ed|ing|ings|s)?|thrifty?|heir|formers?|poison(ed)?|twins?|retell(ing)?"
    "|likel(y|iest)|tally|tells?|told|hears?|desk|gone|whoever|surprise|drawn|crowded"
)
"""Words that no name may contain."""


@dataclass(frozen=True)
class Finding:
    """One place that breaks a rule."""

    path: str
    line: int
    text: str
    advice: str


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of *text*, with code in backquotes and white space folded."""
    folded = " ".join(re.sub(r"``.*?``|`[^`]*`", "`x`", text, flags=re.DOTALL).split())
    yield from re.split(r"(?<=[.!?]) (?=[A-Z`*])", folded)


def prose_findings(path: str, line: int, text: str) -> Iterator[Finding]:
    """Yield the phrases in *text* that the rules replace."""
    for sentence in sentences(text):
        for pattern, advice in PHRASES.items():
            if re.search(pattern, sentence):
                yield Finding(path, line, sentence, advice)


def words_of(name: str) -> list[str]:
    """Return the words of an identifier in lower case."""
    return [w.lower() for w in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)]


def name_findings(path: str, nodes: Sequence[ast.AST]) -> Iterator[Finding]:
    """Yield the names that *nodes* define with a retired word."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.id if isinstance(node, ast.Name) else node.attr
        else:
            continue
        if any(map(RETIRED.fullmatch, words_of(name))):
            yield Finding(path, node.lineno, name, "retired word in a name")


def python_findings(path: str, source: str) -> Iterator[Finding]:
    """Yield the findings in a Python file."""
    nodes = list(ast.walk(ast.parse(source)))
    yield from name_findings(path, nodes)
    joined = [node for node in nodes if isinstance(node, ast.JoinedStr)]
    parts = {id(part) for node in joined for part in node.values}
    for node in nodes:
        if id(node) in parts:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if len(node.value.split()) > 2:
                yield from prose_findings(path, node.lineno, node.value)
        elif isinstance(node, ast.JoinedStr):
            text = "".join(
                str(part.value) if isinstance(part, ast.Constant) else "x" for part in node.values
            )
            yield from prose_findings(path, node.lineno, text)
    comment, start = "", 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            start = start or token.start[0]
            comment += token.string.lstrip("# ") + " "
        elif token.type != tokenize.NL and comment:
            yield from prose_findings(path, start, comment)
            comment, start = "", 0


def markdown_findings(path: str, source: str) -> Iterator[Finding]:
    """Yield the findings in a Markdown file, paragraph by paragraph."""
    fenced, paragraph, start = False, "", 0
    for number, line in enumerate([*source.splitlines(), ""], 1):
        if line.startswith("```"):
            fenced = not fenced
        text = "" if fenced or line.startswith(("```", "    ")) else line.strip("#>-* ")
        if text and not line.startswith("|"):
            start = start or number
            paragraph += text + " "
            continue
        if paragraph:
            yield from prose_findings(path, start, paragraph)
        paragraph, start = "", 0
        if line.startswith("|"):
            for cell in line.strip("|").split("|"):
                yield from prose_findings(path, number, cell)


def files_of(paths: tuple[str, ...]) -> Iterator[Path]:
    """Yield the Python and Markdown files among *paths* and below their folders, without those of
    installed packages.
    """
    for name in paths:
        path = ROOT / name
        found = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in found:
            relative = str(file.relative_to(ROOT))
            if "node_modules" in file.parts or relative.startswith(SKIPPED):
                continue
            if file.suffix in (".py", ".md"):
                yield file


def findings_of(file: Path) -> list[Finding]:
    """Return the findings in a file."""
    read = python_findings if file.suffix == ".py" else markdown_findings
    return list(read(str(file.relative_to(ROOT)), file.read_text()))


def main() -> int:
    """Print all findings and return the exit status."""
    files = files_of(tuple(sys.argv[1:]) or CHECKED)
    with ProcessPoolExecutor() as pool:
        findings = list(chain.from_iterable(pool.map(findings_of, files, chunksize=8)))
    for finding in findings:
        print(f"{finding.path}:{finding.line}: {finding.advice}: {finding.text[:120]}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
