"""Download of a URL, with resume, bounded redirects and bounded attempts."""

from __future__ import annotations

import http.client
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import IO, Any, ClassVar

import msgspec

from ...backends.errors import NotFound, PermissionDenied
from ...ipc.model_names import FILE_SUFFIX
from .part import BLOCK, Part, PullFailed

ATTEMPTS_MAX = 8
REDIRECTS_MAX = 5
PAUSE_S_MAX = 15.0
TIMEOUT_S = 30.0
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+)")
_SHA256 = re.compile(r'"?([0-9a-f]{64})"?')
_HUB_HASH = "X-Linked-Etag"
_TRANSIENT = (408, 425, 429, 500, 502, 503, 504)


class _Interrupted(Exception):
    """The transfer was interrupted, and another attempt may succeed."""


class _Origin(msgspec.Struct):
    """The origin of an unfinished file, which is continued only from the same URL and version."""

    url: str
    validator: str


class Redirects(urllib.request.HTTPRedirectHandler):
    """Follows a few redirects, never to another kind of URL or from https to http."""

    max_redirections = REDIRECTS_MAX

    def __init__(self) -> None:
        self.hub_hash = ""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        """Refuse other kinds of URL; keep the hub's hash, which only its redirect has."""
        scheme = newurl.partition(":")[0].lower()
        if scheme not in ("http", "https") or (req.type == "https" and scheme != "https"):
            fp.close()
            raise PullFailed(f"{req.full_url} redirects to {newurl}, which is not followed")
        self.hub_hash = self.hub_hash or headers.get(_HUB_HASH, "")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


@dataclass(frozen=True)
class WebFile:
    """A URL. With `hub`, its server sends the SHA-256 of the file to which it redirects."""

    url: str
    name: str
    hub: bool = False
    pause: Callable[[float], None] = time.sleep

    sha256: ClassVar[str] = ""
    suffix: ClassVar[str] = FILE_SUFFIX

    def __str__(self) -> str:
        return self.url

    def fetch(self, part: Part) -> str:
        """Write the file into *part*; continue the part of an earlier pull."""
        part.stage = "downloading"
        self._open_part(part)
        for attempt in range(ATTEMPTS_MAX):
            try:
                return self._fetch_rest(part)
            except _Interrupted as interruption:
                if part.size == 0 or attempt == ATTEMPTS_MAX - 1:
                    hint = "run it again to continue" if part.resumable else "check the address"
                    raise PullFailed(f"{self.url}: {interruption}", hint=hint) from interruption
            self.pause(min(2.0**attempt, PAUSE_S_MAX))
        raise AssertionError("the last attempt returns or raises")

    def _open_part(self, part: Part) -> None:
        origin = _read_origin(part.origin_path)
        keep = part.path.exists() and origin is not None and origin.url == self.url
        try:
            part.open_file(keep=keep)
        except PullFailed:  # the file there is not the beginning of a model
            part.open_file()
        part.resumable = part.size > 0

    def _fetch_rest(self, part: Part) -> str:
        redirects = Redirects()
        with self._open(redirects, part) as answer:
            if answer.status != 416:
                self._receive(answer, part)
            hub_hash = redirects.hub_hash or answer.headers.get(_HUB_HASH, "")
        match = _SHA256.fullmatch(hub_hash) if self.hub else None
        return match[1] if match else ""

    def _open(self, redirects: Redirects, part: Part) -> Any:
        origin = _read_origin(part.origin_path)
        request = urllib.request.Request(
            self.url, headers={"User-Agent": "inferd", "Accept-Encoding": "identity"}
        )
        if part.size and origin and origin.validator:
            request.add_header("Range", f"bytes={part.size}-")
            request.add_header("If-Range", origin.validator)
        try:
            return urllib.request.build_opener(redirects).open(request, timeout=TIMEOUT_S)
        except urllib.error.HTTPError as exc:
            if exc.code == 416 and exc.headers.get("Content-Range") == f"bytes */{part.size}":
                return exc  # the file is complete already
            with exc:
                raise self._refusal(exc, part) from None
        except (OSError, http.client.HTTPException) as exc:
            raise _Interrupted(_reason(exc)) from exc

    def _receive(self, answer: Any, part: Part) -> None:
        total = _total(answer, part)
        validator = _validator(answer.headers)
        part.origin_path.write_bytes(msgspec.json.encode(_Origin(self.url, validator)))
        part.resumable = bool(validator)
        part.check_space(total)
        while block := _read(answer):
            part.write_block(block)
        if total is not None and part.size < total:
            raise _Interrupted(f"the connection ended after {part.size} of {total} bytes")

    def _refusal(self, exc: urllib.error.HTTPError, part: Part) -> Exception:
        """Return the error of an HTTP status."""
        message = f"{self.url}: the server answers {exc.code} {exc.reason}"
        if exc.code == 416:
            part.resumable = False
            return PullFailed(f"{self.url} has changed", hint="run it again from the start")
        if exc.code in _TRANSIENT:
            return _Interrupted(f"the server answers {exc.code} {exc.reason}")
        if exc.code in (401, 403):
            return PermissionDenied(
                message,
                hint="it requires a login: download the file yourself, then `inferd pull FILE`",
            )
        if exc.code in (404, 410):
            return NotFound(message, hint="check the address; upper case counts")
        return PullFailed(message)


def _reason(exc: Exception) -> str:
    reason = exc.reason if isinstance(exc, urllib.error.URLError) else exc
    return str(getattr(reason, "strerror", None) or reason or type(reason).__name__)


def _read(answer: Any) -> bytes:
    """Read a block; raise `_Interrupted` for network errors, to distinguish those of the disk."""
    try:
        block: bytes = answer.read(BLOCK)
    except http.client.IncompleteRead as exc:
        return exc.partial
    except (OSError, http.client.HTTPException) as exc:
        raise _Interrupted(_reason(exc)) from exc
    return block


def _total(answer: Any, part: Part) -> int | None:
    """Return the total size; empty *part* if the answer is the whole file."""
    if answer.status == 206:
        match = _CONTENT_RANGE.fullmatch(answer.headers.get("Content-Range", ""))
        if match and int(match[1]) == part.size:
            return int(match[2])
        raise PullFailed(f"the server sends {answer.headers.get('Content-Range')!r}, not the rest")
    if part.size:
        part.open_file()
    length = answer.headers.get("Content-Length", "")
    return int(length) if length.isdecimal() else None


def _validator(headers: Message) -> str:
    """Return the version of the file: a strong ETag, or its date."""
    etag = headers.get("ETag", "")
    return etag if etag.startswith('"') else headers.get("Last-Modified", "")


def _read_origin(path: Path) -> _Origin | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Origin)
    except (OSError, msgspec.DecodeError):
        return None
