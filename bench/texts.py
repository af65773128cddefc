"""The prompts of the bench, generated from a seed and thus the same for all sides of a round."""

from __future__ import annotations

import random

_NAMES = "Ada Ben Cleo Dara Egon Fay Gus Hana Ivo Jana Kofi Lena Milo Nora Otto Pia Quin Rosa"
_JOBS = "baker carpenter doctor farmer gardener librarian painter sailor tailor teacher"
_PLACES = "bakery bridge castle forest harbour island library market mill museum station"
_THINGS = "bell book clock coin compass key lamp letter map mirror ring violin"
_BEASTS = "badger cat crow dog fox goat hedgehog magpie otter owl rabbit squirrel"


def mark(number: int, digits: int = 4) -> str:
    """Return *number* for the front of a prompt: one token per digit, the fastest digit first."""
    return f"{number:0{digits}}"[::-1]


def names(rng: random.Random, count: int) -> list[str]:
    """Return *count* different names."""
    return rng.sample(_NAMES.split(), count)


def paragraph(rng: random.Random, name: str = "") -> str:
    """Return the beginning of a story about *name* or a random name, 40 to 60 tokens."""
    name = name or rng.choice(_NAMES.split())
    job, place, thing, beast = (
        rng.choice(words.split()) for words in (_JOBS, _PLACES, _THINGS, _BEASTS)
    )
    return (
        f"{name} the {job} walked to the old {place} to look for a {thing} that had been lost for "
        f"{rng.randint(3, 90)} years. Nobody knew that a {beast} had hidden it there. This is the "
        "story of that day, from early morning until late at night:"
    )


def story(rng: random.Random, words: int) -> str:
    """Return a text of exactly *words* words, about 1.15 tokens each."""
    found: list[str] = []
    while len(found) < words:
        found += paragraph(rng).replace(":", ".").split()
    return " ".join(found[:words])


def question(rng: random.Random, name: str = "") -> str:
    """Return a short question of *name* or a random name, 15 to 20 tokens."""
    name = name or rng.choice(_NAMES.split())
    thing, place = (rng.choice(words.split()) for words in (_THINGS, _PLACES))
    return f" {name} asked: who has seen the {thing} near the {place}? The answer was:"
