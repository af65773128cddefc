"""Errors: their class, message, hint, and whether a retry makes sense."""

import sys

import inferd

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"


def attempt(model: str, **settings: object) -> None:
    """Send one question and print the outcome."""
    try:
        with client.session(model, options={"n-predict": 8, **settings}) as session:
            print("answer:", session.chat("Say a word."))
    except (inferd.ModelNotFound, inferd.InvalidArgument) as exc:
        print(f"{type(exc).__name__}: {exc.message}; {exc.hint}")
    except inferd.InferdError as exc:  # every other error of the daemon or the connection
        print("retry later" if exc.retryable else "give up", exc.name, exc.data)


with inferd.Client(retries=3) as client:
    attempt(MODEL)
    attempt("no-such-model")
    attempt(MODEL, temperature_of_the_room=21)
