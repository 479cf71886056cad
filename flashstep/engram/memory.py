"""Host memory that a GPU can read: on a NUMA node, in pages of 2 MB, of one process or of all that serve from this host.

Takes sizes, gives uint8 tensors over the mapping, and refuses with what is missing and how to set it (``ConfigError``). A kernel
reads such a row itself over PCIe, and an address is translated for every request: rows far apart cost several times what rows
side by side do (in a virtual machine whatever the guest's pages are: docs/log.md). Knows no table.
"""

import atexit
import ctypes
import fcntl
import mmap
import os
import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from flashstep.config.errors import ConfigError

HUGE = 2 << 20
SUBJECT = "--engram-config"
THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
FREE = "hugepages/hugepages-2048kB/free_hugepages"
MOUNTS = Path("/proc/mounts")
MBIND, PREFERRED = 237, 1  # the system call (x86-64), and the policy: this node while it has pages
PORTABLE = 1  # cudaHostRegisterPortable
COMPLETE = b"flashstep: every row is here\n"


def private_memory(size: int, *, huge: bool, node: int | None) -> Tensor:
    """uint8 [size] of this process alone, on ``node``; ``huge``: in transparent huge pages, refused where the kernel has none."""
    if huge and "[never]" in _text(THP):
        raise ConfigError(
            SUBJECT,
            [f"use_thp is true and {THP} says never; `echo madvise > {THP}`, or leave use_thp out"],
        )
    mapping = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    start = -torch.frombuffer(mapping, dtype=torch.uint8).data_ptr() % HUGE
    memory = torch.frombuffer(mapping, dtype=torch.uint8, offset=start, count=size)
    _prefer(memory, node)
    return memory


def shared_memory(name: str, size: int, *, node: int | None, fill: Callable[[Tensor], None]) -> Tensor:
    """uint8 [size] of all processes that ask for ``name``: the first one calls ``fill``, the last one to end gives it back.

    It is a file of 2 MB pages (hugetlbfs). A process that is killed leaves it behind, complete, for the next one.
    """
    whole = -(-(size + len(COMPLETE)) // HUGE) * HUGE
    path = _huge_folder() / f"flashstep-{name}"
    if not path.exists():
        _check_free(whole, node)
    file, mapping = _opened(path, whole)
    memory = torch.frombuffer(mapping, dtype=torch.uint8, count=size)
    if mapping[size : size + len(COMPLETE)] != COMPLETE:
        fcntl.flock(file, fcntl.LOCK_EX)
        if mapping[size : size + len(COMPLETE)] != COMPLETE:  # nobody was faster
            _prefer(memory, node)
            fill(memory)
            mapping[size : size + len(COMPLETE)] = COMPLETE
        fcntl.flock(file, fcntl.LOCK_SH)
    atexit.register(_leave, file, path)
    return memory


def pin(memory: Tensor) -> None:
    """Let the GPU read ``memory`` where it lies, until ``unpin``."""
    result = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, PORTABLE)
    if int(result) != 0:
        reason = (
            f"the driver cannot pin {memory.nbytes} bytes of host memory (CUDA error {int(result)}); raise the limit of locked "
            "memory (`ulimit -l unlimited`), or keep the rows on the GPU: --engram-config '{\"cpu_offload\": false}'"
        )
        raise ConfigError(SUBJECT, [reason])


def unpin(memory: Tensor) -> None:
    """Undo ``pin``, before ``memory`` is given back: the driver would keep its addresses for pinned ones."""
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def _huge_folder() -> Path:
    """Where files of 2 MB pages live."""
    for line in _text(MOUNTS).splitlines():
        _, folder, kind, options, *_ = line.split()
        if kind == "hugetlbfs" and not re.search(r"pagesize=(?!2M|2048K)", options):
            return Path(folder)
    raise ConfigError(
        SUBJECT,
        [
            "dp_shared_memory needs a hugetlbfs with pages of 2 MB, and none is mounted; "
            "`mount -t hugetlbfs none /dev/hugepages`, or leave dp_shared_memory out"
        ],
    )


def _check_free(size: int, node: int | None) -> None:
    """Refuse where too few huge pages are reserved: a missing one would kill the process when it is touched."""
    where = Path("/sys/kernel/mm") if node is None else Path(f"/sys/devices/system/node/node{node}")
    text = _text(where / FREE).strip()
    free = int(text) if text.isdigit() else 0
    needed = size // HUGE
    if free < needed:
        place = "this host" if node is None else f"NUMA node {node}"
        raise ConfigError(
            SUBJECT,
            [
                f"a shared copy needs {needed} huge pages of 2 MB, and {place} has {free} free; `sysctl vm.nr_hugepages=N` "
                f"with at least {needed} for each layer's table, or leave dp_shared_memory out"
            ],
        )


def _opened(path: Path, size: int) -> tuple[int, mmap.mmap]:
    """``path``, held together with whoever else uses it, and mapped; a file that somebody removed meanwhile is not it.

    Waits for the one who fills it.
    """
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(file, fcntl.LOCK_SH)
        if os.fstat(file).st_nlink:
            break
        os.close(file)
    if os.fstat(file).st_size != size:
        os.ftruncate(file, size)
    return file, mmap.mmap(file, size)


def _leave(file: int, path: Path) -> None:
    """Remove the shared copy if nobody else holds it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    path.unlink(missing_ok=True)


def _prefer(memory: Tensor, node: int | None) -> None:
    """Let pages of ``memory`` that nobody has touched come of ``node``."""
    if node is None:
        return
    mask = ctypes.c_ulong(1 << node)
    start = memory.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size = memory.data_ptr() + memory.nbytes - start
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (start, size, PREFERRED, ctypes.addressof(mask), 64, 0)
    if libc.syscall(MBIND, *(ctypes.c_ulong(argument) for argument in arguments)) != 0:
        error = os.strerror(ctypes.get_errno())
        raise ConfigError(SUBJECT, [f"memory of NUMA node {node} cannot be asked for: {error}"])


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""
