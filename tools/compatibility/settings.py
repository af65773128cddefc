"""The section of docs/compatibility.md with the settings of each program."""

from __future__ import annotations

from inferd.gateways.http.programs import Address, settings_section
from tools.compatibility.environments import ROOT

__all__ = ("PAGE", "page", "with_settings")

PAGE = ROOT / "docs" / "compatibility.md"
TITLE = "## Settings"
HEAD = f"""{TITLE}

`make docs` writes this section. `inferd gateway --show PROGRAM` prints these settings with the
address of the gateway and a model of the daemon; with `--listen`, `--keys` and `--tls-certificate`
for a gateway with these options. `inferd gateway --show` lists the programs.

"""


def with_settings(results: str) -> str:
    """Return the page with the *results* of the programs, and their settings."""
    section = "\n".join(settings_section(Address("http://127.0.0.1:8080", "smollm2")))
    return f"{results.rstrip()}\n\n{HEAD}{section}"


def page() -> str:
    """Return the page with the results that it has now."""
    return with_settings(PAGE.read_text().partition(f"\n{TITLE}\n")[0])
