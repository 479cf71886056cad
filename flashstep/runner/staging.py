"""Numbers between host and device that nobody waits for on the way: pinned memory, and an event where the host needs the answer.

The pinned blocks are torch's: its host allocator gives one out again only when the copy from or to it has finished.
"""

import numpy as np
import torch
from torch import Tensor


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """``array`` on ``device``; on a CUDA device the copy is queued behind what the current stream has to do."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def send(numbers: Tensor, into: Tensor) -> None:
    """Write ``numbers``, which lie on the host, into a tensor of their shape; queued as above."""
    into.copy_(numbers if into.device.type == "cpu" else numbers.pin_memory(), non_blocking=True)


class Returning:
    """A tensor's numbers on their way to the host, as they are when the current stream comes to this point."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensor.device.type == "cpu":
            self._here = tensor.clone()
            return
        self._here = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._here.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def wait(self) -> np.ndarray:
        """The numbers, when they are here."""
        if self._event is not None:
            self._event.synchronize()
        return self._here.numpy()
