"""Reading the configuration: precedence, ranges, and all errors at once."""

from __future__ import annotations

import pickle
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from inferd.backends.errors import InvalidArgument
from inferd.backends.model_encodings import PYTORCH_FILE
from inferd.backends.model_spec import ADAPTERS_MAX
from inferd.daemon.config import sources
from inferd.daemon.config.model_settings import AdapterConfig, check_model_name
from inferd.daemon.config.settings import SETTINGS, Config
from inferd.daemon.config.sources import ConfigError, kv_ram_default, load_config
from inferd.daemon.media.settings import MediaSettings
from inferd.daemon.residency.machine import MachineMemory
from inferd.ipc.paths import SYSTEM_SOCKET

FROM_THE_MACHINE = ("cores", "kv-ram-bytes")
"""Settings whose 0 stands for a limit of the machine."""


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "inferd.toml"
    path.write_text(text)
    return str(path)


def errors_of(tmp_path: Path, text: str, environ: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config({"config": write(tmp_path, text)}, environ or {})
    return [line.replace(f"{tmp_path}/inferd.toml: ", "") for line in caught.value.lines]


def test_without_any_source_the_defaults_apply(tmp_path: Path) -> None:
    config = load_config({}, {"XDG_RUNTIME_DIR": "/run/user/7"})
    assert config.socket == Path("/run/user/7/inferd/inferd.sock")
    assert config.models_dir == tmp_path / ".local/share/inferd/models"
    assert config.state_dir == tmp_path / ".local/state/inferd"
    assert config.cores >= 1
    assert (config.sessions_max, config.idle_timeout_ms) == (100, 300_000)
    assert config.models == {} and config.defaults == {}


def test_without_a_runtime_directory_the_socket_lies_in_run() -> None:
    assert load_config({}, {}).socket == Path("/run/inferd/inferd.sock")


def test_the_table_describes_every_field_and_its_default_is_in_range() -> None:
    names = {f.name.replace("_", "-") for f in fields(Config)}
    assert set(SETTINGS) == names - {"models", "names", "defaults", "access"}
    config = load_config({}, {})
    for name, setting in SETTINGS.items():
        value = getattr(config, name.replace("-", "_"))
        if setting.kind in (int, float):
            assert setting.low is not None and setting.high is not None, name
            assert setting.low <= value <= setting.high, name
        elif setting.kind is str:
            assert value in setting.choices


def test_flags_override_the_environment_and_the_environment_the_file(tmp_path: Path) -> None:
    text = "[daemon]\nsessions-max = 1\ncores = 1\nshutdown_grace_s = 1\n"
    environ = {"INFERD_SESSIONS_MAX": "2", "INFERD_CORES": "2"}
    flags = {"config": write(tmp_path, text), "sessions_max": 3, "log-level": None}
    config = load_config(flags, environ)
    assert (config.sessions_max, config.cores, config.shutdown_grace_s) == (3, 2, 1.0)
    assert config.log_level == "info"


@pytest.mark.parametrize("by", ["flag", "INFERD_CONFIG", "XDG_CONFIG_HOME"])
def test_the_file_is_found(by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "inferd" / "config.toml"
    path.parent.mkdir()
    path.write_text("[daemon]\nsessions-max = 9")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path if by == "XDG_CONFIG_HOME" else "/none"))
    flags = {"config": path} if by == "flag" else {}
    environ = {"INFERD_CONFIG": str(path)} if by == "INFERD_CONFIG" else {}
    assert load_config(flags, environ).sessions_max == 9


def test_a_home_of_an_unknown_user_is_an_ordinary_folder(tmp_path: Path) -> None:
    path = write(tmp_path, "[daemon]\nmodels-dir = '~no-such-user/x'")
    assert load_config({"config": path}, {}).models_dir == tmp_path / "~no-such-user" / "x"
    config = load_config({"models-dir": "~no-such-user/x"}, {})
    assert config.models_dir == Path("~no-such-user/x").absolute()


def test_an_empty_environment_variable_is_unset() -> None:
    assert load_config({}, {"INFERD_SESSIONS_MAX": ""}).sessions_max == 100


