"""Every op has a reference, a test file, a cost function and shapes in its docstring."""

import ast
import inspect
import re
from pathlib import Path

import pytest

from flashstep import kernels
from flashstep.kernels import TABLE
from flashstep.kernels.registry import Choice, Family, Implementation

ROOT = Path(__file__).parents[2]
OPS = sorted({row.op for row in TABLE})
FAMILIES = sorted({op.partition(".")[0] for op in OPS})


def door(family: str):
    return getattr(kernels, family)


def front(family: str) -> type[Family]:
    """The class of public ops in a family's front door."""
    (found,) = [
        value
        for _, value in inspect.getmembers(door(family), inspect.isclass)
        if issubclass(value, Family) and value is not Family
    ]
    return found


def functions(module: str) -> set[str]:
    """Functions at the top of ``module``, read and not imported: it may need a package that this machine lacks."""
    file = ROOT.joinpath(*module.split(".")).with_suffix(".py")
    return {
        node.name
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }


def test_every_family_folder_is_in_the_table() -> None:
    folders = {file.parent.name for file in (ROOT / "flashstep" / "kernels").glob("*/__init__.py")}
    assert folders == set(FAMILIES)


@pytest.mark.parametrize("op", OPS)
def test_the_reference_is_the_last_row_and_has_the_ops_name(op: str) -> None:
    rows: list[Implementation] = [row for row in TABLE if row.op == op]
    assert rows[-1].is_reference and not rows[-1].needs
    family = op.partition(".")[0]
    for row in rows:
        assert row.module.startswith(f"flashstep.kernels.{family}."), "an op is implemented in its own family"
        assert row.op.partition(".")[2] in functions(row.module), (
            "a row's module defines a function of the op's name"
        )
    assert callable(Choice(chosen=rows[-1], passed_over=()).load())


@pytest.mark.parametrize("op", OPS)
def test_the_front_door_states_shapes(op: str) -> None:
    family, _, name = op.partition(".")
    method = getattr(front(family), name)
    signature = inspect.signature(method)
    assert all(
        p.annotation is not inspect.Parameter.empty for n, p in signature.parameters.items() if n != "self"
    )
    text = inspect.getdoc(method) or ""
    assert re.search(r"\[[^\]]+\]", text), f"{op}: the docstring states no shape"


@pytest.mark.parametrize("op", [op for op in OPS if not op.partition(".")[2].startswith("prepare")])
def test_every_op_has_a_cost(op: str) -> None:
    """Bytes and FLOPs, beside the op. Preparing a weight happens once and is not timed."""
    family, _, name = op.partition(".")
    assert callable(getattr(door(family), f"{name}_cost", None)), f"{op}: no {name}_cost in the front door"


@pytest.mark.parametrize("op", OPS)
def test_every_op_is_tested(op: str) -> None:
    family, _, name = op.partition(".")
    file = ROOT / "tests" / "kernels" / f"test_{family}.py"
    assert file.is_file() and re.search(rf"\b{name}\b", file.read_text(encoding="utf-8")), (
        f"{op} is not tested in {file.name}"
    )
