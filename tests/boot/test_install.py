"""Installation and removal of the service on a machine that runs systemd."""

from __future__ import annotations

import stat
from pathlib import Path

from inferd.daemon.service.install import CONFIG

from .machine import BootedMachine
from .service import SOCKET, BootedService

TOOLS_OWN = {"etc/.pwd.lock", "etc/gshadow", "etc/shadow"}
"""Files that systemd-sysusers and userdel leave; in the shadow files a column changes."""


def files(machine: BootedMachine) -> dict[str, str]:
    """Return the persistent files of the machine."""
    found = {}
    for top in ("etc", "var/lib", "home", "usr/local"):
        for path in sorted((machine.root / top).rglob("*")):
            name = str(path.relative_to(machine.root))
            if name in TOOLS_OWN or name.endswith("-"):  # passwd- is what passwd was before
                continue
            found[name] = path.read_text("latin-1") if path.is_file() else str(path.is_dir())
    return found


def about(path: Path) -> tuple[str, int, int]:
    status = path.stat()
    return stat.filemode(status.st_mode), status.st_uid, status.st_gid


def test_the_service_is_installed_and_removed_without_a_trace(
    fresh_machine: BootedMachine,
) -> None:
    service, root = BootedService(fresh_machine), fresh_machine.root
    before = files(fresh_machine)

    service.inferd("install-service", "--apply")
    name, _, uid, gid, *_ = service.machine.run("getent", "passwd", "inferd").stdout.split(":")
    owner = int(uid), int(gid)
    assert name == "inferd" and 0 < owner[0] < 1000
    assert about(root / SOCKET[1:]) == ("srw-rw----", 0, owner[1])
    assert about(root / "var/lib/inferd/models") == ("drwxr-x---", *owner)
    assert (root / "etc/inferd/config.toml").read_text() == CONFIG
    enabled = "etc/systemd/system/sockets.target.wants/inferd.socket"
    assert (root / enabled).is_symlink(), "it is there after the next boot, too"
    assert service.show("ActiveState")["ActiveState"] == "inactive", "nobody has connected"

    assert service.inferd("run", "echo", "hello").stdout == "hello\n"
    shown = service.show("ActiveState", "Type", "User", "StatusText")
    assert shown == {
        "ActiveState": "active",
        "Type": "notify",
        "User": "inferd",
        "StatusText": "serving",
    }
    examined = service.inferd("doctor").stdout
    assert ", 0 failed" in examined, examined

    kept = root / "var/lib/inferd/models/mine.gguf"
    kept.touch()
    service.machine.run("usermod", "--append", "--groups=inferd", "ada")
    service.inferd("uninstall-service", "--apply")
    assert not (root / SOCKET[1:]).exists() and kept.exists()
    assert service.show("LoadState", "ActiveState") == {
        "LoadState": "not-found",
        "ActiveState": "inactive",
    }
    service.inferd("uninstall-service", "--apply", "--purge")
    assert files(fresh_machine) == before
    assert not (root / "run/inferd").exists()


def test_failed_states_are_reset_with_the_service(fresh_machine: BootedMachine) -> None:
    service = BootedService(fresh_machine)
    service.inferd("install-service", "--apply")
    drop_in = fresh_machine.root / "run/systemd/system/inferd.service.d/own.conf"
    drop_in.parent.mkdir(parents=True)
    drop_in.write_text("[Service]\nRestart=no\n")
    service.systemctl("daemon-reload")
    service.configure("no configuration")
    assert service.systemctl("start", "inferd", check=False).returncode
    assert service.show("ActiveState")["ActiveState"] == "failed"
    service.inferd("uninstall-service", "--apply", "--purge")
    assert service.systemctl("list-units", "--all", "--no-legend", "inferd*").stdout == ""
