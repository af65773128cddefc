"""The restrictions of the shipped unit as systemd enforces them: one attempt for each directive."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import msgspec
import pytest

from .machine import BootedMachine
from .probe import ATTEMPTS, DEVICE, ELSEWHERE, MARK
from .service import UNIT, BootedService

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "operations.md").read_text()
PORT = 4999
LISTEN = f"""
import socket
sockets = [socket.create_server((address, {PORT})) for address in ("127.0.0.1", {ELSEWHERE!r})]
print("listening", flush=True)
input()
"""
ENFORCED = {
    "CapabilityBoundingSet": ("CapBnd", "0000000000000000"),
    "DevicePolicy": ("open a device", "EPERM"),
    "IPAddressAllow": ("connect to this machine", "done"),
    "IPAddressDeny": ("connect elsewhere", "no answer"),
    "LockPersonality": ("change the personality", "EPERM"),
    "MemoryDenyWriteExecute": ("make memory that is written and run", "EPERM"),
    "NoNewPrivileges": ("NoNewPrivs", "1"),
    "PrivateDevices": ("see devices", "ENOENT"),
    "PrivateTmp": ("see others' temporary files", "ENOENT"),
    "ProtectControlGroups": ("change cgroups", "EROFS"),
    "ProtectHome": ("see homes", "EACCES"),
    "ProtectKernelTunables": ("see the kernel's symbols", "EACCES"),
    "ProtectProc": ("see other users' processes", "ENOENT"),
    "ProtectSystem": ("write the system", "EROFS"),
    "RestrictAddressFamilies": ("talk to the kernel", "EAFNOSUPPORT"),
    "RestrictNamespaces": ("make a user namespace", "EPERM"),
    "RestrictSUIDSGID": ("make a set-user-id file", "EPERM"),
    "SystemCallFilter": ("choose its cores", "EPERM"),
    "UMask": ("Umask", "0077"),
}
"""The directives that an attempt shows: its result differs under the unit's user alone."""
ALSO = {
    "write its state",
    "write temporary files",
    "use random numbers",
    "read free memory",
    "change a mode",
    "yield its cores",
}
"""Actions that the daemon must be able to do."""
NOT_SHOWN = {
    "AmbientCapabilities": "sets what is so by itself",
    "KeyringMode": "shows only where a program takes a key with it",
    "PrivateMounts": "PrivateTmp= and others bring the same",
    "ProtectClock": "takes a capability that the user does not have",
    "ProtectHostname": "takes a capability that the user does not have",
    "ProtectKernelLogs": "takes a capability that the user does not have",
    "ProtectKernelModules": "takes a capability that the user does not have",
    "RemoveIPC": "shows when the service ends",
    "RestrictRealtime": "takes a capability that the user does not have",
    "SystemCallArchitectures": "shows where there is a program of another one",
    "SystemCallErrorNumber": "the filter's answers have it",
}


@pytest.fixture(scope="module")
def unconfined(machine: BootedMachine) -> dict[str, str]:
    return tried(machine, "[Service]\nUser=inferd\n")


@pytest.fixture(scope="module")
def confined(machine: BootedMachine) -> dict[str, str]:
    return tried(machine, (machine.root / "etc/systemd/system" / UNIT).read_text())


def tried(machine: BootedMachine, unit: str) -> dict[str, str]:
    """Run the probe under the directives of *unit*; return its results."""
    (machine.root / "opt/probe.py").write_text((Path(__file__).parent / "probe.py").read_text())
    (machine.root / MARK[1:]).touch()
    machine.run("sh", "-c", f"[ -e {DEVICE} ] || mknod -m 0666 {DEVICE} c 1 11")
    start = f"ExecStart=/opt/inferd/bin/python3 /opt/probe.py {PORT}"
    unit = re.sub("^Exec(Start|Reload)=.*\n", "", unit, flags=re.MULTILINE)
    unit = unit.replace("Type=notify", "Type=oneshot").replace("Restart=on-failure\n", "")
    unit = unit.replace("[Service]\n", f"[Service]\nType=oneshot\n{start}\n")
    (machine.root / "run/systemd/system/probe.service").write_text(unit)
    machine.run("systemctl", "daemon-reload")
    machine.run("ip", "address", "replace", f"{ELSEWHERE}/32", "dev", "lo")
    listener = machine.start(
        "/opt/inferd/bin/python3", "-c", LISTEN, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert listener.stdout is not None and listener.stdout.readline() == "listening\n"
        machine.run("systemctl", "start", "probe")
        machine.run("journalctl", "--sync")
        printed = machine.run("journalctl", "--unit=probe", "--output=cat", "--lines=20").stdout
    finally:
        listener.communicate("over\n")
        machine.run("rm", DEVICE)
    [found] = [line for line in printed.splitlines()[-5:] if line.startswith("{")]
    result: dict[str, str] = msgspec.json.decode(found)
    return result


@pytest.mark.parametrize("directive", ENFORCED)
def test_each_directive_is_enforced(
    directive: str, confined: dict[str, str], unconfined: dict[str, str]
) -> None:
    attempt, ending = ENFORCED[directive]
    assert confined[attempt] == ending
    if ending != "done":
        assert unconfined[attempt] != ending, "it shows nothing"


def test_the_daemon_can_do_everything_it_needs(confined: dict[str, str]) -> None:
    assert {confined[attempt] for attempt in ALSO} == {"done"}
    shown = ALSO | {attempt for attempt, _ in ENFORCED.values()}
    assert set(ATTEMPTS) <= shown


def test_every_directive_of_the_unit_is_shown_or_has_its_reason(machine: BootedMachine) -> None:
    unit = (machine.root / "etc/systemd/system" / UNIT).read_text()
    confining = unit.partition("# Files:")[2]
    names = {line.partition("=")[0] for line in confining.splitlines() if line[:1].isalpha()}
    others = {"StateDirectory", "StateDirectoryMode", "ConfigurationDirectory", "LimitNOFILE"}
    assert names - others - {"WantedBy"} == set(ENFORCED) | set(NOT_SHOWN)


def test_systemd_rates_it_hardly_exposed_and_ignores_no_directive(service: BootedService) -> None:
    service.systemctl("start", "inferd")
    printed = service.machine.run("systemd-analyze", "security", "inferd", "--no-pager").stdout
    level = printed.rsplit("Overall exposure level", 1)[1].split(":")[1].split()[0]
    assert f"`systemd-analyze security inferd` rates the service {level}" in PAGE
    said = [e for e in service.entries() if e["SYSLOG_IDENTIFIER"] != "inferd"]
    assert [e["MESSAGE"] for e in said if int(e["PRIORITY"]) < 6] == []
