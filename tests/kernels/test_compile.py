"""Every Triton kernel compiles for sm_90, on a machine without a GPU: the variants that each family's module names in ``AOT``.

An entry of ``AOT`` is (kernel, signature of its runtime arguments, its constexprs) and, where the launch gives any, its options
(num_warps, num_stages). A type that ends in ":16" is one of a multiple of 16 (an address, a stride), as Triton would specialise
it. One fresh process a family: what another test made of Triton there (its interpreter, say) cannot be seen.

A product whose operands hold ``kWidth`` numbers in a row in each of four threads must be that deep: Triton 3.6 compiles a
shallower one, whose sums are wrong (seen on an H200 in ``attend_sparse``, 2026-12-01).
"""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "flashstep" / "kernels").glob("*/triton.py"))
COMPILE = """
import importlib, re, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

for kernel, signature, constants, *options in importlib.import_module(sys.argv[1]).AOT:
    types = ["constexpr" if name in constants else signature[name] for name in kernel.arg_names]
    attributes = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types) if kind.endswith(":16")}
    arguments = {name: kind.removesuffix(":16") for name, kind in zip(kernel.arg_names, types, strict=True)}
    source = ASTSource(fn=kernel, signature=arguments, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(*options))
    dots = re.findall(r"tt\\.dot .*?: tensor<\\d+x(\\d+)x\\w+, #ttg\\.dot_op<.*?kWidth = (\\d+)", compiled.asm["ttgir"])
    for depth, width in dots:
        assert int(depth) >= 4 * int(width), f"{kernel.__name__} {constants}: depth {depth}, kWidth {width}"
    print(kernel.__name__, len(compiled.asm["cubin"]))
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("file", MODULES, ids=lambda file: file.parent.name)
def test_every_kernel_compiles_for_sm90(file: Path) -> None:
    module = f"flashstep.kernels.{file.parent.name}.triton"
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, module], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    sizes = [int(line.split()[-1]) for line in done.stdout.splitlines()]
    assert sizes and min(sizes) > 0, done.stdout
