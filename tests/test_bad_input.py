"""Bad input: refused at once, by name, and nobody else notices."""

from __future__ import annotations

import inspect
import threading

import anyio
import pytest

import agentkv
from agentkv import AgentKVError, Engine, SamplingOptions, Session, SessionClosedError
from agentkv.core.batch import Batch
from agentkv.prompt import unknown_option
from agentkv.testing.witness import WitnessRunner, witness_reply

from .bad_input import CASES, Case, Place, measure, open_place, provoke


class Halt:
    """Makes the step thread stop once, before the fifth step from now, until `go` is set."""

    def __init__(self, runner: WitnessRunner) -> None:
        self.stands = threading.Event()
        self.go = threading.Event()
        self._left = 5
        runner.before_step = self._count

    def _count(self, batch: Batch) -> None:
        self._left -= 1
        if self._left == 0:
            self.stands.set()
            assert self.go.wait(20), "nobody let the step go on"


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("call", dict.fromkeys(case.call for case in CASES))
async def test_bad_input_is_refused_while_no_step_can_run(call: str) -> None:
    """vllm-metal#577, antgroup/sglang#31: one request was refused in the step, and all failed."""
    async with open_place() as place:
        before = state_of(place)
        neighbour = place.engine.session(system="a neighbour")
        halt = Halt(place.runner)
        async with neighbour.stream("go on", max_tokens=24) as stream:
            await anyio.to_thread.run_sync(halt.stands.wait, 20)
            try:
                for case in CASES:
                    if case.call == call:
                        await expect_refusal(case, place)
            finally:
                halt.go.set()
            reply = await stream.result()
        ids = list(neighbour.token_ids)
        assert list(reply.token_ids) == ids[-24:] == witness_reply(ids[:-24], 24)
        await neighbour.aclose()
        await place.engine.tree()
        assert state_of(place) == before
        # The session's warming and the neighbour are all that ever ran.
        assert len({row.seq_id for batch in place.runner.batches for row in batch.rows}) == 2
        await place.session.generate("good", max_tokens=2)


async def expect_refusal(case: Case, place: Place) -> None:
    """The documented error, which names what the case says it must."""
    with pytest.raises((AgentKVError, TypeError)) as caught, anyio.fail_after(5):
        await provoke(case, place)
    said = str(caught.value)
    assert type(caught.value) is case.error, f"{case.name} gives {caught.value!r}"
    missing = [word for word in case.says if word not in said]
    assert not missing, f"{case.name} says {said}, without {missing}"


def state_of(place: Place) -> object:
    """What a refused call may not change."""
    session = place.session
    used = place.engine.stats().used_blocks
    return session.token_ids, session.messages, session.status, session.usage, used


def test_the_table_has_each_case_once() -> None:
    assert len(CASES) >= 150
    assert len({case.name for case in CASES}) == len(CASES)


def test_every_public_call_is_in_the_table() -> None:
    called = {case.call for case in CASES}
    for kind in (Engine, Session):
        for name, member in inspect.getmembers(kind, inspect.isfunction):
            takes = list(inspect.signature(member).parameters)[1:]
            if not name.startswith("_") and (takes or name in ("tree", "stats", "checkpoint")):
                assert f"{kind.__name__}.{name}" in called, name
    for name in ("EngineConfig", "SamplingOptions", "Engine"):
        assert name in called
        assert hasattr(agentkv, name)


@pytest.mark.parametrize("case", CASES[::80], ids=lambda case: case.name)
def test_a_refusal_costs_little(case: Case) -> None:
    cost = measure(case)
    assert cost.seconds < 20 * 0.010
    assert cost.peak_bytes < 1_000_000


def test_a_call_that_is_not_refused_is_reported() -> None:
    fine = Case("Session.fork", "", lambda place, _: place.session.fork(), SessionClosedError, ())
    with pytest.raises(AssertionError, match="not refused"):
        measure(fine)


def test_an_option_that_there_is_not_is_named_beside_the_one_meant() -> None:
    names = SamplingOptions.__struct_fields__
    assert unknown_option("max_token", names).endswith("did you mean 'max_tokens'?")
    assert unknown_option("zzz", names) == "there is no option 'zzz'"
