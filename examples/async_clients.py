"""Many turns at once on one event loop: asyncio here; trio works as well."""

import asyncio
import sys

from inferd import AsyncClient

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
SUBJECTS = ("the sea", "mountains", "winter", "bread")


async def poem(client: AsyncClient, subject: str) -> str:
    """Stream one answer; the pieces of all answers arrive interleaved over one connection."""
    async with client.session(model, options={"n-predict": 24}) as session:
        text = ""
        async for piece in session.stream(f"Write a short poem about {subject}."):
            text += piece
            sys.stdout.write(subject[-1])
            sys.stdout.flush()
        return text


async def main() -> None:
    async with AsyncClient() as client:
        poems = await asyncio.gather(*(poem(client, subject) for subject in SUBJECTS))
    print()
    for subject, text in zip(SUBJECTS, poems, strict=True):
        print(f"{subject}: {text}")


asyncio.run(main())