def test_every_error_is_reported_at_once(tmp_path: Path) -> None:
    text = """
        socke = "x"
        [daemon]
        sesions-max = 3
        cores = -1
        shutdown-grace-s = "long"
        log_level = "loud"
        [defaults]
        temperatur = 1
        [models.small]
        file = 3
        temp = 200
        backnd = "echo"
        [models."a/b"]
    """
    lines = errors_of(tmp_path, text, {"INFERD_CORES": "1.5", "INFERD_SESSION_MAX": "1"})
    assert lines == [
        "[daemon] sesions-max: unknown key; did you mean 'sessions-max'?",
        "[daemon] cores: -1 is outside 0 … 4096",
        "[daemon] shutdown-grace-s: 'long' is not a number",
        "[daemon] log_level: 'loud' is not one of debug, info, warning, error",
        "INFERD_CORES: '1.5' is not a whole number",
        "INFERD_SESSION_MAX: unknown, did you mean INFERD_SESSIONS_MAX?",
        "unknown key 'socke'; did you mean 'socket'?",
        "[models.small] file: 3 is not a path",
        "[models.small] temp: 200 is outside 0 … 100; nearest: 100",
        "[models.small] unknown key 'backnd'; did you mean 'backend'?",
        "[models.a/b] 'a/b' is not a name for a model: use letters, digits, . _ -",
        "[defaults] unknown key 'temperatur'; did you mean 'temperature'?",
    ]


def test_whole_numbers_may_be_written_as_floats(tmp_path: Path) -> None:
    file = tmp_path / "inferd.toml"
    file.write_text(
        "[daemon]\ncores = 2.0\nsessions-max = 1e2\nshutdown-grace-s = 3.0\nmetrics = 9000.0\n"
        '[models.small]\nfile = "small.gguf"\nctx-size = 160.0\nslots = 2.0\n'
    )
    config = load_config({"config": file}, {"INFERD_SESSIONS_USER_MAX": "8.0"})
    context = config.models["small"].options["ctx-size"]
    found = (config.cores, config.sessions_max, config.sessions_user_max, context)
    assert found == (2, 100, 8, 160) and all(type(number) is int for number in found)
    assert type(config.shutdown_grace_s) is float and str(config.metrics) == "127.0.0.1:9000"
    assert errors_of(tmp_path, "[daemon]\ncores = 2.5\nlog-text = 1.0\n") == [
        "[daemon] cores: 2.5 is not a whole number",
        "[daemon] log-text: 1.0 is neither true nor false",
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("daemon = 1", "daemon is 1, not a table: write [daemon]"),
        ("models = []", "models is [], not a table: write [models]"),
        ("[models]\na = 1", "[models.a] is 1, not a table"),
        ("[daemon]\ncores = true", "[daemon] cores: true is not a whole number"),
        ("[daemon]\nshutdown-grace-s = nan", "[daemon] shutdown-grace-s: nan is outside 0 … 86400"),
        ("[daemon]\nshutdown-grace-s = inf", "[daemon] shutdown-grace-s: inf is outside 0 … 86400"),
        ("[daemon]\nsocket = ''", "[daemon] socket: '' is not a path"),
        (
            "[daemon]\ncores = 1\n'co-res' = 1",
            "[daemon] co-res: unknown key; did you mean 'cores'?",
        ),
        (
            "[daemon]\nshutdown-grace-s = 1\nshutdown_grace_s = 2",
            "[daemon] shutdown_grace_s: given twice, in two spellings",
        ),
        (
            "[defaults]\ntemp = 1\ntemperature = 1",
            "[defaults] temperature: given twice, in two spellings of temp",
        ),
        (
            "[models.a]\nbackend = 'x'",
            "[models.a] backend: 'x' is not one of llama, echo, onnx, litert, openvino",
        ),
        (
            "[models.a]\nbackend = 'echo'\nfile = 'f'",
            "[models.a] file: an echo model has no file",
        ),
        *(
            (
                f"[models.echo{table}]\n{line}",
                (
                    "[models.echo] backend is missing: write backend = 'echo' for the built-in"
                    " model of this name, or backend = 'llama' for echo.gguf"
                ),
            )
            for table, line in (("", ""), ("", "slots = 1"), (".echo", "step-ms = 1"))
        ),
        (
            "[models.a.echo]\nstep_ms = 1",
            "[models.a] echo: only a model with backend = 'echo' has these options",
        ),
        (
            "[models.a]\nfile = 'a.onnx'\nbatch-max = 0",
            "[models.a] batch-max: 0 is outside 1 … 4096",
        ),
        (
            "[models.a]\nbackend = 'echo'\n[models.a.echo]\nstep = 1",
            "[models.a] echo: unknown key 'step'; did you mean 'step-ms'?",
        ),
        (
            "[models.a]\nbackend = 'echo'\n[models.a.echo]\nstep_ms = -2",
            "[models.a] echo: step_ms: -2 is outside -1 … 1000000000",
        ),
    ],
)
def test_an_error_names_its_place_and_value(tmp_path: Path, text: str, line: str) -> None:
    assert errors_of(tmp_path, text) == [line]


