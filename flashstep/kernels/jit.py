"""How kernels come to be launched: CUDA C++ sources built once, and launches that carry the programmatic-serialization attribute.

A kernel that waits for its producers' memory itself may be started while they still run (programmatic dependent launch, PDL): on
Hopper that hides a launch, before it the attribute only costs (issue 4). A CUDA source with a C interface becomes a shared
library in the user's cache, named by the hash of what it was built from. Knows devices, compilers and launches, no op.
"""

import contextlib
import ctypes
import functools
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

NVCC_FLAGS = (
    "-O3",
    "-std=c++17",
    "-shared",
    "-Xcompiler=-fPIC",
    "-gencode=arch=compute_90a,code=sm_90a",
)
FIRST_PROGRAMMATIC = 9  # compute capability, major


_allowed = True  # False only inside ``without_programmatic_launches``


def programmatic(device: torch.device) -> bool:
    """Whether a launch of a kernel with the prologue below carries the attribute on ``device``: from SM90 on, never before.

    The one place that decides. A kernel without the prologue never asks, nor does one for which it was measured not to pay.
    """
    return _allowed and device.type == "cuda" and _compute_capability(device) >= FIRST_PROGRAMMATIC


@contextlib.contextmanager
def without_programmatic_launches() -> Generator[None]:
    """Launch everything plainly inside: what ``flashstep bench pdl`` compares with."""
    global _allowed  # as the device is the process's
    before, _allowed = _allowed, False
    try:
        yield
    finally:
        _allowed = before


@functools.cache
def _compute_capability(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]  # noqa: TID251 - launches are decided here


@triton.jit
def wait_for_producers(PDL: tl.constexpr) -> None:
    """The prologue: let dependents start, then wait until everything earlier has finished and its writes are visible."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


def nvcc() -> str | None:
    """The CUDA compiler of this machine, or None."""
    return shutil.which("nvcc")


@functools.cache
def cuda_library(source: Path) -> ctypes.CDLL:
    """The library of the CUDA C++ file ``source``, built for sm_90a where the cache has none. ValueError without a compiler."""
    headers = [header.read_text() for header in sorted(source.parent.glob("*.cuh"))]
    digest = hashlib.sha256("\n".join((source.read_text(), *headers, *NVCC_FLAGS)).encode()).hexdigest()[:16]
    library = Path.home() / ".cache" / "flashstep" / f"{source.stem}-{digest}.so"
    if not library.is_file():
        build(source, library)
    return ctypes.CDLL(str(library))


def c_argument(value: Any) -> Any:
    """``value`` as a C launcher takes it: a tensor by its address, None as no address, a float, an int; C numbers as they are."""
    if value is None or isinstance(value, torch.Tensor):
        return ctypes.c_void_p(None if value is None else value.data_ptr())
    if isinstance(value, float):
        return ctypes.c_float(value)
    return ctypes.c_int(value) if isinstance(value, int) else value


def launched(what: str, error: int) -> None:
    """What every launcher's status goes through: ``RuntimeError`` if CUDA refused ``what``."""
    if error:
        raise RuntimeError(f"{what} did not launch: CUDA error {error}")


def build(source: Path, library: Path) -> None:
    """Compile ``source`` into ``library``; several processes may do so at once."""
    compiler = nvcc()
    if compiler is None:
        raise ValueError(f"{source.name} must be compiled and no nvcc was found; put CUDA's compiler on PATH")
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        done = subprocess.run(
            [compiler, *NVCC_FLAGS, "-o", str(made), str(source)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"nvcc refused {source}:\n{done.stderr[-4000:]}")
        made.replace(library)
