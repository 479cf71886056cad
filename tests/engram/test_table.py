"""Engram tables: the same rows wherever they lie; a shared copy is made once and outlives nobody."""

import multiprocessing
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from flashstep.config.engram import Place
from flashstep.config.errors import ConfigError
from flashstep.engram import memory
from flashstep.engram.table import EngramTable

CPU = torch.device("cpu")
ROWS, CHANNELS = 50, 64


@pytest.fixture
def planes() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    values = (torch.randn(ROWS, CHANNELS, generator=generator) * 30).to(torch.float8_e4m3fn)
    scales = torch.randint(110, 140, (ROWS, CHANNELS // 32), generator=generator, dtype=torch.uint8)
    return values, scales.view(torch.float8_e8m0fnu)


@pytest.fixture
def huge_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of small pages in the place of hugetlbfs."""
    monkeypatch.setattr(memory, "_huge_folder", lambda: tmp_path)
    monkeypatch.setattr(memory, "_check_free", lambda size, node: None)
    return tmp_path


def same(table: EngramTable, planes: tuple[Tensor, Tensor]) -> bool:
    return all(
        torch.equal(mine, theirs.view(torch.uint8)) for mine, theirs in zip(table.planes, planes, strict=True)
    )


@pytest.mark.parametrize("where", [Place.MEMORY, Place.MAPPED, Place.DEVICE])
def test_rows(planes: tuple[Tensor, Tensor], where: Place, tmp_path: Path) -> None:
    save_file({"weight": planes[0], "scale": planes[1]}, tmp_path / "t.safetensors")
    with safe_open(tmp_path / "t.safetensors", framework="pt") as file:
        table = EngramTable.place(file.get_tensor("weight"), file.get_tensor("scale"), where, device=CPU)
    assert same(table, planes)
    assert table.total_bytes == ROWS * (CHANNELS + CHANNELS // 32)


def test_memory_is_a_copy_and_mmap_is_not(planes: tuple[Tensor, Tensor]) -> None:
    copied = EngramTable.place(*planes, Place.MEMORY, device=CPU)
    mapped = EngramTable.place(*planes, Place.MAPPED, device=CPU)
    before = copied.planes[0].clone()
    planes[0].view(torch.uint8)[5] = 0
    assert torch.equal(copied.planes[0], before)
    assert same(mapped, planes) and not same(copied, planes)


def test_a_copy_keeps_a_row_in_one_place(planes: tuple[Tensor, Tensor]) -> None:
    """One page a row, and pages of 2 MB where the kernel has them: the mapping begins at one."""
    values, scales = EngramTable.place(*planes, Place.MEMORY, device=CPU, huge=True).planes
    assert scales.data_ptr() - values.data_ptr() == CHANNELS
    assert values.stride(0) == scales.stride(0) == CHANNELS + CHANNELS // 32
    assert values.data_ptr() % memory.HUGE == 0


def test_huge_pages_that_the_kernel_has_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "enabled").write_text("always madvise [never]")
    monkeypatch.setattr(memory, "THP", tmp_path / "enabled")
    with pytest.raises(ConfigError, match=r"use_thp is true and .* says never; `echo madvise"):
        memory.private_memory(1 << 20, huge=True, node=None)


def test_a_shared_copy_is_filled_once(huge_folder: Path) -> None:
    filled = []

    def fill(room: Tensor) -> None:
        filled.append(1)
        room.fill_(7)

    first = memory.shared_memory("x", 1000, node=None, fill=fill)
    second = in_another_process(reader, huge_folder)
    assert filled == [1] and second == 7 * 1000 and int(first.long().sum()) == 7 * 1000
    assert (huge_folder / "flashstep-x").exists(), "the other process ended, and this one still holds it"


def test_the_last_one_removes_a_shared_copy(huge_folder: Path) -> None:
    assert in_another_process(reader, huge_folder) == 1000
    assert not list(huge_folder.iterdir())


def test_a_copy_that_was_never_finished_is_filled_again(huge_folder: Path) -> None:
    (huge_folder / "flashstep-x").write_bytes(b"half")
    assert in_another_process(reader, huge_folder) == 1000


def in_another_process(target: Callable, folder: Path) -> int:
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    process = context.Process(target=target, args=(folder, answer))
    process.start()
    found = answer.get(timeout=60)
    process.join()
    return found


def reader(folder: Path, answer: multiprocessing.Queue) -> None:
    """Takes the copy that is there, or fills it with ones; a process of multiprocessing runs no exit handlers of its own."""
    memory._huge_folder, memory._check_free = lambda: folder, lambda size, node: None
    room = memory.shared_memory("x", 1000, node=None, fill=lambda room: room.fill_(1))
    answer.put(int(room.long().sum()))
    answer.close()
    answer.join_thread()
    memory.atexit._run_exitfuncs()


def test_shared_memory_needs_huge_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mounts").write_text("none /big hugetlbfs rw,pagesize=1024M 0 0\nproc /proc proc rw 0 0\n")
    monkeypatch.setattr(memory, "MOUNTS", tmp_path / "mounts")
    with pytest.raises(ConfigError, match="none is mounted; `mount -t hugetlbfs"):
        memory.shared_memory("x", 1000, node=None, fill=lambda room: None)
    (tmp_path / "mounts").write_text(f"none {tmp_path} hugetlbfs rw,pagesize=2M 0 0\n")
    monkeypatch.setattr(memory, "FREE", "no/such/file")
    with pytest.raises(ConfigError, match=r"needs 49 huge pages of 2 MB, and this host has 0 free"):
        memory.shared_memory("x", 49 * memory.HUGE - 100, node=None, fill=lambda room: None)
