"""Runs tests marked `own_process` in a Python process of their own; each reported as if run here.

Triton reads its environment when it is imported, so interpreted kernels and compiled ones cannot
share a process. `own_process(NAME="value")` names what the environment must hold; tests with the
same environment share one process, which sends each report back as soon as it has it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TextIO

import pytest
import torch
from agentkv_kernels.tiles import TileShape

# Set in a child: where it writes its reports, one JSON document a line.
_REPORTS_FD = "AGENTKV_TEST_REPORTS_FD"
_OUTPUT_CHARS = 8000

Environment = tuple[tuple[str, str], ...]


class _Child:
    """One process that runs `node_ids` and streams their reports."""

    def __init__(
        self, config: pytest.Config, environment: Environment, node_ids: list[str]
    ) -> None:
        self._config = config
        self._reports: dict[str, list[pytest.TestReport]] = defaultdict(list)
        self._files = tempfile.TemporaryDirectory()
        arguments = Path(self._files.name, "node_ids")
        arguments.write_text("\n".join(node_ids), encoding="utf-8")
        self._output = Path(self._files.name, "output")
        read_fd, write_fd = os.pipe()
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"@{arguments}"],
                cwd=config.rootpath,
                env={**os.environ, **dict(environment), _REPORTS_FD: str(write_fd)},
                pass_fds=[write_fd],
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        os.close(write_fd)
        self._lines: TextIO = os.fdopen(read_fd, encoding="utf-8")

    def reports_of(self, item: pytest.Item) -> list[pytest.TestReport]:
        """Its reports, set-up to teardown; a failed one where the process ended before."""
        reports = self._reports[item.nodeid]
        while not any(report.when == "teardown" for report in reports):
            line = self._lines.readline()
            if not line:
                return [self._missing(item)]
            hook = self._config.hook
            report = hook.pytest_report_from_serializable(
                config=self._config, data=json.loads(line)
            )
            self._reports[report.nodeid].append(report)
        return reports

    def _missing(self, item: pytest.Item) -> pytest.TestReport:
        code = self._process.wait()
        output = self._output.read_text(encoding="utf-8", errors="replace")[-_OUTPUT_CHARS:]
        return pytest.TestReport(
            nodeid=item.nodeid,
            location=item.location,
            keywords={},
            outcome="failed",
            longrepr=f"its process ended with code {code} before this test did:\n{output}",
            when="call",
        )

    def close(self) -> None:
        """End the process, if tests remain that nobody asks for any more."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._lines.close()
        self._files.cleanup()


class _Reporter:
    """In a child: writes each report to the parent."""

    def __init__(self, config: pytest.Config, reports: TextIO) -> None:
        self._config = config
        self._reports = reports

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._reports.write(json.dumps(data) + "\n")
        self._reports.flush()


_children = pytest.StashKey[dict[Environment, _Child]]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "own_process(**environment): runs in a Python process with this environment"
    )
    config.stash[_children] = {}
    if _REPORTS_FD in os.environ:
        reports = os.fdopen(int(os.environ[_REPORTS_FD]), "w", encoding="utf-8")
        config.pluginmanager.register(_Reporter(config, reports))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Last, since pytest's own set-up and teardown of packages does not see them run.
    items.sort(key=lambda item: _environment(item) or ())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    environment = _environment(item)
    if environment is None or _REPORTS_FD in os.environ:
        return None
    children = item.config.stash[_children]
    if environment not in children:
        # The reports come in the order of the tests, so that each is waited for in its turn.
        node_ids = [i.nodeid for i in item.session.items if _environment(i) == environment]
        children[environment] = _Child(item.config, environment, node_ids)
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in children[environment].reports_of(item):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_sessionfinish(session: pytest.Session) -> None:
    for child in session.config.stash[_children].values():
        child.close()


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Memory that is allocated and not filled holds NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).new_empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of the Triton kernels hold few keys, so that short rows have many."""
    from agentkv_kernels import tile_attention

    small = partial(TileShape, min_chunk=16, min_wide_chunk=32)
    monkeypatch.setattr(tile_attention, "TileShape", small)


def _environment(item: pytest.Item) -> Environment | None:
    marker = item.get_closest_marker("own_process")
    return None if marker is None else tuple(sorted(marker.kwargs.items()))
