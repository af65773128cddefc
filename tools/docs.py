"""Generator of the pages of docs/ that come from the code, and of the types of both clients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.answers.page import PAGE as MODELS
from bench.answers.page import models_page
from bench.attack.report import PAGE as SECURITY
from bench.attack.report import page as security_page
from inferd.backends.params.parameter_table import json_schema
from inferd.daemon.config.show import config_schema
from tools.answers_page import page as answers_page
from tools.compatibility.settings import PAGE as COMPATIBILITY
from tools.compatibility.settings import page as compatibility_page
from tools.gateway_fields_page import page as gateway_fields_page
from tools.json_schema_page import page as json_schema_page
from tools.man_pages import man_pages
from tools.metrics_page import metrics_page
from tools.parameters_page import page
from tools.protocol_page import PAGE as PROTOCOL
from tools.protocol_page import page as protocol_page
from tools.python_types import sources as python_sources
from tools.settings_page import page as settings_page
from tools.typescript_types import sources as typescript_sources
from tools.wasi_nn_page import PAGE as WASI_NN
from tools.wasi_nn_page import page as wasi_nn_page

__all__ = ("pages",)

DOCS = Path(__file__).parent.parent / "docs"
MAN = DOCS / "man"
CLIENT = DOCS.parent / "ipc" / "client"
TYPESCRIPT = DOCS.parent / "clients" / "typescript" / "src" / "generated"


def pages() -> dict[Path, str]:
    """Return the content of each file by path."""
    return {
        DOCS / "answers.md": answers_page(),
        DOCS / "gateway-fields.md": gateway_fields_page(),
        DOCS / "json-schema.md": json_schema_page(),
        DOCS / "metrics.md": metrics_page(),
        DOCS / "parameters.md": page(),
        DOCS / "settings.md": settings_page(),
        COMPATIBILITY: compatibility_page(),
        PROTOCOL: protocol_page(),
        MODELS: models_page(),
        SECURITY: security_page(),
        WASI_NN: wasi_nn_page(),
        DOCS / "parameters.schema.json": _json(json_schema()),
        DOCS / "config.schema.json": _json(config_schema()),
        **{MAN / name: text for name, text in man_pages().items()},
        **{CLIENT / name: text for name, text in python_sources().items()},
        **{TYPESCRIPT / name: text for name, text in typescript_sources(json_schema()).items()},
    }


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Write the files, and delete those of removed commands."""
    MAN.mkdir(exist_ok=True)
    for old in set(MAN.glob("*")) - set(pages()):
        old.unlink()
    for path, text in pages().items():
        path.write_text(text)
        print(path)


if __name__ == "__main__":
    main()
