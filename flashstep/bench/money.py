"""What tokens cost and what a GPU-hour is worth, by class of token: cached input, uncached input, output (spec/serving.md E22).

Takes tokens a second and GPU (given, or those of a ledger's entry) and a table of prices, which is always the user's: none is
built in. Prices are per million tokens, in whatever currency the table says. Knows no engine and no network.
"""

from pathlib import Path

import msgspec

from flashstep.bench.ledger import Entry

CLASSES = ("cached_input", "uncached_input", "output")
SECONDS = 3600
MILLION = 1e6


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens a second and GPU of each class."""

    cached_input: float
    uncached_input: float
    output: float

    @property
    def total(self) -> float:
        return sum(getattr(self, name) for name in CLASSES)


class PerMillion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The price of a million tokens of each class."""

    cached_input: float
    uncached_input: float
    output: float


class PriceTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of prices: as of which date, from where, in which currency; ``gpu_hour`` is what one GPU costs for an hour."""

    date: str
    source: str
    per_million: PerMillion
    currency: str = "USD"
    gpu_hour: float | None = None

    @classmethod
    def read(cls, path: Path) -> "PriceTable":
        """From TOML; ``ValueError`` with all that is wrong in it."""
        try:
            table = msgspec.toml.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ValueError(
                f"{path} is no table of prices: {error} (docs/prices-example.toml is one)"
            ) from None
        given = {name: getattr(table.per_million, name) for name in CLASSES} | {
            "gpu_hour": table.gpu_hour or 0.0
        }
        wrong = [f"{name} is {value}" for name, value in given.items() if not 0 <= value < float("inf")]
        wrong += [f"{name} says nothing" for name in ("date", "source") if not getattr(table, name).strip()]
        if wrong:
            raise ValueError(f"{path}: {'; '.join(wrong)}; prices are 0 or more, with a date and a source")
        return table


class ClassOfTokens(msgspec.Struct, frozen=True, kw_only=True):
    """One class in an hour of one GPU. ``cost`` of a million is its part of the hour's cost, in proportion to the prices."""

    name: str
    rate: float
    price: float
    value: float
    cost: float | None


class Hour(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU-hour. ``value`` is what its tokens sell for; ``gpu_hour`` what it costs, None if nobody said.

    ``blended_value`` and ``blended_cost`` are of a million tokens of the mix; ``break_even`` is the share of the tokens that must
    be sold for the hour to pay for itself (above 1 it does not).
    """

    classes: tuple[ClassOfTokens, ...]
    total_rate: float
    value: float
    gpu_hour: float | None
    blended_value: float
    blended_cost: float | None
    break_even: float | None


def million_tokens_an_hour(tokens_per_s: float) -> float:
    return tokens_per_s * SECONDS / MILLION


def cost_per_million(gpu_hour: float, tokens_per_s: float) -> float:
    """What a million tokens cost where one GPU makes ``tokens_per_s`` and costs ``gpu_hour`` an hour."""
    return gpu_hour / million_tokens_an_hour(tokens_per_s)


def hour_of(rates: Rates, prices: PerMillion, *, gpu_hour: float | None) -> Hour:
    """What an hour of one GPU brings, and what it costs. ``ValueError`` where there are no tokens."""
    if rates.total <= 0:
        raise ValueError("no tokens, no price: every rate is 0")
    values = {name: million_tokens_an_hour(getattr(rates, name)) * getattr(prices, name) for name in CLASSES}
    value = sum(values.values())
    burden = gpu_hour / value if gpu_hour is not None and value > 0 else None  # cost of what sells for 1
    return Hour(
        classes=tuple(
            ClassOfTokens(
                name=name,
                rate=getattr(rates, name),
                price=getattr(prices, name),
                value=values[name],
                cost=None if burden is None else burden * getattr(prices, name),
            )
            for name in CLASSES
        ),
        total_rate=rates.total,
        value=value,
        gpu_hour=gpu_hour,
        blended_value=cost_per_million(value, rates.total),
        blended_cost=None if gpu_hour is None else cost_per_million(gpu_hour, rates.total),
        break_even=burden,
    )


def rates_of(entry: Entry, *, gpus: int) -> Rates:
    """Tokens a second and GPU of a serve or replay entry, its answered requests over its window (E19).

    ``ValueError`` where it has no throughput, or the server counted no cached tokens: these decide the price.
    """
    where = f"entry {entry.id} ({entry.kind})"
    if {"cached_input_tps", "uncached_input_tps", "output_tps"} <= entry.metrics.keys():
        inputs = entry.metrics["cached_input_tps"], entry.metrics["uncached_input_tps"]
    else:
        inputs = _inputs(entry, where)
    cached, uncached = inputs
    output = entry.metrics["output_tps"]
    if not cached + uncached + output > 0:
        raise ValueError(f"{where} has no tokens, and so no price")
    return Rates(cached_input=cached / gpus, uncached_input=uncached / gpus, output=output / gpus)


def _inputs(entry: Entry, where: str) -> tuple[float, float]:
    """Cached and uncached input a second: the throughput of all input, split as the requests' counts are."""
    if not {"output_tps", "total_tps"} <= entry.metrics.keys():
        raise ValueError(f"{where} has no throughput of input and output")
    prompts, cached = entry.samples.column("prompt_tokens"), entry.samples.column("cached_tokens")
    if cached.keys() != prompts.keys() or not prompts:
        raise ValueError(
            f"{where}: the server told the cached tokens of {len(cached)} of {len(prompts)} prompts; all must be known "
            "(--enable-prompt-tokens-details of a server), for they decide the price"
        )
    whole = entry.metrics["total_tps"] - entry.metrics["output_tps"]
    share = sum(cached.values()) / sum(prompts.values())
    return whole * share, whole * (1 - share)
