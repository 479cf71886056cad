"""The table: rows in order, the reference last, reasons for what was passed over, and the switch."""

import pytest
import torch

from flashstep.kernels import TABLE, Ops, choices, choose_ops
from flashstep.kernels.__main__ import main
from flashstep.kernels.device import device_facts
from flashstep.kernels.registry import Family, Implementation, Switch, choose

CPU = torch.device("cpu")
FAST = Implementation(op="f.x", module="k.f.cuda", needs=frozenset({"sm90"}))
PORTABLE = Implementation(op="f.x", module="k.f.triton", needs=frozenset({"cuda"}))
REFERENCE = Implementation(op="f.x", module="k.f.reference")
ROWS = (FAST, PORTABLE, REFERENCE)


def chosen(facts: set[str], switch: Switch) -> tuple[str, list[str]]:
    choice = choose(ROWS, facts=frozenset(facts), switch=switch)["f.x"]
    return choice.chosen.module, [reason for _, reason in choice.passed_over]


def test_the_first_row_that_fits_is_chosen() -> None:
    auto = Switch()
    assert chosen({"cuda", "sm90"}, auto) == ("k.f.cuda", [])
    assert chosen({"cuda", "sm80"}, auto) == ("k.f.triton", ["this device lacks sm90"])
    assert chosen(set(), auto) == ("k.f.reference", ["this device lacks sm90", "this device lacks cuda"])


def test_the_switch_forces_the_reference_everywhere_or_for_one_op() -> None:
    facts = {"cuda", "sm90"}
    for text in ("reference", "reference:f.x"):
        module, reasons = chosen(facts, Switch.parse(text, known={"f.x", "f.y"}))
        assert module == "k.f.reference" and reasons == ["the switch forces the reference"] * 2
    assert chosen(facts, Switch.parse("reference:f.y", known={"f.x", "f.y"}))[0] == "k.f.cuda"


@pytest.mark.parametrize("text", ["fast", "reference:", "reference:f.z", "auto:f.x", ""])
def test_an_unknown_switch_is_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(ValueError, match="kernels"):
        Switch.parse(text, known={"f.x"})


def test_a_prepared_weight_is_forced_with_its_whole_family() -> None:
    """A reference takes what any row prepared; a faster row takes its own only."""
    known = {"f.prepare_x", "f.x", "g.y"}
    with pytest.raises(ValueError, match=r"f\.prepare_x and not all ops of f"):
        Switch.parse("reference:f.prepare_x", known=known)
    assert Switch.parse("reference:f.prepare_x,f.x", known=known).forces_reference("f.prepare_x")
    assert Switch.parse("reference:f.x", known=known).ops == {"f.x"}


def test_a_table_without_a_reference_last_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="reference"):
        choose((REFERENCE, PORTABLE), facts=frozenset(), switch=Switch())


def test_a_family_is_complete_when_constructed() -> None:
    class One(Family):
        TABLE = ROWS

    with pytest.raises(AssertionError, match=r"f\.x"):
        One({})


def test_a_cpu_gets_the_reference_of_every_op() -> None:
    assert device_facts(CPU) == frozenset()
    assert all(choice.chosen.is_reference for choice in choices(CPU).values())
    assert choices(CPU).keys() == {row.op for row in TABLE}
    assert isinstance(choose_ops(CPU), Ops)


def test_every_family_of_the_table_is_among_the_ops() -> None:
    assert {row.op.partition(".")[0] for row in TABLE} == set(Ops.__slots__)


def test_the_printed_table_names_every_op(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["flashstep.kernels", "reference"])
    main()
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines[1:]} == {row.op for row in TABLE}


def test_rows_whose_sums_depend_on_the_number_of_rows_are_left_out_where_that_is_not_allowed() -> None:
    hopper = {"cuda", "sm90", "nvcc"}
    free = choose(TABLE, facts=frozenset(hopper | {"any_order"}), switch=Switch())["gemm.lin8"]
    fixed = choose(TABLE, facts=frozenset(hopper), switch=Switch())["gemm.lin8"]
    assert free.chosen.module.endswith(".free_order") and fixed.chosen.module.endswith(".cuda")
    assert fixed.passed_over == (("flashstep.kernels.gemm.free_order", "this device lacks any_order"),)
    assert device_facts(CPU, batch_invariant=True) == frozenset()
