"""Weights are handed out once, in the form that was asked for, by name."""

import pytest
import torch

from flashstep.model.parameters import Parameters
from flashstep.quant.tensor import FP8_BLOCK, QuantTensor


def test_names_that_nobody_took_are_told() -> None:
    parameters = Parameters({"b": torch.zeros(1), "a": torch.zeros(1), "c": torch.zeros(1)})
    parameters.plain("b")
    assert parameters.left_over() == ["a", "c"]


def test_a_missing_or_wrongly_formed_weight_is_named() -> None:
    parameters = Parameters(
        {"plain": torch.zeros(1), "packed": QuantTensor.quantise(torch.ones(32, 32), FP8_BLOCK)}
    )
    with pytest.raises(ValueError, match="gone"):
        parameters.plain("gone")
    with pytest.raises(ValueError, match="packed came quantised"):
        parameters.plain("packed")
    with pytest.raises(ValueError, match="plain came unquantised"):
        parameters.quantised("plain")
