"""A streaming endpoint: a client that disconnects discards its turn, and nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from agentkv import Engine


def create_app(engine: Engine) -> Starlette:
    """An application whose POST /chat streams the reply to the text in the body."""

    async def chat(request: Request) -> StreamingResponse:
        prompt = (await request.body()).decode()

        # Starlette cancels this iteration when the client goes; leaving the blocks frees the KV.
        async def reply() -> AsyncIterator[str]:
            async with engine.session(system="You are a web service.") as session:
                async with session.stream(prompt, max_tokens=32) as stream:
                    async for delta in stream:
                        yield delta.text

        return StreamingResponse(reply(), media_type="text/plain; charset=utf-8")

    return Starlette(routes=[Route("/chat", chat, methods=["POST"])])


async def main(engine: Engine) -> None:
    """Call the application as a client would."""
    transport = httpx.ASGITransport(create_app(engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://agent") as client:
        print((await client.post("/chat", content="Hello!")).text)


async def _run() -> None:
    async with Engine.from_pretrained() as engine:
        await main(engine)


if __name__ == "__main__":
    anyio.run(_run)
