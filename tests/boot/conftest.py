from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from .machine import BootedMachine, CannotBoot
from .service import BootedService

WITHOUT = "INFERD_WITHOUT_BOOT"


@contextmanager
def booted() -> Iterator[BootedMachine]:
    """Boot a machine. Where that is impossible the tests fail, unless they are excluded."""
    machine = BootedMachine()
    try:
        machine.boot()
    except CannotBoot as exc:
        if os.environ.get(WITHOUT) == "1":
            pytest.skip(f"cannot boot here because {exc}")
        pytest.fail(f"cannot boot here because {exc}\n(to go without these tests: {WITHOUT}=1)")
    with machine:
        yield machine


@pytest.fixture(scope="package")
def machine() -> Iterator[BootedMachine]:
    """The machine that the service is installed on."""
    with booted() as machine:
        machine.run("inferd", "install-service", "--apply")
        yield machine


@pytest.fixture
def fresh_machine() -> Iterator[BootedMachine]:
    """A machine without the service."""
    with booted() as machine:
        yield machine


@pytest.fixture
def service(machine: BootedMachine) -> Iterator[BootedService]:
    """The service without configuration and state, its socket open; no daemon runs."""
    service = BootedService(machine)
    service.reset()
    service.mark()
    yield service
    if service.show("ActiveState")["ActiveState"] != "inactive":
        service.systemctl("kill", "--signal=KILL", "inferd", check=False)
