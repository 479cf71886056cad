"""What this device can do: the only place that asks. Gives a set of facts ("cuda", "sm90", ...); knows no kernel."""

import torch


def device_facts(device: torch.device) -> frozenset[str]:
    """The facts that a row of a kernel table may need; a CPU has none, so every op takes its reference there."""
    if device.type != "cuda":
        return frozenset()
    major, minor = torch.cuda.get_device_capability(device)  # noqa: TID251 - this is the place that asks
    return frozenset({"cuda", f"sm{major}{minor}"})