@pytest.mark.parametrize(
    ("line", "backend"),
    [("file = 'x.gguf'", "llama"), ("backend = 'LLAMA'", "llama"), ("backend = 'Echo'", "echo")],
)
def test_the_name_echo_stands_for_a_file_or_the_built_in_model(
    tmp_path: Path, line: str, backend: str
) -> None:
    text = f"[models.echo]\n{line}\nslots = 1"
    model = load_config({"config": write(tmp_path, text)}, {}).models["echo"]
    assert (model.backend, model.options) == (backend, {"slots": 1})


@pytest.mark.parametrize(
    ("key", "value", "read"),
    [
        ("log-level", "warn", "warning"),
        ("log-level", "WARNING", "warning"),
        ("log-level", "Err", "error"),
        ("log-level", " Debug ", "debug"),
        ("log-format", "JSON", "json"),
        ("kv-share", "All", "all"),
        ("metrics-network", "ANY", "any"),
        ("traces-network", "Loopback", "loopback"),
        ("log-levels", "LLAMA=Warn, scheduler=DEBUG", {"llama": "warning", "scheduler": "debug"}),
    ],
)
def test_words_are_read_in_any_case_and_by_other_programs_spellings(
    tmp_path: Path, key: str, value: str, read: object
) -> None:
    field = key.replace("-", "_")
    file = write(tmp_path, f'[daemon]\n{key} = "{value}"')
    sources: list[tuple[dict[str, Any], dict[str, str]]] = [
        ({key: value}, {}),
        ({}, {f"INFERD_{field.upper()}": value}),
        ({"config": file}, {}),
    ]
    for source in sources:
        assert getattr(load_config(*source), field) == read


@pytest.mark.parametrize(
    ("text", "value"),
    [("yes", True), ("ON", True), ("True", True), ("1", True), ("no", False), ("Off", False)],
)
def test_texts_of_flags_and_variables_are_booleans(text: str, value: bool) -> None:
    assert load_config({"log-text": text}, {}).log_text is value
    assert load_config({}, {"INFERD_LOG_TEXT": text}).log_text is value
    with pytest.raises(ConfigError, match="neither true nor false"):
        load_config({"log-text": f"{text}x"}, {})


@pytest.mark.parametrize("value", ["", "warnings", "wärning", 3, True, ["warning"]])
def test_other_words_are_refused_with_the_choices(value: object) -> None:
    with pytest.raises(ConfigError, match="is not one of debug, info, warning, error"):
        load_config({"log-level": value}, {})


def test_a_broken_file_is_refused_with_the_place(tmp_path: Path) -> None:
    (line,) = errors_of(tmp_path, "[daemon\n")
    assert line.startswith("is not valid TOML: ") and "line 1" in line


def test_a_named_file_must_exist() -> None:
    with pytest.raises(ConfigError, match=r"/none/such: cannot be read: No such file"):
        load_config({"config": "/none/such"}, {})


def test_a_huge_file_is_refused_unread(tmp_path: Path) -> None:
    (line,) = errors_of(tmp_path, "#" * ((1 << 20) + 1))
    assert line == "is not valid TOML: larger than 1048576 bytes"


def test_a_socket_path_longer_than_the_system_takes_is_refused() -> None:
    with pytest.raises(ConfigError, match="longer than 107 bytes"):
        load_config({"socket": "/" + "s" * 107}, {})
    assert load_config({"socket": "/" + "s" * 106}, {})


