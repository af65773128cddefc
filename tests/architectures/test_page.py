"""The page of architectures quotes each refusal once, and counts failures."""

from __future__ import annotations

from tools.architectures.outcomes import Outcome
from tools.architectures.page import Row, page

REASON = "the context cannot be shifted: a recurrent state does not consist of tokens"


def test_a_row_says_what_differs_from_a_plain_model() -> None:
    shift = Outcome("shift", "refused", REASON)
    rows = [
        Row("llama-dense", [Outcome("load", "passed", "plain"), Outcome("shift", "passed")]),
        Row("mamba-dense", [Outcome("load", "passed", "recurrent"), shift]),
        Row("qwen35-moe", [Outcome("load", "passed", "hybrid"), shift]),
        Row("dream-dense", [Outcome("load", "refused", "'dream-dense.gguf' has a diffusion")]),
    ]
    text = page(rows)
    assert "| `llama` | dense | any beginning | yes | 2 of 2 |  |" in text
    assert "| `mamba` | dense | whole states | no | 1 of 2 | shift: refused (1) |" in text
    assert "| `qwen35` | with experts | a beginning at a checkpoint | no | 1 of 2 |" in text
    assert "| `dream` | dense |  |  | 0 of 1 | load: refused (2) |" in text
    assert text.count(REASON) == 1 and "2. has a diffusion" in text
    assert "4 of 7 checks pass (57.1 %)" in text and "None fails" in text


def test_failures_and_deaths_are_counted() -> None:
    found = [Outcome("text", "failed", "off"), Outcome("full context", "died", "SIGABRT")]
    text = page([Row("llama-dense", found)])
    assert "1 fail, and 1 end a worker's process" in text
    assert "full context: died (2)" in text
