"""The NUMA node of a GPU: read from the system, and said where it is not known."""

from pathlib import Path

import pytest
import torch

from flashstep.config.errors import ConfigError
from flashstep.runner import numa

CUDA = torch.device("cuda")


@pytest.fixture
def bus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(numa, "PCI", tmp_path)
    monkeypatch.setattr(numa, "NODES", tmp_path)
    (tmp_path / "online").write_text("0-1\n")
    monkeypatch.setattr(numa, "pci_address", lambda device: "0000:18:00.0")
    (tmp_path / "0000:18:00.0").mkdir()
    return tmp_path / "0000:18:00.0" / "numa_node"


def test_the_node_is_what_the_system_says(bus: Path) -> None:
    bus.write_text("1\n")
    assert numa.node_of(CUDA) == 1
    assert numa.node_of(torch.device("cpu")) is None


def test_of_one_node_it_is_that_one(bus: Path) -> None:
    bus.write_text("-1\n")
    (bus.parents[1] / "online").write_text("0\n")
    assert numa.node_of(CUDA) == 0


@pytest.mark.parametrize("text", ["-1\n", "", None])
def test_a_node_that_nobody_knows_is_refused(bus: Path, text: str | None) -> None:
    if text is not None:
        bus.write_text(text)
    assert numa.node_of(CUDA) is None
    with pytest.raises(ConfigError, match="does not tell the GPU's NUMA node"):
        numa.bind(CUDA)


def test_a_cpu_is_near_to_nothing() -> None:
    with pytest.raises(ConfigError, match="no GPU to be near to"):
        numa.bind(torch.device("cpu"))


def test_lists_of_numbers() -> None:
    assert numa.numbers_of("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
