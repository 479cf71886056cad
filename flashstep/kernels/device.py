"""Which device there is and what it can do: the only place that asks. Gives facts ("cuda", "sm90", ...); knows no kernel."""

import torch

DEVICES = ("auto", "cpu", "cuda")


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


def device_facts(device: torch.device) -> frozenset[str]:
    """The facts that a row of a kernel table may need; a CPU has none, so every op takes its reference there."""
    if device.type != "cuda":
        return frozenset()
    major, minor = torch.cuda.get_device_capability(device)  # noqa: TID251 - this is the place that asks
    return frozenset({"cuda", f"sm{major}{minor}"})
