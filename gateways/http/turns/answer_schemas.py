"""The parameters of an answer that follows a JSON schema, for any API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


def schema_options(schema: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    """Return the parameters of an answer's schema. Constraints that no grammar keeps are left out,
    or refused if the schema is *strict*.
    """
    # Sent as text, so that its nesting does not count towards the frame's limit.
    text = msgspec.json.encode(schema).decode()
    return {"json-schema": text, "schema-lenient": not strict}
