"""The picture of an engine's sessions, with the KV blocks they share and own."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from .session import Session
from .turn import Host

if TYPE_CHECKING:
    from collections.abc import Sequence


MAX_INDENTS = 32


async def draw_tree(host: Host) -> str:
    """Lines of text: each session under the one it was forked from, with its blocks.

    "shared" counts blocks that another session's state holds too. Forks deeper than MAX_INDENTS are
    drawn under one another at the same place.
    """
    sessions = [session for session in host.sessions.values() if isinstance(session, Session)]
    snapshots = [session._state.snapshot for session in sessions]
    described = await host.worker.inspect(lambda core: core.describe(snapshots))
    tables = [block_ids for block_ids, _ in described]
    holders = Counter(block for table in tables for block in table)
    known = {session.id for session in sessions}
    children: dict[str | None, list[int]] = {}
    for index, session in enumerate(sessions):
        parent = session.parent if session.parent in known else None
        children.setdefault(parent, []).append(index)
    total = sum(holders.values())
    lines = [f"{host.info.name}: {len(sessions)} sessions hold {len(holders)} blocks, not {total}"]
    # A stack, not recursion: forks may be thousands deep.
    stack = [(index, "", last) for index, last in _reversed_with_last(children.get(None, []))]
    while stack:
        index, indent, is_last = stack.pop()
        session, table = sessions[index], tables[index]
        shared = sum(holders[block] > 1 for block in table)
        # A name is the user's text: a line break in it must not look like another session.
        name = "" if session.name is None else f" {_one_line(session.name)}"
        num_tokens = len(session._state.snapshot.ids)
        lines.append(
            f"{indent}{'└─' if is_last else '├─'} {session.id}{name}: {num_tokens} tokens, "
            f"{shared} shared + {len(table) - shared} own blocks"
        )
        deeper = indent + ("   " if is_last else "│  ")
        if len(deeper) > 3 * MAX_INDENTS:
            deeper = indent
        below = children.get(session.id, [])
        stack += [(child, deeper, last) for child, last in _reversed_with_last(below)]
    return "\n".join(lines)


def _reversed_with_last(indices: Sequence[int]) -> list[tuple[int, bool]]:
    return [(index, at == 0) for at, index in enumerate(reversed(indices))]


def _one_line(name: str) -> str:
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in name)
