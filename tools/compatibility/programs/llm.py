"""Checks of llm, the command: prompts, conversations, schemas and tools."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import KEY, MODEL, QUESTION, URL, run_checks

FOLDER = Path(tempfile.mkdtemp(prefix="llm-"))
MODELS = f"""
- model_id: gateway
  model_name: {MODEL}
  api_base: {URL}/v1
  supports_tools: true
  supports_schema: true
- model_id: gateway-completion
  model_name: {MODEL}
  api_base: {URL}/v1
  completion: true
"""
OPTIONS = ("-o", "temperature", "0", "-o", "max_tokens", "100")


def llm(*words: str) -> str:
    command = [str(Path(sys.executable).parent / "llm"), *words]
    environment = {**os.environ, "LLM_USER_PATH": str(FOLDER), "OPENAI_API_KEY": KEY}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-200:]
    return done.stdout.strip()


def whole() -> object:
    """chat, `--no-stream`"""
    return llm("-m", "gateway", *OPTIONS, "--no-stream", "-s", "Be brief.", QUESTION)


def stream() -> object:
    """streamed chat"""
    return llm("-m", "gateway", *OPTIONS, QUESTION)


def conversation() -> object:
    """continued conversation, `-c`"""
    return llm("-c", *OPTIONS, "Are you sure?")


def schema() -> object:
    """structured output, `--schema`"""
    text = llm("-m", "gateway", *OPTIONS, "--schema", "name, country", "Paris is in France.")
    assert set(json.loads(text)) == {"name", "country"}
    return text


def tools() -> object:
    """tools, `--functions`; the model may call one"""
    code = (
        'def weather(city: str) -> str:\n    "Return the weather."\n    return "sunny in " + city'
    )
    words = ("--functions", code, "--td", "How is the weather in Rome?")
    return llm("-m", "gateway", *OPTIONS, *words)


def completion() -> object:
    """completion"""
    return llm("-m", "gateway-completion", *OPTIONS, "The capital of France is")


(FOLDER / "extra-openai-models.yaml").write_text(MODELS)
run_checks(whole, stream, conversation, schema, tools, completion)
