"""The picture of an engine's sessions, with the KV blocks they share and own."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from .session import Session
from .turn import Host

if TYPE_CHECKING:
    from collections.abc import Sequence


async def draw_tree(host: Host) -> str:
    """Lines of text: each session under the one it was forked from, with its blocks.

    "shared" counts blocks that another session's state holds too.
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
        label = session.id if session.name is None else f"{session.id} {session.name}"
        lines.append(
            f"{indent}{'└─' if is_last else '├─'} {label}: {len(session._state.snapshot.ids)} "
            f"tokens, {shared} shared + {len(table) - shared} own blocks"
        )
        deeper = indent + ("   " if is_last else "│  ")
        below = children.get(session.id, [])
        stack += [(child, deeper, last) for child, last in _reversed_with_last(below)]
    return "\n".join(lines)


def _reversed_with_last(indices: Sequence[int]) -> list[tuple[int, bool]]:
    return [(index, at == 0) for at, index in enumerate(reversed(indices))]
