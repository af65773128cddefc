"""Which part of a rendered chat is new."""

from __future__ import annotations

import pytest

from inferd.scheduler.prompts import rest_of


@pytest.mark.parametrize(
    ("text", "said", "answer", "rest"),
    [
        ("<u>q<a>yes</a><u>", "<u>q<a>yes", "yes", "</a><u>"),
        ("<u>q<a>yes</a><u>", "<u>q<a> yes\n", " yes\n", "</a><u>"),
        ("<u>q<a> yes</a><u>", "<u>q<a> yes\n", " yes\n", "</a><u>"),
        ("<u>q<a>yes\n</a><u>", "<u>q<a> yes\n", " yes\n", "</a><u>"),
        ("<u>q<a></a><u>", "<u>q<a>\n", "\n", "</a><u>"),
        ("<u>q<a></a><u>", "<u>q<a>", "", "</a><u>"),
        ("<u>q<a>yes", "<u>q<a>yes", "yes", ""),
        ("<u>q<a>no</a><u>", "<u>q<a>yes", "yes", None),
        ("<u>Q<a>yes</a><u>", "<u>q<a>yes", "yes", None),
        ("<u>q<a>yes</a><u>", "", "", None),
        ("<u>q</a>few<a>more", "<u>q</a>few<a>", "few", "more"),
    ],
)
def test_what_a_text_adds_to_what_was_said(
    text: str, said: str, answer: str, rest: str | None
) -> None:
    assert rest_of(text, said, answer) == rest
