"""The NUMA node of a GPU, and a process kept on it: what a kernel reads over PCIe should not come from another socket first.

Takes a device; reads what the system says of its PCI address. Where the node is not known, it says so (``ConfigError``).
"""

import ctypes
import os
from pathlib import Path

import torch

from flashstep.config.errors import ConfigError
from flashstep.kernels.device import pci_address

SUBJECT = "--numa-bind"
PCI, NODES = Path("/sys/bus/pci/devices"), Path("/sys/devices/system/node")
SET_MEMPOLICY, BIND = 238, 2  # the system call (x86-64), and the policy: these nodes and no others


def node_of(device: torch.device) -> int | None:
    """The node that ``device`` hangs on; None on a CPU, and where the system has several and does not say."""
    if device.type != "cuda":
        return None
    try:
        nodes = numbers_of((NODES / "online").read_text())
        node = int((PCI / pci_address(device) / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    if len(nodes) == 1:
        return nodes.pop()
    return node if node >= 0 else None


def bind(device: torch.device) -> None:
    """Keep this process, all threads that it has and will have, on the cores and in the memory of the node of ``device``."""
    if device.type != "cuda":
        raise ConfigError(SUBJECT, ["the device is the CPU: there is no GPU to be near to; leave it out"])
    node = node_of(device)
    if node is None:
        file = PCI / pci_address(device) / "numa_node"
        raise ConfigError(
            SUBJECT, [f"{file} does not tell the GPU's NUMA node; leave it out, or start with numactl"]
        )
    cores = numbers_of((NODES / f"node{node}" / "cpulist").read_text())
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)
    mask = ctypes.c_ulong(1 << node)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(SET_MEMPOLICY, BIND, ctypes.byref(mask), ctypes.c_ulong(64)) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise ConfigError(SUBJECT, [f"memory cannot be bound to NUMA node {node}: {reason}; leave it out"])


def numbers_of(text: str) -> set[int]:
    """What a list such as "0-3,8" names."""
    ranges = [part.split("-") for part in text.strip().split(",") if part]
    return {number for first, *last in ranges for number in range(int(first), int((last or [first])[0]) + 1)}
