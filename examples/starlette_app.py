"""A streaming endpoint: a client that disconnects discards its turn, and nothing else."""

import socket

import anyio
import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route
from starlette.types import Send

from agentkv import Engine, Session, Stream


class Reply(StreamingResponse):
    """A turn, sent as it is made. When the client goes, the block is left: it is discarded."""

    def __init__(self, stream: Stream) -> None:
        super().__init__((delta.text async for delta in stream), media_type="text/plain")
        self.stream = stream

    async def stream_response(self, send: Send) -> None:
        async with self.stream:
            await super().stream_response(send)


def create_app(session: Session) -> Starlette:
    """An application whose POST /chat streams the session's next turn."""

    async def chat(request: Request) -> Reply:
        return Reply(session.stream((await request.body()).decode(), max_tokens=200))

    return Starlette(routes=[Route("/chat", chat, methods=["POST"])])


async def main(engine: Engine) -> None:
    """Serve one client that leaves at the first words of its reply."""
    listener = socket.create_server(("127.0.0.1", 0))
    async with engine.session(system="You are a web service.") as session:
        server = uvicorn.Server(uvicorn.Config(create_app(session), log_level="warning"))
        async with anyio.create_task_group() as group:
            group.start_soon(server.serve, [listener])
            url = f"http://127.0.0.1:{listener.getsockname()[1]}/chat"
            client = httpx.AsyncClient(timeout=None)
            async with client as http, http.stream("POST", url, content="Hi") as reply:
                print("heard", repr(await anext(reply.aiter_text())), "and left")
            server.should_exit = True
        print(f"{len(session.messages)} message: the turn never happened")


async def _run() -> None:
    async with Engine.from_pretrained() as engine:
        await main(engine)


if __name__ == "__main__":
    anyio.run(_run)