@pytest.mark.parametrize(
    "name",
    [n for n, s in SETTINGS.items() if s.kind in (int, float) and n not in FROM_THE_MACHINE],
)
def test_each_number_is_accepted_at_its_bounds_and_refused_beyond_them(name: str) -> None:
    setting = SETTINGS[name]
    assert setting.low is not None and setting.high is not None
    for good in (setting.low, setting.high):
        config = load_config({name: setting.kind(good)}, {})
        assert getattr(config, name.replace("-", "_")) == good
    for bad in (setting.low - 1, setting.high + 1):
        with pytest.raises(ConfigError, match=f"--{name}: .* is outside"):
            load_config({name: setting.kind(bad)}, {})


@pytest.mark.parametrize("name", FROM_THE_MACHINE)
def test_zero_stands_for_the_limit_of_the_machine(name: str) -> None:
    default = load_config({}, {})
    assert load_config({name: 0}, {}) == default
    field = name.replace("-", "_")
    assert getattr(load_config({name: 1}, {}), field) == 1 <= getattr(default, field)


@pytest.mark.parametrize(
    ("memory", "share"), [(8 << 30, 1 << 30), (32 << 30, 4 << 30), (512 << 30, 4 << 30)]
)
def test_kv_states_get_an_eighth_of_the_memory_at_most_4_gib(memory: int, share: int) -> None:
    assert kv_ram_default(memory) == share
    assert load_config({}, {}).kv_ram_bytes == kv_ram_default(MachineMemory().total_bytes())


def test_kv_states_serve_their_owner_by_default() -> None:
    assert load_config({}, {}).kv_share == "user"
    assert load_config({}, {"INFERD_KV_SHARE": "all"}).kv_share == "all"
    with pytest.raises(ConfigError, match="'others' is not one of user, all"):
        load_config({"kv-share": "others"}, {})


def test_models_are_read_with_checked_parameters(tmp_path: Path) -> None:
    text = """
        [defaults]
        max_tokens = 50
        [models.small]
        file = "small.gguf"
        ctx_size = 512
        temperature = 0
        stop = "x"
        [models.parrot]
        backend = "echo"
        [models.parrot.echo]
        step-ms = 5
    """
    config = load_config({"config": write(tmp_path, text)}, {})
    assert config.defaults == {"n-predict": 50}
    small, parrot = config.models["small"], config.models["parrot"]
    assert small.options == {"ctx-size": 512, "temp": 0.0, "stop": ["x"]}
    assert (small.file, small.backend) == (tmp_path / "small.gguf", "llama")
    assert (parrot.file, parrot.backend, parrot.echo) == (None, "echo", {"step_ms": 5.0})


def test_a_projector_is_a_file_or_a_word(tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    (models / "in.gguf").touch()
    values = {"a": "", "b": "none", "c": "auto", "d": "in.gguf", "e": "/x.gguf", "f": "beside.gguf"}
    text = "[daemon]\nmodels-dir = 'models'\n" + "".join(
        f"[models.{name}]\nmmproj = '{value}'\n" for name, value in values.items()
    )
    config = load_config({"config": write(tmp_path, text)}, {})
    assert [config.models[name].options["mmproj"] for name in values] == [
        *("none", "none", "auto", str(models / "in.gguf"), "/x.gguf"),
        str(tmp_path / "beside.gguf"),
    ]
    defaults = load_config({"config": write(tmp_path, "[defaults]\nmmproj = 'none'")}, {}).defaults
    assert defaults == {"mmproj": "none"}


def test_images_and_sounds_are_bounded_by_default(tmp_path: Path) -> None:
    config = load_config({}, {"XDG_RUNTIME_DIR": str(tmp_path)})
    sizes = (config.media_bytes_max, config.media_session_bytes_max, config.media_user_bytes_max)
    assert sizes == (32 << 20, 256 << 20, 1 << 30)
    assert (config.media_items_max, config.media_on_swap) == (64, "note")
    settings = MediaSettings.of_config(replace(config, media_pixels_max=5, audio_seconds_max=6))
    assert (settings.bytes_max, settings.pixels_max, settings.seconds_max) == (32 << 20, 5, 6)
    assert (settings.cache_bytes, settings.cores) == (256 << 20, config.cores)


def test_a_model_file_is_looked_for_beside_the_configuration_then_among_the_models(
    tmp_path: Path,
) -> None:
    models = tmp_path / "models"
    models.mkdir()
    for path in (tmp_path / "a.gguf", models / "a.gguf", models / "b.gguf"):
        path.touch()
    text = "[daemon]\nmodels-dir = 'models'\n" + "".join(
        f"[models.{n}]\nfile = '{n}.gguf'\n" for n in "abc"
    )
    config = load_config({"config": write(tmp_path, text)}, {})
    assert config.models_dir == models
    assert [config.models[n].file for n in "abc"] == [
        tmp_path / "a.gguf",
        models / "b.gguf",
        tmp_path / "c.gguf",
    ]


def test_the_error_is_an_invalid_argument_with_the_lines_and_survives_pickling() -> None:
    error = ConfigError(["one", "two"])
    assert isinstance(error, InvalidArgument)
    assert error.to_wire()["data"] == {"errors": ["one", "two"]}
    assert error.to_wire()["message"] == "one\ntwo"
    assert pickle.loads(pickle.dumps(error)).lines == ["one", "two"]


@pytest.mark.parametrize("name", ["a", "smollm2", "Qwen2.5-7B_q4.x", "7", "x" * 128])
def test_a_valid_model_name_is_accepted(name: str) -> None:
    assert check_model_name(name) == name


@pytest.mark.parametrize("name", ["", ".a", "-a", "a/b", "..", "a b", "ä", "a\n", "x" * 129])
def test_an_invalid_model_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match="is not a name for a model"):
        check_model_name(name)


