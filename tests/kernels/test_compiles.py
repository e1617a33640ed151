"""The kernels compile for Hopper on a machine without a GPU, use TMA and tensor cores, and keep logits in registers.

Triton's own assembler says how many bytes of a thread's stack are spilled registers; measurements on a GPU
(benchmarks/logprob_head.py) say what that costs. Slow: each compilation takes some seconds.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter does not compile", allow_module_level=True)

HOPPER_STACK = 96  # bytes, of the forward kernel; with one stage less it spills none and is slower


def compiled(kernel, tile, flags):
    """(PTX, binary) with the divisibility that sizes of a real model have."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names, sizes = [p.name for p in kernel.params], tile.constants()
    constants = {"HAS_BIAS": False, "HAS_ENTROPY": True, "PROGRAMS": 132, "bias": None, **sizes, **flags}
    constants |= {} if flags["HAS_T"] else {"inverse": None}
    constants = {name: value for name, value in constants.items() if name in names}
    kinds = dict.fromkeys(names, "*fp32") | dict.fromkeys(("M", "N", "K", "v0"), "i32")
    kinds |= {
        "stride": "i32",
        "n": "i32",
        "TILES": "i32",
        "stride_h": "i32",
        "stride_w": "i32",
        "stride_out": "i32",
        "target": "*i64",
        "cap": "fp32",
        "out": "*bf16",
    }
    for name, rows in (("h", tile.m), ("w", tile.n)):
        kinds[name] = f"tensordesc<bf16[{rows},{tile.k}]>" if flags["TMA"] else "*bf16"
    aligned = [i for i, n in enumerate(names) if n not in constants and kinds[n][0] in "*i"]
    source = ASTSource(
        fn=kernel,
        signature={n: "constexpr" if n in constants else kinds[n] for n in names},
        constexprs=constants,
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return found.asm["ptx"], found.asm["cubin"]


def stack(cubin: bytes, folder: Path) -> int | None:
    """None if this Triton does not bring the tool that reads it."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        return None
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    text = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True).stdout
    return max(int(word.removeprefix("STACK:")) for word in text.split() if word.startswith("STACK:"))


@pytest.mark.parametrize("tma", [True, False], ids=["TMA", "pointers"])
@pytest.mark.parametrize("changes", [{}, {"HAS_T": True}, {"HAS_CAP": True}], ids=["plain", "temperature", "soft-cap"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_products_compile_for_hopper(direction, changes, tma, tmp_path):
    from kernels import logprob_triton as head

    kernel = head._statistics_kernel if direction == "forward" else head._d_logits_kernel
    ptx, cubin = compiled(kernel, head.TILE, {"HAS_T": False, "HAS_CAP": False, "TMA": tma} | changes)
    assert "wgmma.mma_async" in ptx
    assert ("cp.async.bulk.tensor" in ptx) == tma
    if tma and (spilled := stack(cubin, tmp_path)) is not None:
        assert spilled <= HOPPER_STACK


def test_row_kernels_compile_and_read_a_block_before_they_write_over_it():
    from kernels import logprob_triton
    from kernels import policy_loss_triton as rows
    from kernels.logprob_triton import Tile

    flags = {"HAS_T": False, "HAS_CAP": False, "TMA": False, "BLOCK": rows.BLOCK}
    ptx, _ = compiled(rows._row_statistics_kernel, Tile(0, 0, 0), flags)
    assert "ex2.approx" in ptx
    blocks = {"BLOCK_M": 32, "BLOCK_T": 32}
    assert "ex2.approx" in compiled(logprob_triton._combine_kernel, Tile(0, 0, 0), flags | blocks)[0]
    assert "st.global" in compiled(rows._scale_kernel, Tile(0, 0, 0), flags)[0]
    ptx, _ = compiled(rows._row_gradients_kernel, Tile(0, 0, 0), flags)
    loop = ptx[ptx.index("ld.global.v4") if "ld.global.v4" in ptx else ptx.index("ld.global") :]
    assert loop.index("bar") < loop.index("st.global"), "no barrier between the reads and the writes of a block"
