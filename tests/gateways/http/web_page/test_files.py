"""The files of the web page over HTTP, without a browser."""

from __future__ import annotations

from http.client import HTTPConnection
from typing import NamedTuple

import pytest

from inferd.gateways.http.web_page.api import FILES
from tests.gateways.http.driver import CALL_S_MAX, RunningGateway

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:;"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""No library needs more: no inline styles, no `eval`, no fonts."""
HTML = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


class Response(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


def get(http: RunningGateway, path: str, method: str = "GET", **headers: str) -> Response:
    connection = HTTPConnection(http.host, http.port, timeout=CALL_S_MAX)
    try:
        connection.request(
            method, path, headers={n.replace("_", "-"): v for n, v in headers.items()}
        )
        with connection.getresponse() as response:
            found = {name.lower(): value for name, value in response.getheaders()}
            return Response(response.status, found, response.read())
    finally:
        connection.close()


def test_browsers_get_the_page_and_programs_the_answer_of_ollama(http: RunningGateway) -> None:
    page = get(http, "/", **HTML)
    assert page.status == 200 and page.body.startswith(b"<!doctype html>")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    for headers in ({}, {"Accept": "*/*"}, {"Accept": "application/json"}):
        answer = get(http, "/", **headers)
        assert (answer.status, answer.body) == (200, b"Ollama is running")
        assert answer.headers["content-type"] == "text/plain; charset=utf-8"
        assert answer.headers["vary"] == "accept", "a cache gives the one answer for the other"


@pytest.mark.parametrize("headers", [{}, HTML], ids=["program", "browser"])
def test_head_has_the_headers_of_the_answer_alone(
    http: RunningGateway, headers: dict[str, str]
) -> None:
    whole, head = get(http, "/", **headers), get(http, "/", "HEAD", **headers)
    assert (head.status, head.body) == (200, b"")
    assert head.headers["content-length"] == str(len(whole.body))
    for name in ("content-type", "vary"):
        assert head.headers[name] == whole.headers[name]


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_file_has_its_type_and_is_sent_again_only_if_it_has_changed(
    http: RunningGateway, name: str
) -> None:
    first = get(http, f"/page/{name}")
    assert (first.status, first.body) == (200, FILES[name].data)
    assert first.headers["content-type"].encode() == FILES[name].content_type
    assert first.headers["x-content-type-options"] == "nosniff"
    assert first.headers["content-security-policy"] == POLICY
    again = get(http, f"/page/{name}", If_None_Match=first.headers["etag"])
    assert (again.status, again.body) == (304, b"")
    head = get(http, f"/page/{name}", "HEAD")
    assert (head.status, head.body) == (200, b"")
    assert head.headers["content-length"] == str(len(first.body))


@pytest.mark.parametrize(
    "path",
    [
        *("/page/", "/page/missing.js", "/page/..%2fapi.py", "/page/../api.py", "/page/%00"),
        *("/page/libraries", "/page/libraries/", "/page/libraries/../style.css"),
    ],
)
def test_other_paths_are_unknown(http: RunningGateway, path: str) -> None:
    assert get(http, path).status == 404


def test_no_file_names_another_host_or_sets_markup_from_texts() -> None:
    for name, file in FILES.items():
        if name.startswith("libraries/"):
            continue  # their results are sanitized: see test_injections.py
        text = file.data.decode().replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text and "https://" not in text, name
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert word not in text, (name, word)
