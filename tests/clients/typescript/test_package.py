"""The TypeScript package as npm installs it: the programs of its README, compiled and run."""

from __future__ import annotations

import json
import re
from importlib.metadata import version
from pathlib import Path

import pytest

from inferd.testing import running_daemon
from tests.echo import echo_model
from tests.pictures import png

from .build import CLIENT, node, packages, run

PAGE = (CLIENT / "README.md").read_text()
PROGRAMS = re.findall(r"```ts\n(.*?)```", PAGE, re.S)
OPTIONS = {
    "strict": True,
    "exactOptionalPropertyTypes": True,
    "noUncheckedIndexedAccess": True,
    "target": "es2022",
    "lib": ["es2023", "esnext.disposable"],
    "module": "nodenext",
    "types": ["node"],
}


@pytest.fixture(scope="module")
def program_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program's folder with the package installed, and the README's programs compiled."""
    folder = tmp_path_factory.mktemp("program")
    installed = packages()
    output = run(["npm", "pack", "--json", f"--pack-destination={folder}"], CLIENT)
    packed = json.loads(output[output.index("[\n") :])[0]
    names = {file["path"].split("/")[0] for file in packed["files"]}
    assert packed["version"] == version("inferd")
    assert names == {"LICENSE", "README.md", "dist", "package.json"}
    target = folder / "node_modules" / "inferd"
    target.mkdir(parents=True)
    run(
        ["tar", "xzf", str(folder / packed["filename"]), "-C", str(target), "--strip-components=1"],
        folder,
    )
    for name in ("@msgpack", "@types", "undici-types"):
        (folder / "node_modules" / name).symlink_to(installed / name)
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "tsconfig.json").write_text(json.dumps({"compilerOptions": OPTIONS}))
    for number, program in enumerate(PROGRAMS):
        (folder / f"program{number}.ts").write_text(program)
    run([str(installed / ".bin" / "tsc")], folder)
    return folder


def test_the_programs_of_the_readme_run(program_folder: Path) -> None:
    assert len(PROGRAMS) >= 6
    (program_folder / "photo.jpg").write_bytes(png(8, 8))
    models = echo_model("smollm2") + echo_model("gemma-3", media=True)
    with running_daemon(models) as daemon:
        outputs = [
            run([node(), f"program{number}.js"], program_folder, INFERD_SOCKET=daemon.socket)
            for number in range(len(PROGRAMS))
        ]
    assert outputs[0].startswith("Name three colours.And three animals. ")
    assert outputs[1] == "Write a long story a"
    assert outputs[3] == "What is my name?"
    assert outputs[4].startswith("2 16 ")
    assert outputs[5].startswith("What is this?")
    assert outputs[6] == "Once upon \n"


def test_the_package_is_usable_from_javascript(program_folder: Path) -> None:
    program = program_folder / "plain.mjs"
    program.write_text(
        "import { Client } from 'inferd';\n"
        "const client = await Client.connect();\n"
        "console.log((await client.chat('echo', 'hello')).text);\n"
        "await client.close();\n"
    )
    with running_daemon() as daemon:
        assert run([node(), str(program)], program_folder, INFERD_SOCKET=daemon.socket) == "hello\n"
