"""mHC in CUDA C++ for Hopper (boundary.cu): a boundary, an entrance and an exit are one launch each.

Of a site's projection two bf16 terms are kept (an error of 2^-18 of each weight); everything else is fp32 until it is stored.
A row's result depends neither on its neighbours nor on how many there are. Four streams, and up to 5,120 channels.
"""

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashstep.kernels.jit import cuda_library, launched, programmatic
from flashstep.kernels.mhc import Entered, Hidden, triton

SOURCE = Path(__file__).with_name("boundary.cu")
STREAMS, GROUP, MOST_CHANNELS = 4, 32, 5120
SETS, SET_ROWS = 2, 8  # rows of a cluster in one turn
COEFFICIENTS = 2 * STREAMS + STREAMS * STREAMS
MOST_VALUES = 2**32  # of the streams: offsets are 32 bits wide

_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_UNSIGNED = ctypes.c_uint32


class _Arguments(ctypes.Structure):
    """``Arguments`` of boundary.cu."""

    _fields_ = (
        ("y", _POINTER),
        ("x", _POINTER),
        ("x_row", _LONG),
        ("x_stream", _LONG),
        ("coefficients", _POINTER),
        ("coefficients_row", _LONG),
        ("projection", _POINTER),
        ("base", _POINTER),
        ("scale", _POINTER),
        ("weight", _POINTER),
        ("out", _POINTER),
        ("next", _POINTER),
        ("plain", _POINTER),
        ("quantised", _POINTER),
        ("mean", _POINTER),
        ("rows", _UNSIGNED),
        ("width", _UNSIGNED),
        ("span", _UNSIGNED),
        ("iterations", _INT),
        ("eps", _FLOAT),
        ("norm_eps", _FLOAT),
        ("inverse_width", _FLOAT),
    )


def prepare_site(
    fn: Tensor,
    *,
    base_M: Tensor,
    scale_3: Tensor,
    norm_D: Tensor,
    iterations: int,
    eps: float,
    norm_eps: float,
) -> triton.PreparedSite:
    """See ``Mhc.prepare_site``: as stored. The library is built here already, not in the first forward or in a capture."""
    width = norm_D.shape[0]
    assert fn.shape == (COEFFICIENTS, STREAMS * width) and width % GROUP == 0 and width <= MOST_CHANNELS, (
        f"boundary.cu takes {STREAMS} streams of at most {MOST_CHANNELS} channels in groups of {GROUP}; "
        f"the projection is {tuple(fn.shape)} and the norm {width}"
    )
    _clusters(fn.device)
    return triton.prepare_site(
        fn,
        base_M=base_M,
        scale_3=scale_3,
        norm_D=norm_D,
        iterations=iterations,
        eps=eps,
        norm_eps=norm_eps,
    )


def enter(x_TSD: Tensor, pre_TS: Tensor, site: Any, *, mean: bool) -> Entered:
    """See ``Mhc.enter``."""
    return _launch_boundary(None, x_TSD, pre_TS, site, mean=mean)[1]


def boundary(
    y_TD: Tensor, x_TSD: Tensor, coefficients_TM: Tensor, site: Any, *, mean: bool
) -> tuple[Tensor, Entered]:
    """See ``Mhc.boundary``."""
    out_TSD, entered = _launch_boundary(y_TD.contiguous(), x_TSD, coefficients_TM, site, mean=mean)
    assert out_TSD is not None
    return out_TSD, entered