def test_adapters_are_a_file_or_a_file_and_a_scale(tmp_path: Path) -> None:
    (tmp_path / "style.gguf").touch()
    text = """
        [models.chat]
        file = "chat.gguf"
        [models.chat.adapters]
        style = "style.gguf"
        tone = { file = "/m/tone.gguf", scale = -0.5 }
    """
    config = load_config({"config": write(tmp_path, text)}, {})
    assert config.models["chat"].adapters == {
        "style": AdapterConfig(file=tmp_path / "style.gguf"),
        "tone": AdapterConfig(file=Path("/m/tone.gguf"), scale=-0.5),
    }


@pytest.mark.parametrize(
    ("adapters", "line"),
    [
        ("'../a' = 'a.gguf'", "'../a' is not a name for an adapter: use letters, digits, . _ -"),
        ("a = 7", "7 is not a path"),
        ("a = ''", "'' is not a path"),
        ("a = { scale = 1 }", "file is missing"),
        ("a = { file = 'f', scales = 1 }", "unknown key 'scales'; did you mean 'scale'?"),
        ("a = { file = 'f', scale = 101 }", "scale: 101 is outside -100 … 100"),
        ("a = { file = 'f', scale = nan }", "scale: nan is outside -100 … 100"),
        ("a = { file = 'f', scale = true }", "scale: true is not a number"),
    ],
)
def test_an_error_of_an_adapter_names_its_place_and_value(
    tmp_path: Path, adapters: str, line: str
) -> None:
    [error] = errors_of(tmp_path, f"[models.m.adapters]\n{adapters}")
    assert error.startswith("[models.m] adapters: ") and error.endswith(f": {line}")


def test_the_number_of_adapters_is_bounded(tmp_path: Path) -> None:
    def table(count: int) -> str:
        return "[models.m.adapters]\n" + "".join(f"a{i} = 'a.gguf'\n" for i in range(count))

    config = load_config({"config": write(tmp_path, table(ADAPTERS_MAX))}, {})
    assert len(config.models["m"].adapters) == ADAPTERS_MAX
    [error] = errors_of(tmp_path, table(ADAPTERS_MAX + 1))
    assert error == f"[models.m] adapters: {ADAPTERS_MAX + 1}, {ADAPTERS_MAX} at most"


