"""Rotary frequencies of the two layer kinds, as tables made at build (spec/model.md 3.2).

Window-only layers: base ``rope_theta``, unscaled. Every layer that reads compressed KV: base ``compress_rope_theta`` with YaRN
blending, always applied, also to its window; no magnitude correction.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from flashstep.config.model import ModelConfig


class Angles(NamedTuple):
    """Whose angles a forward works out for all layers: frequencies fp32 [A, R/2], and how far behind its row each one stands."""

    frequencies_AP: Tensor
    back_A: Tensor


WINDOW, COMPRESSED, PAIR = range(
    3
)  # window-only layers; layers with compressed KV; an entry of two tokens, at its first


def angles_of(window_P: Tensor, compressed_P: Tensor, *, device: torch.device) -> Angles:
    """The three kinds of angles, of the frequencies of the two layer kinds."""
    return Angles(
        frequencies_AP=torch.stack((window_P, compressed_P, compressed_P)).to(device),
        back_A=torch.tensor([0, 0, 1], device=device),
    )


def window_frequencies(config: ModelConfig) -> Tensor:
    """fp32 [R/2] for ratio-0 layers: theta^(-2i/R)."""
    return _plain(config.rope_theta, config.qk_rope_head_dim).float()


def compressed_frequencies(config: ModelConfig) -> Tensor:
    """fp32 [R/2] for layers that read compressed KV: YaRN's blend of w and w / factor over a ramp of channel pairs."""
    scaling, dim, base = config.rope_scaling, config.qk_rope_head_dim, config.compress_rope_theta

    def border(beta: float) -> float:
        turns = scaling.original_max_position_embeddings / (2 * math.pi * beta)
        return dim * math.log(turns) / (2 * math.log(base))

    low = max(math.floor(border(scaling.beta_fast)), 0)
    high = min(math.ceil(border(scaling.beta_slow)), dim - 1)
    pair = torch.arange(dim // 2, dtype=torch.float64)
    ramp = ((pair - low) / max(high - low, 1e-3)).clamp(0, 1)
    plain = _plain(base, dim)
    return (plain / scaling.factor * ramp + plain * (1 - ramp)).float()


def _plain(base: float, dim: int) -> Tensor:
    """float64: rounded to fp32 once, by the caller."""
    return base ** (-2 * torch.arange(dim // 2, dtype=torch.float64) / dim)
