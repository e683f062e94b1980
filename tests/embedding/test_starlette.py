"""A Starlette application over real sockets: clients that stay, leave, and come back."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import httpx
import pytest
import pytest_asyncio
import uvicorn
from starlette.types import Receive, Scope, Send

from agentkv import Session, Status
from examples.starlette_app import create_app
from tests.bench import Bench, Gate, expected, make

SYSTEM = "You are a web service."
NUM_TOKENS = 200


@pytest_asyncio.fixture
async def opened() -> AsyncIterator[Bench]:
    engine, runner = make()
    async with engine:
        yield Bench(engine, runner)


class Served:
    """The example's application on a port of this machine, a client, and when a call ends."""

    def __init__(self, session: Session) -> None:
        self.ended: anyio.Event = anyio.Event()
        self._app = create_app(session)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application, watched."""
        try:
            await self._app(scope, receive, send)
        finally:
            if scope["type"] == "http":
                self.ended.set()

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        """A client of the application, which is served meanwhile."""
        listener = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(self, log_level="warning"))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with anyio.create_task_group() as group:
            group.start_soon(server.serve, [listener])
            async with httpx.AsyncClient(base_url=url) as client:
                yield client
            server.should_exit = True


@pytest.mark.asyncio
async def test_a_client_that_stays_gets_the_whole_turn(opened: Bench) -> None:
    session = opened.engine.session(system=SYSTEM)
    async with Served(session).client() as client:
        text = (await client.post("/chat", content="hello")).text
    assert text == session.messages[-1].content
    assert list(session.token_ids[-NUM_TOKENS:]) == expected(session, NUM_TOKENS)


@pytest.mark.asyncio
async def test_a_client_that_leaves_discards_its_turn_and_no_other(opened: Bench) -> None:
    session = await opened.engine.session(system=SYSTEM)
    other = opened.engine.session(system=SYSTEM)
    ids = session.token_ids
    served = Served(session)
    async with served.client() as client:
        gate = Gate(opened.runner, after_steps=30)
        async with client.stream("POST", "/chat", content="a long story") as reply:
            assert await anext(reply.aiter_text())
            assert session.status is Status.STREAMING
        # The next step runs only when the server has seen the client go.
        await served.ended.wait()
        gate.open()
        assert session.token_ids == ids
        await other.generate("a neighbour", max_tokens=4)
        await opened.settle()
        assert opened.engine.stats().running == 0
        text = (await client.post("/chat", content="again")).text
    assert [m.content for m in session.messages] == [SYSTEM, "again", text]
    assert list(session.token_ids[-NUM_TOKENS:]) == expected(session, NUM_TOKENS)
    assert list(other.token_ids[-4:]) == expected(other, 4)
