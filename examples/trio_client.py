"""The same client under trio: two streams at once, and a deadline of trio's own."""

import sys

import trio

from inferd import AsyncClient

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"


async def ask(client: AsyncClient, question: str) -> None:
    """Print one answer; leaving the scope early cancels the turn in the daemon."""
    async with client.session(MODEL, options={"n-predict": 24}) as session:
        with trio.move_on_after(60):
            answer = await session.chat(question)
            print(f"{question} {answer!r}")


async def main() -> None:
    async with AsyncClient() as client, trio.open_nursery() as nursery:
        for question in ("What is rain?", "What is snow?"):
            nursery.start_soon(ask, client, question)


trio.run(main)
