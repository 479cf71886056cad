"""Every kernel compiles for sm_90, on a machine without a GPU: what Triton modules name in ``AOT``, and CUDA C++ where nvcc is.

An entry of ``AOT`` is (kernel, signature of its runtime arguments, its constexprs) and, where the launch gives any, its options
(num_warps, num_stages). A type that ends in ":16" is one of a multiple of 16 (an address, a stride), as Triton would specialise
it. One fresh process a family: what another test made of Triton there (its interpreter, say) cannot be seen.

A product whose operands hold ``kWidth`` numbers in a row in each of four threads must be that deep: Triton 3.6 compiles a
shallower one, whose sums are wrong (seen on an H200 in ``attend_sparse``, 2026-12-01).
"""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted(
    file for file in (ROOT / "flashstep" / "kernels").rglob("*.py") if "\nAOT" in file.read_text()
)
SOURCES = sorted((ROOT / "flashstep").rglob("*.cu"))
COMPILE = """
import importlib, re, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

for kernel, signature, constants, *options in importlib.import_module(sys.argv[1]).AOT:
    types = ["constexpr" if name in constants else signature[name] for name in kernel.arg_names]
    attributes = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types) if kind.endswith(":16")}
    arguments = {name: kind.removesuffix(":16") for name, kind in zip(kernel.arg_names, types, strict=True)}
    written_in = GluonASTSource if kernel.is_gluon() else ASTSource
    source = written_in(fn=kernel, signature=arguments, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(*options))
    dots = re.findall(r"tt\\.dot .*?: tensor<\\d+x(\\d+)x\\w+, #ttg\\.dot_op<.*?kWidth = (\\d+)", compiled.asm["ttgir"])
    for depth, width in dots:
        assert int(depth) >= 4 * int(width), f"{kernel.__name__} {constants}: depth {depth}, kWidth {width}"
    print(kernel.__name__, len(compiled.asm["cubin"]))
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("file", MODULES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_every_kernel_compiles_for_sm90(file: Path) -> None:
    module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, module], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    sizes = [int(line.split()[-1]) for line in done.stdout.splitlines()]
    assert sizes and min(sizes) > 0, done.stdout


def test_every_triton_module_says_what_to_compile() -> None:
    silent = [
        file
        for file in (ROOT / "flashstep" / "kernels").glob("*/*.py")
        if "@triton.jit" in file.read_text() and file not in MODULES
    ]
    assert not silent


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no CUDA compiler")
@pytest.mark.parametrize("source", SOURCES, ids=lambda file: file.stem)
def test_every_cuda_source_compiles_for_sm90(source: Path, tmp_path: Path) -> None:
    jit = pytest.importorskip("flashstep.kernels.jit")
    library = tmp_path / "kernels.so"
    jit.build(source, library)
    assert library.stat().st_size > 0


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no CUDA compiler")
def test_a_source_that_does_not_compile_is_refused_with_the_compilers_words(tmp_path: Path) -> None:
    jit = pytest.importorskip("flashstep.kernels.jit")
    source = tmp_path / "wrong.cu"
    source.write_text("this is no C++;")
    with pytest.raises(RuntimeError, match="nvcc refused"):
        jit.build(source, tmp_path / "wrong.so")
    assert not (tmp_path / "wrong.so").exists()
