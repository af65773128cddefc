"""The names that files get, and the models that clients mean."""

from __future__ import annotations

import pytest

from inferd.backends.params import nearest
from inferd.ipc.model_names import MODEL_NAME, find_name, model_not_found, name_of_file

NAMES = ("smollm2", "Tiny", "tiny", "my-model", "sub-small", "Big-7B.Q4_K_M")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("plain.gguf", "plain"),
        ("Big-7B.Q4_K_M.gguf", "Big-7B.Q4_K_M"),
        ("upper.GGUF", "upper"),
        ("mixed.GgUf", "mixed"),
        ("my model (Q4).gguf", "my-model--Q4-"),
        ("a:b.gguf", "a-b"),
        ("sub/small.gguf", "sub-small"),
        ("org/repo/x.gguf", "org-repo-x"),
        ("mod\u00e8le.gguf", "mod-le"),
        ("mode\u0300le.gguf", "mod-le"),
        ("\u6a21\u578b-7b.gguf", "7b"),
        ("_x.gguf", "x"),
        ("split-00001-of-00003.gguf", "split"),
        ("sub/split-00002-of-00003.gguf", "sub-split"),
        ("line\nbreak.gguf", "line-break"),
        ("\u65e5\u672c.gguf", ""),
        (".gguf", ""),
        ("x" * 200 + ".gguf", "x" * 128),
    ],
)
def test_a_file_gets_a_permitted_name(path: str, name: str) -> None:
    assert name_of_file(path) == name
    assert not name or MODEL_NAME.fullmatch(name)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        *((name, name) for name in NAMES),
        ("smollm2:latest", "smollm2"),
        ("smollm2:LATEST", "smollm2"),
        ("SmolLM2", "smollm2"),
        ("SMOLLM2:latest", "smollm2"),
        ("smollm2.gguf", "smollm2"),
        ("SmolLM2.GGUF", "smollm2"),
        ("big-7b.q4_k_m", "Big-7B.Q4_K_M"),
        ("my model", "my-model"),
        ("My Model.gguf", "my-model"),
        ("my:model", "my-model"),
        ("sub/small.gguf", "sub-small"),
        ("sub/small-00001-of-00002.gguf", "sub-small"),
        ("Tiny:latest", "Tiny"),
    ],
)
def test_a_text_means_the_model_of_this_name_file_or_tag(text: str, name: str) -> None:
    assert find_name(text, NAMES) == name


@pytest.mark.parametrize(
    "text",
    [
        *("", "TINY", "TINY:latest", "other", ":latest", "smollm2:135m", "smol", " smollm2"),
        *("./smollm2", "../smollm2.gguf", "/smollm2", "x/../smollm2", "smollm2\0", "x" * 10_000),
    ],
)
def test_an_ambiguous_or_another_text_means_none(text: str) -> None:
    """`TINY` may be two models, and a path that leads elsewhere is none."""
    assert find_name(text, NAMES) is None


def test_the_error_names_the_models_that_differ_only_in_case() -> None:
    error = model_not_found("TINY", NAMES, "there is no model 'TINY'", "advice")
    assert error.hint == "did you mean 'Tiny' or 'tiny'? advice"
    assert error.data == {"models": sorted(NAMES)}


@pytest.mark.parametrize("text", ["SmolLM-2", "SMOLLM", "smolm2", "SmolLM:latest", "smolm2.GGUF"])
def test_a_suggestion_does_not_depend_on_case(text: str) -> None:
    assert model_not_found(text, NAMES, "", "").hint == "did you mean 'smollm2'?"
    assert nearest("TEMPERATUR", ["top-k", "temperature"]) == "did you mean 'temperature'?"
