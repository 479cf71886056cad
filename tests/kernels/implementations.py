"""The implementations that a kernel test runs over: every row of the table that this device can run."""

from typing import Any

import pytest
import torch

from flashstep.kernels import choices
from flashstep.kernels.device import device_facts
from flashstep.kernels.registry import Choice, Family

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def families(kind: type[Family]) -> list[Any]:
    """One family object a module of ``kind``'s table that runs here, with the reference for ops that it lacks."""
    facts = device_facts(DEVICE)
    reference = {op: choice.load() for op, choice in choices(DEVICE, kernels="reference").items()}
    found = {}
    for row in kind.TABLE:
        if row.needs <= facts:
            found.setdefault(row.module, dict(reference))[row.op] = Choice(chosen=row, passed_over=()).load()
    return [pytest.param(kind(loaded), id=module.rpartition(".")[2]) for module, loaded in found.items()]
