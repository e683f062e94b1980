"""Every Triton kernel compiled ahead of time, as its wrapper would launch it, without a GPU.

The wrappers run on CPU tensors with a recorder in the kernel's place. For the pinned triton the
resources of each kernel must equal those in compiled_kernels.json; `python tests/kernels/
test_compile.py` writes them anew.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from agentkv_kernels.scenario import Scenario, TreeSegment

pytest.importorskip("triton", reason="triton is missing, so its kernels cannot be compiled")
import triton
from agentkv_kernels import cache_ops, merge, tile_attention, tuning
from agentkv_kernels.device_tiles import NUM_NARROW, NUM_PREFILL, NUM_WIDE
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

pytestmark = pytest.mark.own_process(TRITON_INTERPRET="0")
GOLDEN = Path(__file__).with_name("compiled_kernels.json")
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# What a program may have; sm_80's tiles also run on its small siblings, which have 99 KB.
SHARED_BYTES = {"sm_80": 99 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
KINDS = {"narrow": NUM_NARROW, "wide": NUM_WIDE, "prefill": NUM_PREFILL}
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
# Query heads, KV heads, head dim: one shape for each line of the tuning table, and the default
# model's; then the others that the kernels are measured with.
SHAPES = [(32, 8, 128), (9, 3, 64), (16, 1, 256), (16, 2, 512)]
MORE_SHAPES = [(16, 8, 128), (28, 4, 128), (14, 2, 64), (32, 32, 128), (8, 2, 80)]


class Launch(NamedTuple):
    """A kernel and what a wrapper passed it."""

    kernel: Any  # Any: a triton.JITFunction
    arguments: dict[str, Any]  # Any: tensors, numbers, constexprs
    options: dict[str, Any]

    def compile(self, target: Any) -> Any:
        """The compiled kernel: `asm` by stage, `metadata`."""
        signature: dict[str, str] = {}
        constants: dict[str, Any] = {}
        attributes = {}
        for index, parameter in enumerate(self.kernel.params):
            name, value = parameter.name, self.arguments[parameter.name]
            if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
                signature[name], constants[name] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[name] = POINTERS[value.dtype]
                attributes[index,] = [["tt.divisibility", 16]]
            elif isinstance(value, float):
                signature[name] = "fp32"
            else:
                signature[name] = "i32" if value < 2**31 else "i64"
                if value % 16 == 0:
                    attributes[index,] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, signature, constants, attributes)
        return triton.compile(source, target=target, options=self.options)


class Recorder:
    """Stands in a module for its kernel and notes the launches."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.launches: list[Launch] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        names = self.kernel.arg_names

        def launch(*values: Any, **named: Any) -> None:
            arguments = dict(zip(names, values, strict=False)) | named
            options = {name: arguments.pop(name) for name in set(arguments) - set(names)}
            self.launches.append(Launch(self.kernel, arguments, options))

        return launch


def _record(patch: pytest.MonkeyPatch, module: Any, name: str) -> list[Launch]:
    recorder = Recorder(getattr(module, name))
    patch.setattr(module, name, recorder)
    return recorder.launches


def attention_launches(
    architecture: str, shape: tuple[int, int, int], dtype: torch.dtype, *, with_extras: bool = False
) -> dict[str, Launch]:
    """The launches of one attention call whose tiles are of all kinds, by kind, and the merge."""
    num_q_heads, num_kv_heads, dim = shape
    prefix = tuple(range(128))
    tables = [[*prefix, 130 + 2 * row, 131 + 2 * row] for row in range(65)] + [[*range(300, 308)]]
    scenario = Scenario(
        16,
        [1] * 65 + [100],
        [2065] * 65 + [117],
        tables,
        [TreeSegment(None, 0, prefix, tuple(range(65)))],
        400,
    )
    extras: dict[str, Any] = {}
    if with_extras:
        extras = {"softcap": 30.0, "sinks": torch.zeros(num_q_heads, dtype=dtype), "window": 2000}
    k_cache = torch.zeros(402, num_kv_heads, 16, dim, dtype=dtype)
    query = torch.zeros(165, num_q_heads, dim, dtype=dtype)

    def tuned(*_: object) -> tuple[tuning.Tuning, int]:
        return tuning.tuning_for(architecture, dim, dtype), 264

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tile_attention, "tuning_of", tuned)
        launches = _record(patch, tile_attention, "tile_attention_kernel")
        merges = _record(patch, merge, "_merge_kernel")
        tile_attention.paged_attention(
            query, k_cache, k_cache, scenario.plan(), scale=0.1, **extras
        )
    kinds = {number: kind for kind, number in KINDS.items()}
    found = {kinds[launch.arguments["KIND"]]: launch for launch in launches}
    return found | {"merge": merges[0]}


def cache_launches(dtype: torch.dtype) -> dict[str, Launch]:
    """The launches that write keys and copy blocks."""
    cache = torch.zeros(9, 3, 16, 64, dtype=dtype)
    new = torch.zeros(32, 3, 64, dtype=dtype)
    with pytest.MonkeyPatch.context() as patch:
        writes = _record(patch, cache_ops, "_write_kv_kernel")
        copies = _record(patch, cache_ops, "_copy_blocks_kernel")
        cache_ops.write_kv(new, new, cache, cache, torch.zeros(32, dtype=torch.int64))
        cache_ops.copy_blocks([cache, cache], [(0, 1, 5)])
    return {"write": writes[0], "copy": copies[0]}


