"""Costs and values: the published figures, tables of prices, and rates of measured entries."""

import json
from pathlib import Path
from typing import Any

import pytest

from flashstep.bench.ledger import Entry, Samples, append
from flashstep.bench.money import (
    PerMillion,
    PriceTable,
    Rates,
    cost_per_million,
    hour_of,
    million_tokens_an_hour,
    rates_of,
)
from flashstep.bench.origin import origin
from flashstep.cli import main

EXAMPLE = Path(__file__).parents[2] / "docs" / "prices-example.toml"
PRICES = PerMillion(cached_input=0.003, uncached_input=0.15, output=0.60)
RATES = Rates(cached_input=900_000, uncached_input=50_000, output=4_000)


def test_the_published_figures() -> None:
    """E22: 954K tokens/s and GPU are 3,434 M tokens an hour; $38.96 for them is $0.0113 a million."""
    assert round(million_tokens_an_hour(954_000)) == 3_434
    assert round(cost_per_million(38.96, 954_000), 4) == 0.0113


def test_an_hour_by_class() -> None:
    found = hour_of(RATES, PRICES, gpu_hour=9.0)
    values = {each.name: each.value for each in found.classes}
    assert values == pytest.approx({"cached_input": 9.72, "uncached_input": 27.0, "output": 8.64})
    assert found.value == pytest.approx(45.36)
    assert found.blended_value == pytest.approx(45.36 / 3434.4)
    assert found.blended_cost == pytest.approx(9.0 / 3434.4)
    assert found.break_even == pytest.approx(9.0 / 45.36)
    # what the classes cost adds up to the hour
    hour = sum(
        each.cost * million_tokens_an_hour(each.rate) for each in found.classes if each.cost is not None
    )
    assert hour == pytest.approx(9.0)


def test_without_a_cost_or_without_tokens() -> None:
    found = hour_of(RATES, PRICES, gpu_hour=None)
    assert found.blended_cost is None and found.break_even is None and found.classes[0].cost is None
    free = hour_of(RATES, PerMillion(cached_input=0, uncached_input=0, output=0), gpu_hour=1.0)
    assert free.value == 0 and free.break_even is None
    with pytest.raises(ValueError, match="every rate is 0"):
        hour_of(Rates(cached_input=0, uncached_input=0, output=0), PRICES, gpu_hour=1.0)


def test_the_example_is_a_table_with_date_and_source() -> None:
    table = PriceTable.read(EXAMPLE)
    assert table.date == "2026-10-27" and "https://" in table.source and table.gpu_hour is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("x = [", "no table of prices"),
        ('date = "d"\nsource = "s"\n', "per_million"),
        ('date = "d"\nsource = "s"\n[per_million]\ncached_input = 1\nuncached_input = 1\noutput = 1\nwater = 1\n', "water"),
        ('date = ""\nsource = "s"\n[per_million]\ncached_input = -1\nuncached_input = 1\noutput = nan\n', "cached_input is -1"),
    ],
)  # fmt: skip
def test_a_wrong_table_says_what_is_wrong(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "prices.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=told) as caught:
        PriceTable.read(file)
    if "nan" in text:
        assert "output is nan" in str(caught.value) and "date says nothing" in str(caught.value)


def served(
    metrics: dict[str, float], *, cached: tuple[float | None, ...] = (60.0, 30.0), **fields: Any
) -> Entry:
    columns = {"prompt_tokens": (100.0, 50.0), "cached_tokens": cached, "output_tokens": (10.0, 20.0)}
    samples = Samples(unit="request", keys=("0", "1"), columns=columns)
    return Entry(
        kind="serve", origin=origin(), settings={}, subject={}, samples=samples, metrics=metrics, **fields
    )


def test_rates_of_entries() -> None:
    found = rates_of(served({"output_tps": 30.0, "total_tps": 180.0}), gpus=2)
    assert found == Rates(cached_input=45.0, uncached_input=30.0, output=15.0)
    told = {"output_tps": 8.0, "cached_input_tps": 40.0, "uncached_input_tps": 4.0}
    assert rates_of(served(told), gpus=4) == Rates(cached_input=10.0, uncached_input=1.0, output=2.0)
    with pytest.raises(ValueError, match="cached tokens of 1 of 2 prompts"):
        rates_of(served({"output_tps": 30.0, "total_tps": 180.0}, cached=(60.0, None)), gpus=1)
    with pytest.raises(ValueError, match="no throughput"):
        rates_of(served({}), gpus=1)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "money", "--total", "954000", "--gpu-hour", "38.96"]) == 0
    assert (
        "3,434 M tokens an hour; at 38.96 a GPU-hour a million tokens are 0.0113" in capsys.readouterr().out
    )
    ledger, out = tmp_path / "l.jsonl", tmp_path / "money.json"
    append(ledger, served({"output_tps": 30.0, "total_tps": 180.0}, label="A"))
    prices = ["--prices", str(EXAMPLE), "--json", str(out)]
    assert main(["bench", "money", str(ledger), "--gpus", "2", "--gpu-hour", "0.1", *prices]) == 0
    shown = capsys.readouterr().out
    assert "prices of 2026-10-27, in USD" in shown and "costs" in shown
    (found,) = json.loads(out.read_text())["hours"].values()
    assert found["total_rate"] == 90.0
    rates = ["--cached-input", "900000", "--uncached-input", "50000", "--output", "4000"]
    assert main(["bench", "money", *rates, *prices, "--gpu-hour", "9"]) == 0
    assert "pays for itself when 19.8% of these tokens are sold" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ([], "no price is built in); give a ledger, or rates"),
        (["--total", "0"], "--total is 0; without tokens there is no price; --total needs --gpu-hour"),
        (["--total", "9", "--gpu-hour", "1", "--json", "x.json"], "leave out --json"),
        (["--prices", str(EXAMPLE), "--output", "0"], "--output: without tokens there is no price"),
        (["l.jsonl", "--prices", str(EXAMPLE), "--gpus", "0"], "--gpus is 0; it must be at least 1"),
        (["--total", "9", "--gpu-hour", "1", "--output", "3"], "leave out --output"),
        (["--prices", str(EXAMPLE), "--output", "-1", "--gpus", "1"], "--output is -1.0"),
        (["l.jsonl", "--prices", str(EXAMPLE)], "--gpus says how many"),
    ],
)
def test_what_cannot_be_priced_is_told(
    flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "money", *flags]) == 2
    assert told in capsys.readouterr().err


def test_all_that_is_wrong_with_files_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger, prices = tmp_path / "l.jsonl", tmp_path / "p.toml"
    for metrics in ({}, {"output_tps": 30.0, "total_tps": 180.0}):
        append(ledger, served(metrics, cached=(60.0, None)))
    prices.write_text("cached = 1")
    assert main(["bench", "money", str(ledger), "--prices", str(prices), "--gpus", "1"]) == 2
    told = capsys.readouterr().err
    for words in ("is no table of prices", "has no throughput", "cached tokens of 1 of 2 prompts"):
        assert words in told


def test_a_price_of_wrong_texts_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = tmp_path / "l.jsonl"
    found = {"output_tps": 8.0, "cached_input_tps": 40.0, "uncached_input_tps": 4.0}
    one = served(found, falsified_by=("synthetic acceptance",), complete=False)
    append(ledger, one)
    append(ledger, one)
    assert main(["bench", "money", str(ledger), "--prices", str(EXAMPLE), "--gpus", "1"]) == 0
    told = capsys.readouterr().out
    assert told.count(f"{one.id} (incomplete, synthetic acceptance)") == 1
