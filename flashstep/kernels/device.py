"""Which device there is and what it can do: the only place that asks. Gives facts ("cuda", "sm90", ...); knows no kernel."""

import functools
import shutil

import torch

DEVICES = ("auto", "cpu", "cuda")
ANY_ORDER = "any_order"
NVCC = "nvcc"


def pick_device(name: str) -> torch.device:
    """The device that ``name`` (one of ``DEVICES``) means: "auto" is a CUDA device where there is one. ``ValueError``."""
    if name not in DEVICES:
        raise ValueError(f"device is {name!r}; allowed are {', '.join(DEVICES)}")
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ValueError("device is 'cuda', and this machine has no CUDA device; use 'cpu' or 'auto'")
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def memory_bytes(device: torch.device) -> int:
    """Memory of a CUDA ``device`` that nobody has taken yet."""
    assert device.type == "cuda"
    return torch.cuda.mem_get_info(device)[0]


def total_memory_bytes(device: torch.device) -> int:
    """All memory of a CUDA ``device``."""
    assert device.type == "cuda"
    return torch.cuda.mem_get_info(device)[1]


def pci_address(device: torch.device) -> str:
    """Where a CUDA ``device`` sits, as the system writes it: "0000:18:00.0"."""
    found = torch.cuda.get_device_properties(device)
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


def device_facts(device: torch.device, *, batch_invariant: bool = False) -> frozenset[str]:
    """The facts that a row of a kernel table may need; a CPU has none, so every op takes its reference there.

    ``ANY_ORDER`` holds unless ``batch_invariant``: sums may be taken in an order that depends on the number of rows. ``NVCC``
    holds where CUDA C++ can be built.
    """
    if device.type != "cuda":
        return frozenset()
    major, minor = torch.cuda.get_device_capability(device)  # noqa: TID251 - this is the place that asks
    facts = {"cuda", f"sm{major}{minor}"} | ({NVCC} if shutil.which(NVCC) else set())
    return frozenset(facts if batch_invariant else facts | {ANY_ORDER})


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors a CUDA ``device`` has; asked once, as launches ask on the way."""
    return torch.cuda.get_device_properties(device).multi_processor_count
