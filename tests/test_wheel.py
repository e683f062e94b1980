"""The wheel holds both packages and imports from outside the repository."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_wheel_imports_from_outside_the_repository(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="builds the wheel without the network")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    wheels, target = tmp_path / "wheels", tmp_path / "target"
    build = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(wheels), str(ROOT)]
    subprocess.run([*pip, *build], check=True, cwd=tmp_path)
    (wheel,) = wheels.glob("agentkv-*.whl")
    install = ["install", "--quiet", "--no-deps", "--no-index", "--target", str(target), str(wheel)]
    subprocess.run([*pip, *install], check=True, cwd=tmp_path)
    code = "import agentkv, agentkv_kernels; print(agentkv.__file__, agentkv_kernels.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(target)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert all(Path(found).is_relative_to(target) for found in done.stdout.split())