def leave(
    y_TD: Tensor,
    x_TSD: Tensor,
    coefficients_TM: Tensor,
    norm_D: Tensor,
    *,
    norm_eps: float,
    rows_R: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """See ``Mhc.leave``."""
    rows, _, width = x_TSD.shape
    count = rows if rows_R is None else rows_R.shape[0]
    hidden_RD, normed_RD = x_TSD.new_empty((count, width)), x_TSD.new_empty((count, width))
    if count:
        y_TD, x_TSD = y_TD.contiguous(), _aligned(x_TSD)
        coefficients_TM = _aligned(coefficients_TM)
        rows_R = None if rows_R is None else rows_R.contiguous()
        arguments = _Arguments(
            y=y_TD.data_ptr(),
            x=x_TSD.data_ptr(),
            x_row=x_TSD.stride(0),
            x_stream=x_TSD.stride(1),
            coefficients=coefficients_TM.data_ptr(),
            coefficients_row=coefficients_TM.stride(0),
            weight=norm_D.data_ptr(),
            out=hidden_RD.data_ptr(),
            plain=normed_RD.data_ptr(),
            rows=rows,
            width=width,
            norm_eps=norm_eps,
            inverse_width=1 / width,
        )
        chosen = None if rows_R is None else _POINTER(rows_R.data_ptr())
        error = cuda_library(SOURCE).flashstep_leave(
            ctypes.byref(arguments), chosen, count, int(programmatic(x_TSD.device)), _cuda_stream(x_TSD)
        )
        launched("flashstep_leave", error)
    return hidden_RD, normed_RD


def _launch_boundary(
    y_TD: Tensor | None, x_TSD: Tensor, coefficients_TM: Tensor, site: Any, *, mean: bool
) -> tuple[Tensor | None, Entered]:
    """Without ``y_TD`` nothing is written, and only the first S columns of ``coefficients_TM`` are read."""
    rows, _, width = x_TSD.shape
    out_TSD = None if y_TD is None else x_TSD.new_empty(x_TSD.shape)
    next_TM = x_TSD.new_empty((rows, COEFFICIENTS), dtype=torch.float32)
    plain_TD, quantised_TD = x_TSD.new_empty((rows, width)), x_TSD.new_empty((rows, width))
    mean_TD = x_TSD.new_empty((rows, width)) if mean else None
    if rows:
        x_TSD, coefficients_TM = _aligned(x_TSD), _aligned(coefficients_TM)
        assert x_TSD.numel() < MOST_VALUES
        most = _clusters(x_TSD.device)
        span = SET_ROWS if rows <= SET_ROWS * most else SETS * SET_ROWS
        arguments = _Arguments(
            y=None if y_TD is None else y_TD.data_ptr(),
            x=x_TSD.data_ptr(),
            x_row=x_TSD.stride(0),
            x_stream=x_TSD.stride(1),
            coefficients=coefficients_TM.data_ptr(),
            coefficients_row=coefficients_TM.stride(0),
            projection=site.projection.data_ptr(),
            base=site.base.data_ptr(),
            scale=site.scale.data_ptr(),
            weight=site.norm_D.data_ptr(),
            out=None if out_TSD is None else out_TSD.data_ptr(),
            next=next_TM.data_ptr(),
            plain=plain_TD.data_ptr(),
            quantised=quantised_TD.data_ptr(),
            mean=None if mean_TD is None else mean_TD.data_ptr(),
            rows=rows,
            width=width,
            span=span,
            iterations=site.iterations,
            eps=site.eps,
            norm_eps=site.norm_eps,
            inverse_width=1 / width,
        )
        clusters = min(most, -(-rows // span))
        error = cuda_library(SOURCE).flashstep_boundary(
            ctypes.byref(arguments), clusters, int(programmatic(x_TSD.device)), _cuda_stream(x_TSD)
        )
        launched("flashstep_boundary", error)
    return out_TSD, Entered(next_TM, Hidden(plain_TD, quantised_TD), mean_TD)


@functools.cache
def _clusters(device: torch.device) -> int:
    """Clusters of 16 blocks that run on ``device`` at once."""
    with torch.cuda.device(device):
        clusters = cuda_library(SOURCE).flashstep_boundary_clusters()
    assert clusters > 0, f"no cluster of 16 blocks fits on {device} (CUDA error {-clusters})"
    return clusters


def _cuda_stream(x: Tensor) -> ctypes.c_void_p:
    return _POINTER(torch.cuda.current_stream(x.device).cuda_stream)


def _aligned(x: Tensor) -> Tensor:
    """``x``, or a copy of it where the kernels' loads of 16 bytes would not be aligned."""
    size = 16 // x.element_size()
    fits = x.stride(-1) == 1 and all(step % size == 0 for step in x.stride()[:-1])
    return x if fits and x.data_ptr() % 16 == 0 else x.contiguous()
