"""Models that users of the machine get for its service."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .machine import Ended
from .service import BootedService

MODELS = "/var/lib/inferd/models"
MODEL = b"GGUF" + (3).to_bytes(4, "little") + bytes(24)


@pytest.fixture
def pulling(service: BootedService) -> Iterator[BootedService]:
    """The service, and a model's file that every user can read."""
    service.machine.run("usermod", "--groups=", "ada")
    service.machine.run("install", "--directory", "--owner=ada", "/home/ada")
    (service.machine.root / "srv").mkdir(exist_ok=True)
    (service.machine.root / "srv/my.gguf").write_bytes(MODEL)
    yield service
    service.machine.run("rm", "-rf", "/home/ada")


def pull(service: BootedService, name: str, user: str = "", *words: str) -> Ended:
    """Pull the file as *user* with a home of theirs."""
    home = {"": "/root", "inferd": "/var/lib/inferd"}.get(user, f"/home/{user}")
    command = ("env", f"HOME={home}", *words, "inferd", "pull", "/srv/my.gguf", "--name", name)
    return service.machine.run(*command, user=user, check=False)


def owner_of(service: BootedService, name: str) -> str:
    return service.machine.run("stat", "--format=%U %a", f"{MODELS}/{name}.gguf").stdout


def offered(service: BootedService) -> set[str]:
    with service.client() as client:
        return {model["name"] for model in client.models()}


def test_root_and_the_service_s_user_get_models_for_the_service(pulling: BootedService) -> None:
    for name, user in (("of-root", ""), ("of-inferd", "inferd")):
        done = pull(pulling, name, user)
        assert done.returncode == 0, done
        assert done.stdout.startswith(f"{MODELS}/{name}.gguf: "), done
        assert owner_of(pulling, name).startswith("inferd 6"), "the daemon can read and remove it"
    assert {"of-root", "of-inferd"} <= offered(pulling)
    again = pull(pulling, "of-root")
    assert "up to date" in again.stdout
    (pulling.machine.root / "srv/my.gguf").write_bytes(MODEL + bytes(8))
    for user in ("", "inferd"):
        refused = pull(pulling, "of-root", user)
        assert refused.returncode == 1 and "exists already" in refused.stderr, refused


def test_other_users_read_why_the_service_will_not_offer_the_model(
    pulling: BootedService,
) -> None:
    own = "/home/ada/.local/share/inferd/models"
    done = pull(pulling, "closed", "ada")
    assert done.returncode == 0 and f"{own}/closed.gguf" in done.stdout, done
    assert "its socket is not open to you" in done.stderr
    pulling.machine.run("usermod", "--append", "--groups=inferd", "ada")
    done = pull(pulling, "member", "ada")
    assert done.returncode == 0 and f"{own}/member.gguf" in done.stdout, done
    assert f"the model goes to {own}" in done.stderr and "`sudo inferd pull`" in done.stderr
    assert not {"closed", "member"} & offered(pulling)
    pulling.configure('[access.ada]\nusers = ["ada"]\nallow = ["use", "manage"]\n')
    pulling.systemctl("reload", "inferd")
    done = pull(pulling, "manager", "ada")
    assert done.returncode == 0 and f"{MODELS}/manager.gguf" in done.stdout, done
    assert done.stderr.startswith("try:") and "manager" in offered(pulling)


def test_a_stopped_service_is_named_with_its_command(pulling: BootedService) -> None:
    pulling.systemctl("stop", "inferd.socket", "inferd")
    done = pull(pulling, "stopped", "ada")
    assert (
        done.returncode == 0
        and "it does not run; `sudo systemctl start inferd.socket`" in done.stderr
    )


def test_doctor_names_the_command_that_gets_a_model_for_the_service(
    pulling: BootedService,
) -> None:
    pulling.machine.run("sh", "-c", f"rm -f {MODELS}/*")
    with pulling.client():
        pass  # the daemon runs
    assert "`inferd pull smollm2` gets a small one" in pulling.inferd("doctor", check=False).stdout


def test_doctor_of_another_user_does_not_call_the_closed_folder_missing(
    pulling: BootedService,
) -> None:
    done = pulling.inferd("doctor", user="ada", check=False)
    assert f"cannot be examined: {MODELS}: Permission denied" in done.stdout
    assert "`sudo inferd doctor`" in done.stdout and "does not exist" not in done.stdout
