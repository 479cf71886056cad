"""Ledger entries as measurements would have kept them, with known truths: a run, its requests, its questions. Needs no scipy."""

import datetime
from collections.abc import Sequence
from typing import Any

import msgspec

from flashstep.bench.ledger import Entry, Samples
from flashstep.bench.origin import Origin

BEGAN = datetime.datetime(2026, 12, 1, tzinfo=datetime.UTC)
MACHINE = Origin(
    command="flashstep bench probe",
    date=BEGAN.isoformat(timespec="seconds"),
    commit="0123456789ab",
    dirty=False,
    machine="node7",
    cpu="2 x Xeon",
    gpus=("H200, GPU-1, 580.1, 1980 MHz, 3201 MHz, 90 W, 40",),
    driver="580.1",
    python="3.11.2",
    torch="2.11",
    flashstep="0.1.0",
)


def at(minute: int, **fields: Any) -> Origin:
    date = (BEGAN + datetime.timedelta(minutes=minute)).isoformat(timespec="seconds")
    return msgspec.structs.replace(MACHINE, date=date, **fields)


def run(
    label: str, number: int, value: float, *, minute: int = 0, samples: Samples | None = None, **fields: Any
) -> Entry:
    """One run whose throughput is ``value``."""
    given: dict[str, Any] = {
        "kind": "serve",
        "origin": at(minute),
        "settings": {"requests": 100},
        "subject": {"build": label},
        "metrics": {"output_tps": value},
        "seed": number,
    }
    nothing = Samples(unit="request", keys=(), columns={})
    return Entry(label=label, round=number, samples=samples or nothing, **(given | fields))


def requests(**columns: Sequence[float | None]) -> Samples:
    count = len(next(iter(columns.values())))
    return Samples(
        unit="request",
        keys=tuple(f"r{n}" for n in range(count)),
        columns={name: tuple(v) for name, v in columns.items()},
    )


def answered(
    label: str, number: int, right: Sequence[float], *, minute: int = 0, tokens: float = 0, **fields: Any
) -> Entry:
    """A run of an accuracy: which questions are right, in answers of ``tokens`` each."""
    samples = Samples(
        unit="question",
        keys=tuple(f"q{n}" for n in range(len(right))),
        columns={"right": tuple(map(float, right)), "output_tokens": (float(tokens),) * len(right)},
    )
    given = {"kind": "eval", "metrics": {"accuracy": float(sum(right)) / len(right)}}
    return run(label, number, 0, minute=minute, samples=samples, **(given | fields))
