"""What every CUDA launcher is given and what becomes of its status."""

import ctypes

import pytest
import torch

jit = pytest.importorskip("flashstep.kernels.jit")


def test_arguments_become_what_c_takes() -> None:
    tensor = torch.arange(3)
    assert jit.c_argument(tensor).value == tensor.data_ptr()
    assert jit.c_argument(None).value is None
    assert isinstance(jit.c_argument(1.0), ctypes.c_float) and isinstance(jit.c_argument(7), ctypes.c_int)
    wide = ctypes.c_int64(1 << 40)
    assert jit.c_argument(wide) is wide


def test_a_refused_launch_is_an_error_and_names_the_launcher() -> None:
    jit.launched("linear", 0)
    with pytest.raises(RuntimeError, match="linear did not launch: CUDA error 912"):
        jit.launched("linear", 912)
