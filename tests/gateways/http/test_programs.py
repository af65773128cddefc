"""The settings of programs for a gateway, as `inferd gateway --show` prints them."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator

import pytest

from inferd.backends.errors import NotFound
from inferd.gateways.http.programs import PROGRAMS, Address, find_program, settings_text
from inferd.testing import RunningDaemon
from tests.daemon.command_line import inferd
from tests.echo import echo_model
from tests.gateways.http.driver import CALL_S_MAX, RunningGateway, keyed_gateway
from tools.compatibility.environments import PROGRAMS as RUN_PROGRAMS
from tools.compatibility.settings import PAGE, page

CONFIG = echo_model("parrot")
HERE = {"openai", "anthropic", "ollama", "pydantic-ai"}
"""The programs that the tests install."""
ADDRESS = Address("http://127.0.0.1:8080", "smollm2")


def show(daemon: RunningDaemon, program: str, *options: str) -> str:
    result = inferd("gateway", "--show", program, *options, socket=daemon.socket)
    assert result.exit_code == 0, result.stderr
    return str(result.stdout)


def code_of(text: str) -> str:
    """Return the part of settings that is code in Python."""
    return text.partition("# in a program\n")[2]


def run_code(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=CALL_S_MAX
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def keyed(
    daemon: RunningDaemon, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RunningGateway, str]]:
    """A gateway with keys, and one of them."""
    with keyed_gateway(daemon, tmp_path_factory.mktemp("keys"), ["ada"]) as (running, keys):
        yield running, keys["ada"]


@pytest.mark.parametrize("name", sorted(HERE))
def test_a_program_with_the_printed_code_is_answered(
    daemon: RunningDaemon, http: RunningGateway, keyed: tuple[RunningGateway, str], name: str
) -> None:
    """Without a key, and then in the same process with one."""
    text = show(daemon, name, "--listen", http.address)
    assert f'"{http.url}' in text
    running, key = keyed
    other = code_of(show(daemon, name, "--listen", running.address, "--keys", "keys.toml"))
    assert '"KEY"' in other or "Bearer KEY" in other
    said = run_code("\n".join((code_of(text), "print('|')", other.replace("KEY", key))))
    assert ["hello" in part for part in said.lower().split("|")] == [True, True]


def test_settings_are_named_on_standard_error_where_they_are_not_known() -> None:
    result = inferd("gateway", "--show", "llm", "--keys", "k.toml", "--listen", "0.0.0.0:9")
    assert result.exit_code == 0
    assert "http://127.0.0.1:9/v1" in result.stdout and "model_name: MODEL" in result.stdout
    assert "MODEL is one of `inferd models`" in result.stderr
    assert "KEY is the key that `inferd gateway --new-key NAME` has shown" in result.stderr
    assert "start it with `inferd gateway --listen 0.0.0.0:9`" in result.stderr
    result = inferd("gateway", "--show", "openai", "--tls-certificate", "c.pem")
    assert "https://127.0.0.1:8080/v1" in result.stdout


def test_without_a_program_all_are_listed() -> None:
    listed = inferd("gateway", "--show").stdout.splitlines()
    assert [line.split()[0] for line in listed] == [program.name for program in PROGRAMS]


def test_an_unknown_program_has_near_names() -> None:
    result = inferd("gateway", "--show", "langchain-opnai")
    assert result.exit_code == 1
    assert "no settings are known for the program 'langchain-opnai'" in result.stderr
    assert "did you mean 'langchain-openai'?" in result.stderr
    with pytest.raises(NotFound, match="no settings") as refusal:
        find_program("x" * 1000)
    assert refusal.value.data["programs"] == [program.name for program in PROGRAMS]


@pytest.mark.parametrize("listen", ["unix:/tmp/x.sock", "127.0.0.1:0"])
def test_an_address_that_programs_cannot_use_is_refused(listen: str) -> None:
    result = inferd("gateway", "--show", "llm", "--listen", listen)
    assert result.exit_code == 1 and "name the gateway's host and port" in result.stderr


def test_a_program_without_show_is_wrong_usage() -> None:
    result = inferd("gateway", "llm")
    assert result.exit_code == 2 and "only named with --show" in result.stderr


def test_a_package_is_found_by_its_name_if_it_is_the_only_one() -> None:
    assert find_program("@anthropic-ai/sdk").name == "anthropic-npm"
    assert find_program(" OpenAI ").registry == "PyPI"


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_each_setting_is_of_its_language(program: object) -> None:
    found = find_program(program.name)  # type: ignore[attr-defined]
    for setting in found.settings:
        text = setting.filled(ADDRESS)
        assert "$" not in text and "http://127.0.0.1:8080" in settings_text(found, ADDRESS)
        if setting.language == "python":
            compile(text, found.name, "exec")
        if setting.language == "sh":
            assert all(shlex.split(line) for line in text.splitlines())


def test_the_page_has_the_settings_of_each_program_that_was_run() -> None:
    text = PAGE.read_text()
    assert text == page()
    shown = {(program.package, program.registry) for program in PROGRAMS}
    run = {(program.package, "npm" if program.node else "PyPI") for program in RUN_PROGRAMS}
    assert run | {(name, "PyPI") for name in HERE} == shown
    assert all(program.title in text for program in PROGRAMS)
