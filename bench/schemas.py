"""The JSON schemas of the bench."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inferd.backends.errors import InferdError
from inferd.backends.grammars.trial import CheckRequest, GrammarChecker
from tests.backends.llama.schemas import SCHEMAS
from tools.get_models import MODELS_DIR

Schema = Mapping[str, Any]
STORE = MODELS_DIR.parent / "schemas"
_checker = GrammarChecker()

ENTRIES_MIN = 8
"""Entries of a list that must not end before the answer does."""


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _list_of(entry: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": entry, "minItems": ENTRIES_MIN}


STOCK: Schema = _object(
    {
        "shop": {"type": "string", "maxLength": 30},
        "items": _list_of(
            _object(
                {
                    "name": {"type": "string", "minLength": 1, "maxLength": 40},
                    "description": {"type": "string", "minLength": 10, "maxLength": 120},
                    "category": {"enum": ["food", "tools", "clothes", "books", "toys"]},
                    "price": {"type": "number", "minimum": 0, "maximum": 10000},
                    "count": {"type": "integer", "minimum": 0, "maximum": 500},
                    "tags": {
                        "type": "array",
                        "items": {"type": "string", "minLength": 1, "maxLength": 12},
                        "minItems": 1,
                        "maxItems": 3,
                    },
                    "available": {"type": "boolean"},
                }
            )
        ),
    }
)
"""A list as programs extract it from texts: short names, and values of all kinds."""

_COUNT = {"type": "integer", "minimum": 0, "maximum": 999}
"""A number with a limit, without which small models would write zeros without end."""

FORMS: Schema = _object(
    {
        "delivery_confirmation_forms": _list_of(
            _object(
                {
                    "customer_identification_number": _COUNT,
                    "preferred_delivery_time_window": {"enum": ["morning", "afternoon"]},
                    "signature_required_on_delivery": {"type": "boolean"},
                    "estimated_package_weight_in_kilograms": _COUNT,
                    "insurance_coverage_requested_by_sender": {"type": "boolean"},
                    "destination_country_and_postal_region": {"enum": ["domestic", "foreign"]},
                }
            )
        )
    }
)
"""Long names with short values, so that a grammar forces most of the answer."""


def different_schemas() -> list[Schema]:
    """Return the schemas of schemastore.org that inferd supports, or those of the tests if none
    were downloaded, in a random order that is always the same.
    """
    files = sorted(STORE.glob("schemastore-*/*.json"))
    found = list(filter(_is_supported, map(_read, files))) if files else list(SCHEMAS.values())
    random.Random(1).shuffle(found)
    return found


def _read(file: Path) -> Any:
    return json.loads(file.read_bytes())


def _is_supported(schema: Any) -> bool:
    try:
        _checker.check(CheckRequest(schema=json.dumps(schema)))
    except InferdError:
        return False
    return isinstance(schema, dict)


def never_used(schema: Schema, number: int) -> Schema:
    """Return *schema* as a text that differs for each *number*."""
    return {**schema, "$comment": f"number {number}"}
