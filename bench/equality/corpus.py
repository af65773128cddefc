"""The requests to both sides: prompts, and sets of parameters in a spelling that both accept.

Everything is deterministic: the most probable token is taken, or only one candidate is left.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.get_models import MODELS_DIR, SOURCES

__all__ = ("BASE", "MODELS", "PROMPTS", "SETS", "digest", "request_of")

MODELS: dict[str, Path] = {
    "smollm2": MODELS_DIR / SOURCES["smollm2"].file,
    "gemma3": MODELS_DIR / SOURCES["gemma3"].file,
}

PROMPTS = (
    "Once upon a time there was a king who had",
    "The capital of France is",
    "The three primary colours are",
    "Water boils at",
    "The opposite of hot is",
    "Dear Sir or Madam,\n\nI am writing to",
    "To make a good cup of tea you need to",
    "The old man walked slowly to the harbour and",
    "In the year 1969",
    "She opened the door and saw",
    "1, 2, 3, 4, 5,",
    "Monday, Tuesday, Wednesday,",
    "2 + 2 = 4\n3 + 3 = 6\n4 + 4 =",
    "A B C D E F G",
    "one two one two one two one",
    "the cat and the cat and the cat and",
    "ha ha ha ha ha",
    "Roses are red, violets are blue,",
    "row, row, row your boat, gently down the",
    "to be or not to be, that is",
    "def add(a, b):\n    return",
    "for i in range(10):\n    print(",
    "SELECT name FROM users WHERE",
    '{"name": "Ada", "age":',
    "<html>\n<head>\n<title>",
    "#include <stdio.h>\nint main() {",
    "git commit -m",
    "import numpy as",
    "x = [1, 2, 3]\ny = [v * 2 for v in",
    "README\n======\n\nThis project",
    "Q: What is the largest planet?\nA:",
    "Q: Who wrote Hamlet?\nA:",
    "Q: What do bees make?\nA: Honey.\nQ: What do cows give?\nA:",
    "English: good morning\nFrench:",
    "Translate to German: the house is big.\n",
    "Summary: The meeting was moved to Friday because",
    "Title: The Secret Garden\nChapter 1\n",
    "Ingredients:\n- flour\n- sugar\n-",
    "Pros:\n1. It is fast\n2.",
    "User: hello\nAssistant:",
    "Le chat est assis sur",
    "Der Hund läuft durch den",
    "El perro come",
    "naïve café, crème brûlée and",
    "日本の首都は",
    "Привет, как",
    "🙂 🙃 🙂",
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was",
    "According to the report, the temperature rose by 1.5 degrees between 1900 and 2000, while",
    "All happy families are alike; each unhappy family is unhappy in its own way. Everything",
)

BASE: dict[str, Any] = {"temperature": 0, "n_predict": 8, "cache_prompt": False}
_WORDS = 'root ::= " "? word (" " word)* "."\nword ::= [a-z]+'
_OBJECT = (
    'root ::= "{" pair ("," pair)? "}"\npair ::= "\\"" [a-z]+ "\\":" value\n'
    'value ::= [0-9]+ | "\\"" [a-z ]* "\\""'
)
_BIAS = [[" the", False], [",", -2.5], [" and", 3.0]]

SETS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "one-token": {"n_predict": 1},
    "repeat-penalty": {"repeat_penalty": 1.3, "repeat_last_n": 64},
    "look-back-8": {"repeat_penalty": 1.5, "repeat_last_n": 8},
    "presence-frequency": {"presence_penalty": 0.6, "frequency_penalty": 0.4},
    "dry": {"dry_multiplier": 0.8, "dry_allowed_length": 1, "dry_penalty_last_n": 128},
    "logit-bias": {"logit_bias": _BIAS},
    "grammar-words": {"grammar": _WORDS},
    "grammar-object": {"grammar": _OBJECT, "n_predict": 14},
    "stop": {"stop": [".", "\n", " the"], "n_predict": 14},
    "cuts": {"min_p": 0.5, "top_k": 3, "top_p": 0.5, "min_keep": 2},
    "typical": {"typical_p": 0.7},
    "top-n-sigma": {"top_n_sigma": 1.0},
    "top-k-1": {"temperature": 0.8, "top_k": 1, "seed": 7},
    "no-penalties-in-chain": {"samplers": ["top_k", "temperature"], "repeat_penalty": 2.0},
    "cut-before-penalties": {
        "samplers": ["top_k", "penalties", "temperature"],
        "top_k": 2,
        "repeat_penalty": 2.0,
    },
    "ignore-eos": {"ignore_eos": True, "n_predict": 14},
    "together": {
        "repeat_penalty": 1.2,
        "dry_multiplier": 0.5,
        "logit_bias": _BIAS,
        "stop": ["\n"],
        "min_p": 0.1,
        "n_predict": 14,
    },
}


def request_of(name: str) -> Mapping[str, Any]:
    """Return the parameters of a set, as sent to both sides."""
    return BASE | SETS[name]


def digest() -> str:
    """Return a digest of all requests. Answers to requests with another digest are discarded."""
    requests = json.dumps([PROMPTS, BASE, SETS], sort_keys=True)
    return hashlib.sha256(requests.encode()).hexdigest()[:16]
