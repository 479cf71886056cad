"""``flashstep bench money``: what tokens cost and a GPU-hour is worth, from a table of prices and measured or given rates."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import tyro
from rich.table import Table

from flashstep.bench.ledger import Entry, read_all
from flashstep.bench.money import (
    CLASSES,
    Hour,
    PriceTable,
    Rates,
    cost_per_million,
    hour_of,
    million_tokens_an_hour,
    rates_of,
)
from flashstep.cli.outputs import output_problems, write
from flashstep.cli.terminal import OUT

PRICED = ("serve", "replay")


@dataclass(frozen=True, kw_only=True)
class BenchMoney:
    """Cost of a million tokens, and value of a GPU-hour, by class: cached input, uncached input, output.

    Rates are tokens a second and GPU: of each serve and replay entry of a ledger, or given by --cached-input, --uncached-input
    and --output. Prices are always yours: --prices is a TOML file with a date and a source (docs/prices-example.toml). With
    --total and --gpu-hour alone no prices are needed: that is the blended cost.
    """

    ledgers: tyro.conf.Positional[tuple[Path, ...]] = ()
    """ledgers whose serve and replay entries are priced"""
    prices: Path | None = None
    """TOML file of prices per million tokens"""
    gpu_hour: float | None = None
    """what one GPU costs for an hour; without it the table's, if it has one"""
    gpus: int | None = None
    """GPUs that served the ledgers' entries"""
    cached_input: float | None = None
    """cached input tokens a second and GPU"""
    uncached_input: float | None = None
    """other input tokens a second and GPU"""
    output: float | None = None
    """output tokens a second and GPU"""
    total: float | None = None
    """tokens of all classes a second and GPU, for the blended cost alone"""
    json: Path | None = None
    """write the figures to this file"""

    def run(self) -> int:
        self._check()
        if self.total is not None:
            assert self.gpu_hour is not None
            OUT.print(
                f"{self.total:,.0f} tokens/s and GPU are {million_tokens_an_hour(self.total):,.0f} M tokens an hour; at "
                f"{self.gpu_hour:.2f} a GPU-hour a million tokens are {cost_per_million(self.gpu_hour, self.total):.4f}"
            )
            return 0
        table, given = self._read()
        gpu_hour = table.gpu_hour if self.gpu_hour is None else self.gpu_hour
        OUT.print(f"prices of {table.date}, in {table.currency}: {table.source}")
        hours = {name: hour_of(rates, table.per_million, gpu_hour=gpu_hour) for name, rates in given.items()}
        for name, found in hours.items():
            OUT.print(_table(name, found))
            OUT.print(_words(found, table.currency))
        if self.json is not None:
            told = {"prices": table, "hours": hours}
            write(self.json, msgspec.json.format(msgspec.json.encode(told), indent=1))
        return 0

    def _read(self) -> tuple[PriceTable, Mapping[str, Rates]]:
        """Prices and rates; what is wrong with either file is one ``ValueError``."""
        assert self.prices is not None
        try:
            table = PriceTable.read(self.prices)
        except ValueError as error:
            try:
                self._rates()
            except ValueError as other:
                raise ValueError(f"{error}; {other}") from None
            raise
        return table, self._rates()

    def _rates(self) -> Mapping[str, Rates]:
        if not self.ledgers:
            given = {name: getattr(self, name) or 0.0 for name in CLASSES}
            return {"given rates": Rates(**given)}
        assert self.gpus is not None
        entries = [entry for entry in read_all(self.ledgers) if entry.kind in PRICED]
        if not entries:
            raise ValueError(
                f"{', '.join(map(str, self.ledgers))}: no entry of serve or replay is there to be priced"
            )
        rates: dict[str, Rates] = {}
        wrong: list[str] = []
        for entry in entries:
            name = " ".join(word for word in (entry.kind, entry.label, entry.id) if word)
            try:
                rates[_named(name, entry)] = rates_of(entry, gpus=self.gpus)
            except ValueError as error:
                wrong.append(str(error))
        if wrong:
            raise ValueError("; ".join(wrong))
        return rates

    def _check(self) -> None:
        """Everything that the flags say wrong is one ``ValueError``."""
        given = {
            f"--{name.replace('_', '-')}": getattr(self, name) for name in (*CLASSES, "total", "gpu_hour")
        }
        wrong = [
            f"{flag} is {value}; it must be 0 or more"
            for flag, value in given.items()
            if value is not None and not 0 <= value < float("inf")
        ]
        classes = [flag for flag in list(given)[:3] if given[flag] is not None]
        wrong += self._of_total(classes) if self.total is not None else self._of_classes(classes)
        if self.gpus is not None and self.gpus < 1:
            wrong.append(f"--gpus is {self.gpus}; it must be at least 1")
        if not self.ledgers and self.gpus is not None:
            wrong.append("--gpus belongs to a ledger; rates are given by GPU already")
        inputs = {**{f"the ledger {path}": path for path in self.ledgers}, "--prices": self.prices}
        wrong += output_problems({"--json": self.json}, inputs=inputs)
        if wrong:
            raise ValueError("; ".join(wrong))

    def _of_total(self, classes: Sequence[str]) -> list[str]:
        """What does not go with --total; ``classes`` are the flags of rates that were given."""
        wrong = []
        others = {"LEDGER": self.ledgers, "--prices": self.prices, "--json": self.json}
        if found := [*classes, *(flag for flag, value in others.items() if value)]:
            wrong.append(f"--total is the blended cost alone, in a sentence; leave out {', '.join(found)}")
        if self.total == 0:
            wrong.append("--total is 0; without tokens there is no price")
        if self.gpu_hour is None:
            wrong.append("--total needs --gpu-hour, what one GPU costs for an hour")
        return wrong

    def _of_classes(self, classes: Sequence[str]) -> list[str]:
        """What is missing for prices by class."""
        wrong = []
        if self.prices is None:
            wrong.append("give --prices FILE (docs/prices-example.toml is an example; no price is built in)")
        if bool(classes) == bool(self.ledgers):
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in CLASSES)
            wrong.append(f"give a ledger, or rates by {flags}: one of the two")
        elif not self.ledgers and not any(getattr(self, name) for name in CLASSES):
            wrong.append(f"{', '.join(classes)}: without tokens there is no price; one must be above 0")
        if self.ledgers and self.gpus is None:
            wrong.append("a ledger's throughput is the whole server's: --gpus says how many GPUs it had")
        return wrong


