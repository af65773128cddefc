"""The checks that a task passes before it is queued."""

from __future__ import annotations

from ...backends import Model
from ...backends.errors import InvalidArgument, PromptTooLong, UnsupportedOperation
from ..embeddings.inputs import check_text
from ..task import Task


def check_task(task: Task, model: Model) -> None:
    """Raise an error for a task that cannot be computed.

    :raises PromptTooLong: the prompt leaves no token of the context for an answer; or see
        `check_text`.
    :raises InvalidArgument: the prompt is empty, or it or a stop token is not in the vocabulary.
    """
    if not task.tokens:
        raise InvalidArgument("the prompt has no tokens", hint="send some text")
    ctx_size = task.ctx_size
    if task.spec.embed is not None:
        check_text(task, model.info.embedding)
    elif not model.info.generates:
        raise UnsupportedOperation(
            "the model makes embeddings and does not generate text",
            hint="use embed, or set the parameter embedding",
        )
    elif task.prompt_size >= ctx_size:
        raise PromptTooLong(
            f"the prompt has {task.prompt_size} tokens; the context holds {ctx_size - 1} and"
            " one for the answer",
            data={"prompt_tokens": task.prompt_size, "ctx_size": ctx_size},
        )
    vocab_size = model.info.vocab_size
    bad = next((t for t in task.tokens if not 0 <= t < vocab_size), None)
    if bad is not None:
        raise InvalidArgument(f"token {bad} is not in the vocabulary of {vocab_size}")
    unknown = next((t for t in task.spec.stopping.stop_tokens if t >= vocab_size), None)
    if unknown is not None:
        raise InvalidArgument(
            f"stop-tokens: token {unknown} is not in the vocabulary of {vocab_size}",
            hint="`tokenize` returns the tokens of a text",
        )
