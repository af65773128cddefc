"""A loop of tools without a session, by each of the chat templates that llama.cpp tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.backends.llama.test_template_forms import templates
from tests.sessions.answers.written_answers import WrittenAnswers
from tests.sessions.history.stateless_loop import run_loop

pytestmark = pytest.mark.asyncio
_DROPS = "it drops the reasoning of old turns"
_BLOCK = "its prompt has a block of reasoning that old turns lack"
_MOVES = "it moves the tools to the newest question"
_RESULT = "it writes a result in another way once a message follows"
OTHERWISE = {
    "Apertus-8B-Instruct": "its prompt begins an answer that old turns continue",
    "Apriel-1.6-15b-Thinker-fixed": _BLOCK,
    "CohereForAI-c4ai-command-r-plus-tool_use": "it moves its instructions to the end",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": _BLOCK,
    "GLM-4.6": _DROPS,
    "GLM-4.7-Flash": _DROPS,
    "LFM2.5-8B-A1B": _DROPS,
    "MiniMax-M2": _DROPS,
    "Mistral-Small-3.2-24B-Instruct-2506": _MOVES,
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": _DROPS,
    "NVIDIA-Nemotron-Nano-v2": _BLOCK,
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": _RESULT,
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": _RESULT,
    "Qwen-QwQ-32B": _BLOCK,
    "Qwen-Qwen3-0.6B": _DROPS,
    "Qwen3.5-4B": _DROPS,
    "Reka-Edge": "it adds empty lines behind a text",
    "StepFun3.5-Flash": _DROPS,
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": _BLOCK,
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": _BLOCK,
    "deepseek-ai-DeepSeek-V3.2": _BLOCK,
    "google-gemma-4-31B-it": _BLOCK,
    "google-gemma-4-31B-it-interleaved": _BLOCK,
    "llama-cpp-deepseek-r1": _BLOCK,
    "mistralai-Mistral-Nemo-Instruct-2407": _MOVES,
    "openai-gpt-oss-120b": _DROPS,
    "openbmb-MiniCPM5-1B": _DROPS,
    "upstage-Solar-Open-100B": _RESULT,
}
"""Templates that do not render old turns as they were written, with the reasons."""


@pytest.mark.parametrize("template", templates(), ids=lambda path: path.stem)
async def test_a_loop_of_tools_computes_nothing_again(template: Path) -> None:
    loop = await run_loop(WrittenAnswers(template), reasoning=True)

    assert (loop.again != []) == (template.stem in OTHERWISE), loop


async def test_without_recent_chats_more_is_computed_again() -> None:
    [template] = [path for path in templates() if path.stem == "Kimi-K2-Thinking"]
    answers = WrittenAnswers(template)

    assert (await run_loop(answers, reasoning=True, recent=False)).again
    assert not (await run_loop(answers, reasoning=True)).again


async def test_reasoning_that_is_not_sent_back_is_computed_again() -> None:
    [template] = [path for path in templates() if path.stem == "MiniMax-M3"]

    assert len((await run_loop(WrittenAnswers(template), reasoning=False)).again) == 3
