"""Extract data from a text: the answer is an instance of a class."""

import sys
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

import inferd

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"


@dataclass
class Weather:
    city: Annotated[str, Meta(max_length=30)]
    degrees: Annotated[int, Meta(ge=-60, le=60)]
    sky: Literal["clear", "cloudy", "rain", "snow"]


with inferd.Client() as client, client.session(MODEL, temp=0, n_predict=80) as session:
    try:
        weather = session.chat("Oslo: it snows at 4 degrees below zero.", schema=Weather)
    except inferd.InvalidAnswer as exc:  # cut off, or by a model without grammars such as `echo`
        print("incomplete:", exc.data["stop_reason"], exc.data["text"])
    else:
        print(weather.city, weather.degrees, weather.sky)
