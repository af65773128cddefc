"""Programs that were run with the gateway, and the settings by which each of them uses it: for
`inferd gateway --show` and docs/compatibility.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from string import Template

from ...backends.errors import NotFound
from ...backends.params import nearest

NO_KEY = "none"
"""A key for clients that need one, where the gateway has no keys."""


@dataclass(frozen=True)
class Address:
    """The gateway as its clients see it: *url* without a path, a model and a key."""

    url: str
    model: str = "MODEL"
    key: str = NO_KEY


@dataclass(frozen=True)
class Setting:
    """A text that a program reads: the content of a file, commands of a shell, or code. *place* is
    where it belongs. It is a template with `$url`, `$model` and `$key`.
    """

    place: str
    language: str
    text: str

    def filled(self, address: Address) -> str:
        """Return the text for a gateway."""
        values = {"url": address.url, "model": address.model, "key": address.key}
        return Template(self.text).substitute(values)


@dataclass(frozen=True)
class HttpProgram:
    """A program by the *name* that `--show` takes. *package* is its name in its registry."""

    name: str
    package: str
    registry: str
    settings: tuple[Setting, ...]

    @property
    def title(self) -> str:
        """The program as the page has it."""
        return f"`{self.package}` ({self.registry})"


def _shell(text: str) -> Setting:
    return Setting("environment", "sh", text)


def _python(text: str) -> Setting:
    return Setting("code", "python", text)


def _javascript(text: str) -> Setting:
    return Setting("code", "js", text)


PROGRAMS = (
    HttpProgram(
        "openai",
        "openai",
        "PyPI",
        (
            _shell('export OPENAI_BASE_URL="$url/v1"\nexport OPENAI_API_KEY="$key"\n'),
            _python(
                "import openai\n\n"
                'client = openai.OpenAI(base_url="$url/v1", api_key="$key")\n'
                "answer = client.chat.completions.create(\n"
                '    model="$model", messages=[{"role": "user", "content": "Say hello."}]\n'
                ")\n"
                "print(answer.choices[0].message.content)\n"
            ),
        ),
    ),
    HttpProgram(
        "anthropic",
        "anthropic",
        "PyPI",
        (
            _shell('export ANTHROPIC_BASE_URL="$url"\nexport ANTHROPIC_API_KEY="$key"\n'),
            _python(
                "import anthropic\n\n"
                'client = anthropic.Anthropic(base_url="$url", api_key="$key")\n'
                "message = client.messages.create(\n"
                '    model="$model",\n'
                "    max_tokens=100,\n"
                '    messages=[{"role": "user", "content": "Say hello."}],\n'
                ")\n"
                "print(message.content[0].text)\n"
            ),
        ),
    ),
    HttpProgram(
        "ollama",
        "ollama",
        "PyPI",
        (
            _shell('export OLLAMA_HOST="$url"\nexport OLLAMA_API_KEY="$key"\n'),
            _python(
                "import ollama\n\n"
                'client = ollama.Client(host="$url", headers={"Authorization": "Bearer $key"})\n'
                'messages = [{"role": "user", "content": "Say hello."}]\n'
                'print(client.chat("$model", messages).message.content)\n'
            ),
        ),
    ),
    HttpProgram(
        "pydantic-ai",
        "pydantic-ai",
        "PyPI",
        (
            _python(
                "from pydantic_ai import Agent\n"
                "from pydantic_ai.models.openai import OpenAIChatModel\n"
                "from pydantic_ai.providers.openai import OpenAIProvider\n\n"
                'provider = OpenAIProvider(base_url="$url/v1", api_key="$key")\n'
                'agent = Agent(OpenAIChatModel("$model", provider=provider))\n'
                'print(agent.run_sync("Say hello.").output)\n'
            ),
        ),
    ),
    HttpProgram(
        "llm",
        "llm",
        "PyPI",
        (
            Setting(
                "extra-openai-models.yaml, beside the file that `llm logs path` prints",
                "yaml",
                "- model_id: gateway\n"
                "  model_name: $model\n"
                "  api_base: $url/v1\n"
                "  supports_tools: true\n"
                "  supports_schema: true\n",
            ),
            _shell('export OPENAI_API_KEY="$key"\nllm -m gateway "Say hello."\n'),
        ),
    ),
    HttpProgram(
        "langchain-openai",
        "langchain-openai",
        "PyPI",
        (
            _python(
                "from langchain_openai import ChatOpenAI\n\n"
                'chat = ChatOpenAI(model="$model", base_url="$url/v1", api_key="$key")\n'
                'print(chat.invoke("Say hello.").content)\n'
            ),
        ),
    ),
    HttpProgram(
        "openai-agents",
        "openai-agents",
        "PyPI",
        (
            _python(
                "from agents import Agent, OpenAIResponsesModel, Runner\n"
                "from openai import AsyncOpenAI\n\n"
                'client = AsyncOpenAI(base_url="$url/v1", api_key="$key")\n'
                'model = OpenAIResponsesModel(model="$model", openai_client=client)\n'
                'print(Runner.run_sync(Agent("helper", model=model), "Say hello.").final_output)\n'
            ),
        ),
    ),
    HttpProgram(
        "langchain-ollama",
        "langchain-ollama",
        "PyPI",
        (
            _python(
                "from langchain_ollama import ChatOllama\n\n"
                'chat = ChatOllama(model="$model", base_url="$url")\n'
                'print(chat.invoke("Say hello.").content)\n'
            ),
        ),
    ),
    HttpProgram(
        "litellm",
        "litellm",
        "PyPI",
        (
            _python(
                "import litellm\n\n"
                "answer = litellm.completion(\n"
                '    model="openai/$model",\n'
                '    api_base="$url/v1",\n'
                '    api_key="$key",\n'
                '    messages=[{"role": "user", "content": "Say hello."}],\n'
                ")\n"
                "print(answer.choices[0].message.content)\n"
            ),
        ),
    ),
    HttpProgram(
        "instructor",
        "instructor",
        "PyPI",
        (
            _python(
                "import instructor\n"
                "from openai import OpenAI\n\n"
                'client = instructor.from_openai(OpenAI(base_url="$url/v1", api_key="$key"))\n'
                "answer = client.chat.completions.create(\n"
                '    model="$model",\n'
                "    response_model=str,\n"
                '    messages=[{"role": "user", "content": "Say hello."}],\n'
                ")\n"
                "print(answer)\n"
            ),
        ),
    ),
    HttpProgram(
        "openai-npm",
        "openai",
        "npm",
        (
            _javascript(
                'import OpenAI from "openai"\n\n'
                'const client = new OpenAI({ baseURL: "$url/v1", apiKey: "$key" })\n'
                "const answer = await client.chat.completions.create({\n"
                '  model: "$model",\n'
                '  messages: [{ role: "user", content: "Say hello." }],\n'
                "})\n"
                "console.log(answer.choices[0].message.content)\n"
            ),
        ),
    ),
    HttpProgram(
        "anthropic-npm",
        "@anthropic-ai/sdk",
        "npm",
        (
            _javascript(
                'import Anthropic from "@anthropic-ai/sdk"\n\n'
                'const client = new Anthropic({ baseURL: "$url", apiKey: "$key" })\n'
                "const message = await client.messages.create({\n"
                '  model: "$model",\n'
                "  max_tokens: 100,\n"
                '  messages: [{ role: "user", content: "Say hello." }],\n'
                "})\n"
                "console.log(message.content[0].text)\n"
            ),
        ),
    ),
    HttpProgram(
        "ollama-npm",
        "ollama",
        "npm",
        (
            _javascript(
                'import { Ollama } from "ollama"\n\n'
                'const headers = { Authorization: "Bearer $key" }\n'
                'const client = new Ollama({ host: "$url", headers })\n'
                'const messages = [{ role: "user", content: "Say hello." }]\n'
                'const answer = await client.chat({ model: "$model", messages })\n'
                "console.log(answer.message.content)\n"
            ),
        ),
    ),
    HttpProgram(
        "ai",
        "ai",
        "npm",
        (
            _javascript(
                'import { createOpenAICompatible } from "@ai-sdk/openai-compatible"\n'
                'import { generateText } from "ai"\n\n'
                "const gateway = createOpenAICompatible({\n"
                '  name: "gateway",\n'
                '  baseURL: "$url/v1",\n'
                '  apiKey: "$key",\n'
                "  supportsStructuredOutputs: true,\n"
                "})\n"
                'const { text } = await generateText({ model: gateway("$model"),'
                ' prompt: "Say hello." })\n'
                "console.log(text)\n"
            ),
        ),
    ),
)
_BY_NAME = {program.name: program for program in PROGRAMS}
_PLACES = {"environment": "in a shell", "code": "in a program"}
_COMMENTS = {"js": "//"}


def find_program(name: str) -> HttpProgram:
    """Return the program of a name, or of a package that only one program has.

    :raises NotFound: there is none; the hint has the nearest names.
    """
    wanted = name.strip().lower()
    found = _BY_NAME.get(wanted)
    by_package = [program for program in PROGRAMS if program.package == wanted]
    if found is None and len(by_package) == 1:
        found = by_package[0]
    if found is None:
        close = nearest(wanted, _BY_NAME)
        raise NotFound(
            f"no settings are known for the program {name[:100]!r}",
            hint=f"{close} `inferd gateway --show` lists all".strip(),
            data={"programs": list(_BY_NAME)},
        )
    return found


def settings_text(program: HttpProgram, address: Address) -> str:
    """Return the settings of a program for a gateway, each after a comment with its place."""
    parts: list[str] = []
    for setting in program.settings:
        mark = _COMMENTS.get(setting.language, "#")
        place = _PLACES.get(setting.place, setting.place)
        parts.append(f"{mark} {place}\n{setting.filled(address)}")
    return "\n".join(parts)


def settings_section(address: Address) -> Iterator[str]:
    """Yield the lines of the page's section on settings."""
    for program in PROGRAMS:
        yield f"### {program.title}\n"
        for setting in program.settings:
            place = _PLACES.get(setting.place, setting.place)
            yield f"{place[0].upper()}{place[1:]}:\n"
            yield f"```{setting.language}\n{setting.filled(address)}```\n"
