"""Engram tables: rows are dequantised exactly wherever the planes live."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from flashstep.config.errors import ConfigError
from flashstep.engram.table import EngramTable

CPU = torch.device("cpu")
ROWS, CHANNELS = 50, 64


@pytest.fixture
def planes() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    values = (torch.randn(ROWS, CHANNELS, generator=generator) * 30).to(torch.float8_e4m3fn)
    scales = torch.randint(110, 140, (ROWS, CHANNELS // 32), generator=generator, dtype=torch.uint8)
    return values, scales.view(torch.float8_e8m0fnu)


def _expected(planes: tuple[torch.Tensor, torch.Tensor], ids: torch.Tensor) -> np.ndarray:
    values, scales = planes[0].float().numpy().astype(np.float64), planes[1].view(torch.uint8).numpy()
    return (values * np.exp2(scales.astype(np.float64) - 127).repeat(32, axis=1))[ids.numpy()]


@pytest.mark.parametrize("where", ["memory", "mmap"])
def test_rows(planes: tuple[torch.Tensor, torch.Tensor], where: str, tmp_path: Path) -> None:
    save_file({"weight": planes[0], "scale": planes[1]}, tmp_path / "t.safetensors")
    with safe_open(tmp_path / "t.safetensors", framework="pt") as file:
        table = EngramTable.place(
            file.get_tensor("weight"), file.get_tensor("scale"), where=where, device=CPU
        )
    ids = torch.tensor([[0, 49, 7], [7, 7, 3]])
    rows = table.rows(ids)
    assert rows.dtype is torch.bfloat16 and rows.shape == (2, 3, CHANNELS)
    assert np.array_equal(rows.double().numpy(), _expected(planes, ids))  # exact in bf16
    assert table.total_bytes == ROWS * (CHANNELS + CHANNELS // 32)
    assert table.rows(ids[:0]).shape == (0, 3, CHANNELS)


def test_memory_is_a_copy_and_mmap_is_not(planes: tuple[torch.Tensor, torch.Tensor]) -> None:
    copied = EngramTable.place(*planes, where="memory", device=CPU)
    mapped = EngramTable.place(*planes, where="mmap", device=CPU)
    before = copied.rows(torch.tensor([5]))
    planes[0].view(torch.uint8)[5] = 0
    assert torch.equal(copied.rows(torch.tensor([5])), before)
    assert not mapped.rows(torch.tensor([5])).any()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine can pin memory")
def test_pinned_is_refused_without_an_accelerator(planes: tuple[torch.Tensor, torch.Tensor]) -> None:
    with pytest.raises(ConfigError, match="no accelerator to pin memory for; use 'memory' or 'mmap'"):
        EngramTable.place(*planes, where="pinned", device=CPU)
