"""Twenty agents with priorities and deadlines share one model; a late turn is an error."""

import sys
import time
from concurrent.futures import ThreadPoolExecutor

import inferd
from inferd import Priority

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
CLASSES: tuple[Priority, ...] = ("low", "normal", "high", "urgent")


def agent(number: int) -> str:
    """Send one question, with a deadline."""
    priority = CLASSES[number % 4]
    started = time.monotonic()
    try:
        with client.session(MODEL, priority=priority, options={"n-predict": 16}) as session:
            answer = session.chat(f"Say a word that begins like {number}.", timeout=60)
    except (inferd.Timeout, inferd.PermissionDenied) as exc:
        return f"agent {number:2} ({priority}): {exc.message}"
    seconds = time.monotonic() - started
    return f"agent {number:2} ({priority}): {len(answer)} characters after {seconds:.2f} s"


# Many threads may share a client; a call refused with `Busy` is retried after the daemon's delay.
with inferd.Client(retries=3) as client, ThreadPoolExecutor(20) as pool:
    for line in pool.map(agent, range(20)):
        print(line)