def resources(compiled: Any) -> dict[str, int]:
    """Registers, bytes of stack (spills) and of shared memory, asynchronous loads and products."""
    if "amdgcn" in compiled.asm:
        notes = dict(re.findall(r"\.(vgpr_count|vgpr_spill_count|sgpr_spill_count):\s*(\d+)",
                                compiled.asm["amdgcn"]))  # fmt: skip
        spills = int(notes["vgpr_spill_count"]) + int(notes["sgpr_spill_count"])
        found = {"registers": int(notes["vgpr_count"]), "stack": spills}
        return found | {"shared": compiled.metadata.shared}
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        command = [str(tool), "-res-usage", cubin.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    counts = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert counts is not None, usage
    registers, stack, local = map(int, counts.groups())
    ptx = compiled.asm["ptx"]
    return {
        "registers": registers,
        "stack": stack + local,
        "shared": compiled.metadata.shared,
        "async_loads": len(re.findall(r"cp\.async\.c[ag]", ptx)),
        "products": len(re.findall(r"\bmma\.sync|wgmma\.mma_async|tcgen05\.mma", ptx)),
    }


class Case(NamedTuple):
    architecture: str
    kind: str
    shape: tuple[int, int, int] | None
    dtype: torch.dtype
    with_extras: bool = False

    @property
    def name(self) -> str:
        """What the golden file calls it."""
        parts = [self.architecture, self.kind, str(self.dtype).removeprefix("torch.")]
        if self.shape is not None:
            parts.append("x".join(map(str, self.shape)))
        return " ".join([*parts, *["softcap, sinks, window"] * self.with_extras])

    def launch(self) -> Launch:
        if self.shape is None:
            return cache_launches(self.dtype)[self.kind]
        launches = attention_launches(
            self.architecture, self.shape, self.dtype, with_extras=self.with_extras
        )
        return launches[self.kind]


def _cases(architecture: str) -> Iterator[Case]:
    bf16, float32 = torch.bfloat16, torch.float32
    for shape in SHAPES:
        tuned = tuning.tuning_for(architecture, shape[2], bf16)
        for kind in KINDS:
            # Where a wide tile is no larger than a narrow one, all are narrow.
            if kind != "wide" or tuned.wide.block_m > tuned.narrow.block_m:
                yield Case(architecture, kind, shape, bf16)
    for kind in KINDS:
        yield Case(architecture, kind, SHAPES[0], bf16, with_extras=True)
    for shape in (SHAPES[0], *SHAPES[2:]):
        yield Case(architecture, "narrow", shape, float32)
    yield Case(architecture, "prefill", SHAPES[0], float32)
    yield Case(architecture, "merge", SHAPES[0], bf16)
    for kind in ("write", "copy"):
        yield Case(architecture, kind, None, bf16)


def _more_cases(architecture: str) -> Iterator[Case]:
    for shape in MORE_SHAPES:
        for kind in KINDS:
            yield Case(architecture, kind, shape, torch.bfloat16)
    for kind in KINDS:
        yield Case(architecture, kind, SHAPES[0], torch.float16)


FAST = [case for name in ("sm_80", "sm_90") for case in _cases(name)]
SLOW = [
    *(case for name in ("sm_100", "gfx942") for case in _cases(name)),
    *(case for name in ("sm_80", "sm_90") for case in _more_cases(name)),
]


@pytest.fixture(autouse=True)
def compiled_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def _check(case: Case) -> None:
    launch = case.launch()
    compiled = launch.compile(TARGETS[case.architecture])
    found = resources(compiled)
    assert found["stack"] == 0, f"spills: {found}"
    assert found["shared"] <= SHARED_BYTES[case.architecture]
    is_attention = case.kind in KINDS
    is_pipelined = launch.options.get("num_stages", 1) > 1
    if is_attention and is_pipelined and "async_loads" in found:
        assert found["async_loads"] > 0
    if is_attention and case.dtype == torch.float32:
        assert "inputPrecision = tf32" not in compiled.asm["ttir"]
        assert found.get("products", 0) == 0, "float32 goes through tensor cores, rounded"
    narrow = re.findall(r"arith\.muli.*: (?:i32|tensor<[^>]*xi32>)", compiled.asm["ttir"])
    assert not narrow, "an offset is computed in 32 bits"
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    if triton.__version__ == golden["triton"]:
        assert found == golden["kernels"][case.name]


@pytest.mark.parametrize("case", FAST, ids=[case.name for case in FAST])
def test_a_kernel_compiles_without_spills_and_within_its_resources(case: Case) -> None:
    _check(case)


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.parametrize("case", SLOW, ids=[case.name for case in SLOW])
def test_a_kernel_compiles_for_more_shapes_and_architectures(case: Case) -> None:
    _check(case)


def test_every_line_of_the_tuning_table_is_compiled() -> None:
    compiled = {
        tuning.tuning_for(case.architecture, case.shape[2], case.dtype)
        for case in [*FAST, *SLOW]
        if case.shape is not None
    }
    assert compiled == {*tuning.TUNINGS.values(), *tuning.FLOAT32_TUNINGS.values()}


if __name__ == "__main__":
    measured = {
        case.name: resources(case.launch().compile(TARGETS[case.architecture]))
        for case in [*FAST, *SLOW]
    }
    content = {"triton": triton.__version__, "kernels": measured}
    GOLDEN.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
