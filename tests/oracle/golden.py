"""Where the golden vectors are, the two golden checkpoints as the oracle reads them, and the recorded arrays."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from oracle.checkpoint import Checkpoint, load

ROOT = Path(__file__).resolve().parents[2]
VECTORS = ROOT.parent / "shared" / "vectors" / "model"
EXCERPT = ROOT / "tests" / "vectors" / "attention_excerpt.npz"
NAMES = ("a_base", "d_release_like")
LENGTHS = (1, 2, 3, 7, 31, 64, 129, 257)

needs_vectors = pytest.mark.skipif(not VECTORS.is_dir(), reason=f"the golden vectors are not at {VECTORS}")


@cache
def checkpoint(name: str) -> Checkpoint:
    return load(VECTORS / name / "ckpt", dtype=torch.float64)


@cache
def recorded(name: str, file: str) -> dict[str, np.ndarray]:
    with np.load(VECTORS / name / f"{file}.npz") as arrays:
        return {key: arrays[key] for key in arrays.files}


def as_mask(listed: np.ndarray, width: int) -> Tensor:
    """bool [T, width] of lists of indices [T, k] padded with -1."""
    index = torch.tensor(listed).long()
    mask = torch.zeros(len(index), width + 1, dtype=torch.bool)
    mask.scatter_(1, torch.where(index < 0, width, index), True)
    return mask[:, :width]


def unpacked(bits: np.ndarray, shape: np.ndarray) -> Tensor:
    """bool mask of packed bits and its true shape."""
    return torch.tensor(np.unpackbits(bits, axis=-1)[:, : shape[1]].astype(bool))
