"""Functions as tools and typed answers on a real model, whose answers a grammar keeps in form."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import pydantic
import pytest

import inferd
from inferd.testing import RunningDaemon, running_daemon
from tests.models import ONE_THREAD, short_smollm2

pytestmark = pytest.mark.model
OPTIONS: inferd.Options = {"n-predict": 200, "seed": 7}


class Sky(enum.Enum):
    CLEAR = "clear"
    RAIN = "rain"


@dataclass
class Place:
    city: Annotated[str, msgspec.Meta(max_length=8)]
    sky: Sky


class Report(msgspec.Struct):
    place: Place
    degrees: Annotated[int, msgspec.Meta(ge=-60, le=60)]
    wind: Literal["calm", "storm"] | None = None


@dataclass
class ReportData:
    place: Place
    degrees: Annotated[int, msgspec.Meta(ge=-60, le=60)]


class ReportModel(pydantic.BaseModel):
    sky: Sky
    degrees: Annotated[int, pydantic.Field(ge=-60, le=60)]


@pytest.fixture(scope="module")
def model_daemon() -> Iterator[RunningDaemon]:
    config = f'{ONE_THREAD}[models.m]\nfile = "{short_smollm2()}"\n'
    with running_daemon(config) as daemon:
        yield daemon


@pytest.mark.parametrize("kind", [Report, ReportData, ReportModel])
def test_a_model_answers_with_an_instance(model_daemon: RunningDaemon, kind: type[Any]) -> None:
    with inferd.Client(model_daemon.socket) as client:
        found = client.chat("m", "It rains in Oslo at 4 degrees.", schema=kind, options=OPTIONS)
    assert type(found) is kind and -60 <= found.degrees <= 60


def test_a_model_calls_a_function_with_values_of_its_types(model_daemon: RunningDaemon) -> None:
    called: list[tuple[Place, int]] = []

    def get_weather(place: Place, days: Annotated[int, msgspec.Meta(ge=1, le=7)]) -> str:
        """Return the weather.

        Args:
            place: The place, with its sky.
            days: The number of days.
        """
        called.append((place, days))
        return "It rains."

    with inferd.Client(model_daemon.socket) as client, client.session("m") as session:
        reply = session.chat(
            "What is the weather in Oslo?",
            tools=[get_weather],
            tool_choice="required",
            parallel_tool_calls=False,
            options=OPTIONS,
            n_predict=200,
        )
        [(place, days)] = called
        assert isinstance(place, Place) and isinstance(place.sky, Sky) and 1 <= days <= 7
        assert reply.tool_calls == [], "a call was required once"
        roles = [message["role"] for message in session.history().messages]
        assert roles[-3:] == ["assistant", "tool", "assistant"]
