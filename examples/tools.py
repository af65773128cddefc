"""Let the model call Python functions: the client describes, calls and answers them."""

import sys
from typing import Literal

import inferd

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"


def calculate(a: int, b: int, operation: Literal["add", "multiply"] = "add") -> int:
    """Compute with two integers.

    Args:
        a: The first number.
        b: The second number.
        operation: The operation on them.
    """
    print("call:", a, operation, b)
    return a + b if operation == "add" else a * b


with inferd.Client() as client, client.session(MODEL, temp=0, n_predict=60) as session:
    # `required` forces one call, also from a model whose template does not know tools.
    answer = session.chat("What is 2 plus 3?", tools=[calculate], tool_choice="required")
    print("answer:", answer)
    print("messages:", [message["role"] for message in session.history().messages])