def _named(name: str, entry: Entry) -> str:
    """With what a reader must know before believing a price of it."""
    doubts = [*([] if entry.complete else ["incomplete"]), *entry.falsified_by]
    return f"{name} ({', '.join(doubts)})" if doubts else name


def _table(name: str, found: Hour) -> Table:
    table = Table("class", title=name, title_justify="left")
    for head in ("tokens/s/GPU", "M tokens/h", "price / M", "value / GPU-hour", "share", "cost / M"):
        table.add_column(head, justify="right")
    for each in found.classes:
        table.add_row(
            each.name.replace("_", " "),
            f"{each.rate:,.1f}",
            f"{million_tokens_an_hour(each.rate):,.2f}",
            f"{each.price:.4f}",
            f"{each.value:,.4f}",
            f"{each.value / found.value:.1%}" if found.value else "-",
            "-" if each.cost is None else f"{each.cost:.4f}",
        )
    table.add_row(
        "all",
        f"{found.total_rate:,.1f}",
        f"{million_tokens_an_hour(found.total_rate):,.2f}",
        f"{found.blended_value:.4f}",
        f"{found.value:,.4f}",
        "",
        "-" if found.blended_cost is None else f"{found.blended_cost:.4f}",
    )
    return table


def _words(found: Hour, currency: str) -> str:
    """Break-even in a sentence."""
    if found.gpu_hour is None:
        return "no cost: give --gpu-hour, or gpu_hour in the table"
    if found.break_even is None:
        return "nothing sells at these prices"
    needed = found.break_even * found.total_rate
    verdict = (
        f"pays for itself when {found.break_even:.1%} of these tokens are sold"
        if found.break_even <= 1
        else f"costs {found.break_even:.1f} times what its tokens sell for"
    )
    return (
        f"a GPU-hour brings {found.value:,.4f} and costs {found.gpu_hour:,.4f} {currency}: it {verdict} (break-even at "
        f"{needed:,.1f} tokens/s and GPU of this mix). Cost by class is in proportion to the prices."
    )