def test_options_that_exclude_each_other_are_an_error_of_their_model(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[models.m]\nfile = "m.gguf"\ncache-type-v = "q8_0"\nflash-attn = "off"\n')
    with pytest.raises(ConfigError, match=r"\[models.m\] cache-type-v q8_0 needs flash attention"):
        load_config({"config": file}, {})
    file.write_text('[models.m]\nfile = "m.gguf"\noverride-kv = ["a.b"]\n')
    with pytest.raises(ConfigError, match="KEY=TYPE:VALUE"):
        load_config({"config": file}, {})


@pytest.mark.parametrize(
    ("flags", "environ", "is_read"),
    [
        ({}, {"XDG_RUNTIME_DIR": "/run/user/7"}, False),
        ({}, {"INFERD_SOCKET": "/tmp/own.sock"}, False),
        ({"socket": "/tmp/own.sock"}, {}, False),
        ({}, {"INFERD_SOCKET": str(SYSTEM_SOCKET), "XDG_RUNTIME_DIR": "/run/user/7"}, True),
        ({"socket": SYSTEM_SOCKET}, {"XDG_RUNTIME_DIR": "/run/user/7"}, True),
    ],
)
def test_only_the_daemon_of_the_machine_s_socket_reads_the_machine_s_file(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: dict[str, Any],
    environ: dict[str, str],
    is_read: bool,
) -> None:
    system = tmp_path / "system.toml"
    system.write_text("[daemon]\nsessions-max = 7\n")
    monkeypatch.setattr(sources, "SYSTEM_FILE", system)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    assert load_config(flags, environ).sessions_max == (7 if is_read else 100)
    named = environ | {"INFERD_CONFIG": str(system)}
    assert load_config(flags, named).sessions_max == 7, "the service's unit names it"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "[models.a]\nfile = '/m/a.tflite'\nbackend = 'onnx'",
            "[models.a] backend: 'a.tflite' is run by 'litert', and not by 'onnx'",
        ),
        (
            "[models.a]\nfile = '/m/a.pt'",
            f"[models.a] file: 'a.pt': {PYTORCH_FILE}",
        ),
        (
            "[models.a]\nfile = '/m/a.gguf'\nbackend = 'openvino'",
            "[models.a] backend: 'a.gguf' is run by 'llama', and not by 'openvino'",
        ),
        (
            "[models.a]\nfile = '/m/a.onnx'\nbackend = 'llama'",
            "[models.a] backend: 'a.onnx' is run by 'onnx' or 'openvino', and not by 'llama'",
        ),
        (
            "[models.a]\nfile = '/m/a.onnx'\nprecision = 'bf16'",
            "[models.a] precision: only a model with backend = 'openvino' has it",
        ),
        (
            "[models.a]\nfile = 'a.gguf'\nlatency = true",
            "[models.a] latency: only a graph has this setting",
        ),
        (
            "[models.a]\nbackend = 'echo'\nbatch-max = 4",
            "[models.a] batch-max: only a graph has this setting",
        ),
        (
            "[models.a]\nfile = 'a.gguf'\ndevice = 'cuda'",
            "[models.a] device: only a graph has this setting",
        ),
        (
            "[models.a]\nfile = 'a.tflite'\ndevice = 'gpu'",
            "[models.a] device: LiteRT computes on the CPU alone",
        ),
        (
            "[models.a]\nfile = 'a.onnx'\ndevice = 'a b'",
            "[models.a] device: 'a b' is not the name of a device",
        ),
    ],
)
def test_the_settings_of_a_model_must_fit_its_backend(tmp_path: Path, text: str, line: str) -> None:
    assert errors_of(tmp_path, text) == [line]


def test_a_file_decides_on_its_backend_and_a_folder_on_its_file(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "saved_model.pb").touch()
    text = """
[models.a]
file = "a.onnx"
[models.b]
file = "b.onnx"
backend = "openvino"
precision = "bf16"
device = "GPU.1"
[models.c]
file = "saved"
[models.d]
backend = "openvino"
"""
    models = load_config({"config": write(tmp_path, text)}, {}).models
    assert [models[name].backend for name in "abcd"] == ["onnx", *["openvino"] * 3]
    assert models["c"].file == tmp_path / "saved" / "saved_model.pb"
    assert [models[name].precision for name in "abc"] == ["f32", "bf16", "f32"]
    assert [models[name].device for name in "abc"] == ["cpu", "gpu.1", "cpu"]
    named = models["d"].with_file(tmp_path / "d.onnx"), models["d"].with_file(tmp_path / "d.gguf")
    assert [one.backend for one in named] == ["openvino", "llama"]
