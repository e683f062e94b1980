"""Which implementation runs where, and that none of it needs triton to be there."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from agentkv_kernels import launch, tuning
from agentkv_kernels.scenario import random_tree

GPU = torch.device("cuda", 0)
WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch
from agentkv_kernels import launch
from agentkv_kernels.scenario import random_tree
scenario = random_tree(1)
k_cache, v_cache = scenario.caches(1, 8)
query = torch.ones(5, 2, 8)
out = launch.paged_attention(query, k_cache, v_cache, scenario.plan(), scale=1.0)
assert not out.isnan().any()
assert not launch.runs_triton(query.device)
"""


@pytest.fixture(autouse=True)
def forgotten_choice() -> Iterator[None]:
    """No choice made for a device that a test pretends to have outlives it."""
    launch.runs_triton.cache_clear()
    yield
    launch.runs_triton.cache_clear()


def test_kernels_import_and_run_where_triton_is_missing() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_TRITON], check=True)


def test_importing_the_launcher_imports_no_triton() -> None:
    code = "import sys, agentkv_kernels.launch; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ((7, 5), None),
        ((8, 0), "sm_80"),
        ((8, 9), "sm_80"),
        ((9, 0), "sm_90"),
        ((10, 3), "sm_100"),
        ((12, 0), "sm_80"),
        ((13, 0), None),
    ],
)
def test_a_gpu_gets_the_tiles_of_its_kind_or_the_reference(
    capability: tuple[int, int], name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert tuning.architecture(GPU) == name
    assert launch.runs_triton(GPU) == (name is not None and "linux" in sys.platform)


@pytest.mark.parametrize(("gcn", "name"), [("gfx942:sramecc+", "gfx942"), ("gfx1100", None)])
def test_an_amd_gpu_runs_the_kernels_if_it_has_matrix_cores_of_that_kind(
    gcn: str, name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(gcnArchName=gcn)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert tuning.architecture(GPU) == name


def test_a_gpu_without_triton_runs_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(launch, "find_spec", lambda name: None)
    assert not launch.runs_triton(GPU)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_other_devices_do_not_run_triton(device: str) -> None:
    assert not launch.runs_triton(torch.device(device))


def test_heads_beyond_the_table_are_left_to_other_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="at most 512"):
        tuning.tuning_for("sm_90", 513, torch.bfloat16)
    # Were Triton chosen, it would be compiled for a CPU tensor, and fail.
    monkeypatch.setattr(launch, "runs_triton", lambda device: True)
    scenario = random_tree(2, num_rows=2, depth=1)
    k_cache, v_cache = scenario.caches(1, 513)
    plan = scenario.plan()
    out = launch.paged_attention(torch.randn(2, 1, 513), k_cache, v_cache, plan, scale=0.1)
    assert out.isfinite().all()
