"""What a first start leaves on disk for the second: converted models, and which were checked.

A model is a folder, written under a temporary name and renamed when it is whole. It is found by the
source's path, size and time of change, and by its digest when those are new. The models and notes
used least recently make room for new ones.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

__all__ = ["WeightsCache"]

FORMAT = 1  # part of every key: raise it when the conversion changes
MAX_MODELS = 4
MAX_NOTES = 256
_logger = logging.getLogger("agentkv")
_warned: set[str] = set()
_warning_lock = threading.Lock()


class WeightsCache:
    """Converted models under one folder, the user's cache folder by default.

    `AGENTKV_CACHE` names another. A folder that cannot be written warns once and caches nothing.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.root: Path = root or _default_root()

    def find(self, source: Path, variant: str) -> Path | None:
        """The folder converted from `source` in this `variant` (a dtype, say), if there is one."""
        folder = self._folder(self.digest(source), variant)
        if not folder.is_dir():
            return None
        with contextlib.suppress(OSError):
            os.utime(folder)  # now the one used last
        return folder

    def store(self, source: Path, variant: str, write: Callable[[Path], None]) -> Path | None:
        """Let `write` fill a new folder and keep it; None when the cache cannot be written."""
        folder = self._folder(self.digest(source), variant)
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".new-") as name:
                fresh = Path(name) / "model"
                fresh.mkdir()
                write(fresh)
                _rename(fresh, folder)
        except OSError as error:
            self._warn(error)
            return None
        _keep_newest(folder.parent, MAX_MODELS)
        return folder

    def discard(self, folder: Path) -> None:
        """Remove an entry that turned out to be damaged."""
        shutil.rmtree(folder, ignore_errors=True)

    def digest(self, source: Path) -> str:
        """SHA-256 of the file's content, remembered for as long as size and time stay the same."""
        stat = source.stat()
        note = self._note("index", str(source.resolve()), stat.st_size, stat.st_mtime_ns)
        with contextlib.suppress(OSError, UnicodeDecodeError):
            known = note.read_text(encoding="ascii")
            if len(known) == 64 and all(c in "0123456789abcdef" for c in known):
                return known
        with source.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        self._write(note, digest)
        return digest

    def is_verified(self, *key: str) -> bool:
        """Whether `verify` was told of exactly this."""
        note = self._note("verified", *key)
        with contextlib.suppress(OSError):
            os.utime(note)
            return True
        return False

    def verify(self, *key: str) -> None:
        """Remember that what `key` names, weights and code and versions, was found correct."""
        self._write(self._note("verified", *key), "")

    def _note(self, kind: str, *key: str | int) -> Path:
        name = hashlib.sha256(json.dumps([FORMAT, *key]).encode()).hexdigest()
        return self.root / kind / name

    def _write(self, note: Path, content: str) -> None:
        try:
            note.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=note.parent, delete=False) as temporary:
                temporary.write(content)
            os.replace(temporary.name, note)
        except OSError as error:
            self._warn(error)
        else:
            _keep_newest(note.parent, MAX_NOTES)

    def _folder(self, digest: str, variant: str) -> Path:
        return self.root / "models" / f"{digest}-{variant}-{FORMAT}"

    def _warn(self, error: OSError) -> None:
        with _warning_lock:
            if str(self.root) in _warned:
                return
            _warned.add(str(self.root))
        _logger.warning(
            "converted weights cannot be cached in %s (%s); every start converts them again",
            self.root,
            error,
        )


def _rename(fresh: Path, folder: Path) -> None:
    try:
        fresh.rename(folder)
    except OSError:
        # Another process may have been faster; its folder is as good as this one.
        if not folder.is_dir():
            raise


def _keep_newest(folder: Path, most: int) -> None:
    """Remove all but the `most` entries that were used last.

    A model that a process has open stays readable to it: its files are mapped.
    """
    with contextlib.suppress(OSError):
        entries = [path for path in folder.iterdir() if not path.name.startswith(".")]
        entries.sort(key=lambda path: path.stat().st_mtime_ns)
        for path in entries[:-most]:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()


def _default_root() -> Path:
    chosen = os.environ.get("AGENTKV_CACHE")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA")
    return (Path(base) if base else Path.home() / ".cache") / "agentkv"
