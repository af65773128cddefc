"""The endpoints of Ollama's API, and its lists and descriptions of models."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from ....backends.errors import UnsupportedOperation
from ..exchange import Endpoint, Exchange, served_ctx_size, usable_models
from ..fields import field_error
from .fields import SHOW, TABLES
from .lines import ERROR_SCHEMA, error_body
from .turns import answer_chat, answer_embed, answer_embeddings, answer_generate

API_VERSION = "0.12.0"
"""The version of Ollama whose API this is; clients compare it."""
_UNKNOWN_TIME = "0001-01-01T00:00:00Z"
_NEVER = timedelta(days=36_500)
"""The time to the expiry of a model that does not expire."""


async def answer_running(exchange: Exchange) -> None:
    """Answer as Ollama does at its root, by which programs recognize it. Browsers get another
    answer.

    :raises ConnectionLost: the daemon does not answer.
    """
    await exchange.turns.health.check()
    await exchange.send_whole(
        b"Ollama is running",
        content_type=b"text/plain; charset=utf-8",
        headers=[(b"vary", b"accept")],
    )


async def answer_version(exchange: Exchange) -> None:
    """Answer with the version of the API.

    :raises ConnectionLost: the daemon does not answer.
    """
    await exchange.turns.health.check()
    await exchange.send_json({"version": API_VERSION})


async def answer_tags(exchange: Exchange) -> None:
    """Answer with all models that the caller may use."""
    await exchange.send_json({"models": [_listed(info) for info in await usable_models(exchange)]})


async def answer_ps(exchange: Exchange) -> None:
    """Answer with the loaded models."""
    models = [_loaded(info) for info in await usable_models(exchange, loaded=True)]
    await exchange.send_json({"models": models})


async def answer_show(exchange: Exchange) -> None:
    """Answer with the description of a model."""
    fields, _ = exchange.read_fields(SHOW)
    if not (fields.model or fields.name):
        raise field_error("model", "model is missing")
    name = exchange.caller.check_model(fields.model or fields.name)
    async with exchange.turns.pool.lease(exchange.caller) as client:
        await exchange.send_json(_shown(await client.show(name)))


async def refuse(exchange: Exchange) -> None:
    """Refuse to change the models of the machine.

    :raises UnsupportedOperation: always.
    """
    raise UnsupportedOperation(
        f"{exchange.path}: the gateway does not change the machine's models",
        hint="on the machine, `inferd pull` downloads models; its operator names and deletes them",
    )


def _details(info: Mapping[str, Any]) -> dict[str, Any]:
    file = info.get("file_info") or {}
    family = file.get("architecture") or info["backend"]
    count = file.get("parameters") or (info.get("info") or {}).get("parameters") or 0
    return {
        "parent_model": info.get("of") or "",
        "format": "gguf" if info["backend"] == "llama" else info["backend"],
        "family": family,
        "families": [family],
        "parameter_size": _short_number(count) if count else "",
        "quantization_level": file.get("quantization") or "",
    }


def _short_number(count: int) -> str:
    """Return a number such as 134.52M."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= size:
            return f"{count / size:.4g}{unit}"
    return str(count)


def _names(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that name a model. Its digest is only of the name and the size, because
    hashing the whole file would take too long.
    """
    name, size = info["name"], info.get("size_bytes", 0)
    digest = hashlib.sha256(f"{name} {size}".encode()).hexdigest()
    return {"name": name, "model": name, "size": size, "digest": digest, "details": _details(info)}


def _listed(info: Mapping[str, Any]) -> dict[str, Any]:
    return {**_names(info), "modified_at": _modified_at(info)}


def _modified_at(info: Mapping[str, Any]) -> str:
    """Return the time of the last change of a model's files, or Ollama's zero if there are none."""
    seconds = info.get("modified_at")
    return _UNKNOWN_TIME if seconds is None else _text_of(datetime.fromtimestamp(seconds, UTC))


def _text_of(moment: datetime) -> str:
    return moment.isoformat().replace("+00:00", "Z")


def _loaded(info: Mapping[str, Any]) -> dict[str, Any]:
    memory, facts = info.get("memory") or {}, info.get("info") or {}
    devices: Any = memory.get("devices") or {}
    expires_s = info.get("expires_s")
    after = _NEVER if expires_s is None else timedelta(seconds=expires_s)
    return {
        **_names(info),
        "size": memory.get("total", 0),
        "size_vram": sum(devices.values()),
        "context_length": facts.get("ctx_size", 0),
        "expires_at": _text_of(datetime.now(UTC) + after),
    }


def _shown(info: Mapping[str, Any]) -> dict[str, Any]:
    file, facts = info.get("file_info") or {}, info.get("info") or {}
    family, template = file.get("architecture") or info["backend"], file.get("chat_template") or ""
    ctx_size = served_ctx_size(info)
    sizes = {
        "general.architecture": family,
        "general.parameter_count": file.get("parameters"),
        f"{family}.context_length": ctx_size or file.get("ctx_size_trained"),
        f"{family}.embedding_length": file.get("embedding_size"),
        f"{family}.block_count": file.get("layers"),
    }
    options = {**(info.get("options") or {}), **({"num_ctx": ctx_size} if ctx_size else {})}
    return {
        "modelfile": f"# a model of inferd\nFROM {info['name']}\n",
        "parameters": "\n".join(f"{name} {value}" for name, value in options.items()),
        "template": template,
        "license": file.get("license") or "",
        "details": _details(info),
        "model_info": {name: value for name, value in sizes.items() if value is not None},
        "capabilities": _capabilities(file, facts, template, info.get("reads") or ()),
        "modified_at": _modified_at(info),
    }


_READS = {"image": "vision", "audio": "audio"}
"""Ollama's names of abilities to read images and sounds."""


def _capabilities(
    file: dict[str, Any], facts: dict[str, Any], template: str, reads: Sequence[str]
) -> list[str]:
    """Return the abilities of a model that its files show; more are known once it is loaded."""
    found = ["completion"] if facts.get("generates", True) else []
    if file.get("supports_tools") or facts.get("tool_format", "none") != "none":
        found.append("tools")
    if "enable_thinking" in template or "<think>" in template:
        found.append("thinking")
    found += [name for kind, name in _READS.items() if kind in reads]
    return [*found, "embedding"] if facts.get("embedding") else found


_REFUSED = ("POST create", "POST pull", "POST push", "POST copy", "DELETE delete")
_BLOBS = "/api/blobs/{digest}"


class OllamaApi:
    """Ollama's API."""

    title = "Ollama"
    prefixes = ("/api/",)
    tables = TABLES
    endpoints = (
        Endpoint(method="GET", path="/api/version", answer=answer_version, public=True),
        Endpoint(method="GET", path="/api/tags", answer=answer_tags),
        Endpoint(method="GET", path="/api/ps", answer=answer_ps),
        Endpoint(method="POST", path="/api/show", answer=answer_show),
        Endpoint(method="POST", path="/api/chat", answer=answer_chat),
        Endpoint(method="POST", path="/api/generate", answer=answer_generate),
        Endpoint(method="POST", path="/api/embed", answer=answer_embed),
        Endpoint(method="POST", path="/api/embeddings", answer=answer_embeddings),
        *(
            Endpoint(method=method, path=f"/api/{name}", answer=refuse)
            for method, name in map(str.split, _REFUSED)
        ),
        Endpoint(method="HEAD", path=_BLOBS, answer=refuse),
        Endpoint(method="POST", path=_BLOBS, answer=refuse),
    )
    error_schema = ERROR_SCHEMA
    error_body = staticmethod(error_body)


OLLAMA = OllamaApi()
