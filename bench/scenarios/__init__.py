"""The scenarios of the bench, in the order of the page."""

from __future__ import annotations

from . import (
    chain,
    decode,
    draft_model,
    external_load,
    first_schema,
    forced_keys,
    gateway,
    gateway_first,
    gateway_many,
    graph_buffers,
    graph_call,
    graph_text,
    graph_urgent,
    graphs,
    guests,
    hybrid,
    infill,
    long_prompt,
    media,
    media_sessions,
    pipeline,
    prefix,
    returning,
    sampling,
    schema,
    scrape,
    sessions,
    speculation,
    swap,
    two_models,
    urgent,
)
from .base import Scenario

__all__ = ("SCENARIOS", "Scenario")

_ALL = (
    *(decode, prefix, urgent, infill, long_prompt, sessions),
    *(returning, hybrid, swap, pipeline, chain, two_models, external_load, scrape, sampling),
    *(schema, forced_keys, first_schema, guests),
    *(speculation, draft_model, media, media_sessions),
    *(gateway, gateway_first, gateway_many),
    *(graphs, graph_call, graph_text, graph_buffers, graph_urgent),
)
SCENARIOS: dict[str, Scenario] = {module.SCENARIO.name: module.SCENARIO for module in _ALL}
