"""A ledger of every kind for pages: two arms, deterministic values of the size that real runs have."""

import random
from typing import Any

from flashstep.bench.ledger import Entry, Kind, Samples
from flashstep.bench.origin import Origin

ORIGIN = Origin(
    command="flashstep bench serve --url http://127.0.0.1:8000 --max-concurrency 8 --ledger ledger.jsonl --label main",
    date="2026-12-01T13:07:00+00:00",
    commit="751e707abcde",
    dirty=True,
    machine="h200-node-3",
    cpu="64 x AMD EPYC",
    gpus=("NVIDIA H200, GPU-1, 580.65.06, 1980 MHz, 3201 MHz, 120 W, 35",) * 4,
    driver="580.65.06",
    python="3.11.2",
    torch="2.11.0",
    flashstep="0.1.0",
)
PARTS = ("attention", "indexer", "experts", "mHC", "Engram", "dense projections", "head", "draft", "sampling")


def entry(
    kind: Kind, label: str, columns: dict[str, list[float]], *, unit: str = "request", **fields: Any
) -> Entry:
    count = len(next(iter(columns.values()), []))
    samples = Samples(
        unit=unit,
        keys=tuple(map(str, range(count))),
        columns={name: tuple(values) for name, values in columns.items()},
    )
    given: dict[str, Any] = {
        "origin": ORIGIN,
        "settings": {},
        "subject": {"model": "flashstep-tiny"},
        "metrics": {},
        "seed": 0,
    }
    return Entry(kind=kind, samples=samples, label=label, **(given | fields))


def served(chance: random.Random, label: str, at_once: int, *, speed: float, **fields: Any) -> Entry:
    itl = [chance.lognormvariate(0, 0.12) * (1.0 + at_once / 40) / speed for _ in range(120)]
    ttft = [chance.lognormvariate(4.4, 0.5) * (1 + at_once / 16) for _ in range(120)]
    p90 = sorted(itl)[107]
    return entry(
        "serve",
        label,
        {"ttft_ms": ttft, "itl_ms": itl},
        settings={"num_prompts": 120, "input_len": 4096, "output_len": 512, "max_concurrency": at_once},
        metrics={
            "ttft_ms": sorted(ttft)[60],
            "itl_ms": sorted(itl)[60],
            "output_tps": at_once * 900 / p90,
            "p90_interactivity_tps": 1000 / p90,
            "acceptance_length": 3.4,
        },
        detail={"acceptance_by_position": [0.86, 0.71, 0.55, 0.42, 0.31 if label == "main" else 0.36]},
        **fields,
    )


def forward(label: str, *, speed: float) -> Entry:
    parts = [
        {"name": name, "us": (60 + 45 * place) / speed, "floor_us": 31.0 + 20 * place, "launches": 40}
        for place, name in enumerate(PARTS[:-1])
    ] + [{"name": PARTS[-1], "us": 21.0, "floor_us": None, "launches": 3}]
    cases = [
        {
            "case": case,
            "us": scale * sum(part["us"] for part in parts),
            "floor_us": scale * 900.0,
            "parts": parts,
        }
        for case, scale in (("8*6@131072:5", 1.0), ("8192@524288c", 4.0))
    ]
    return entry(
        "forward",
        label,
        {"step_us": [2000.0, 2010.0]},
        unit="replay",
        settings={"cases": ["8*6@131072", "8192@524288c"], "repeats": 30},
        metrics={"step_us": 2005.0},
        detail={"cases": cases},
    )


def stepped(chance: random.Random, kind: Kind, label: str, *, speed: float) -> Entry:
    times = [chance.gauss(1010, 12) / speed + (80 if chance.random() < 0.02 else 0) for _ in range(400)]
    return entry(
        kind,
        label,
        {"step_us": times},
        unit="step",
        settings={"context": 131072, "batch_size": 32, "steps": 400},
        metrics={
            "step_us": sorted(times)[200],
            "output_tps": 32 * 2.7e6 / 1010 * speed,
            "balancedness": 0.82,
        },
        detail={
            "balance": {
                "parts": 4,
                "by_step": [0.8 + 0.1 * chance.random() for _ in range(60)],
                "window": 0.91,
            }
        },
        falsified_by=("synthetic acceptance", "recorded routing", "filled cache"),
    )


def answered(chance: random.Random, label: str, run: int) -> Entry:
    right = [float(chance.random() < 0.905) for _ in range(1319)]
    share = sum(right) / len(right)
    return entry(
        "eval",
        label,
        {"right": right},
        unit="question",
        round=run,
        settings={
            "questions": "gsm8k",
            "asked": 1319,
            "rule": "number",
            "num_fewshot": 5,
            "temperature": 1.0,
        },
        metrics={"accuracy": share},
        detail={"right": int(sum(right)), "answered": 1319, "low": share - 0.016, "high": share + 0.015},
        job=f"server-{run // 2}",
    )


def ledger() -> list[Entry]:
    """Two arms in everything, one incomplete run, one that failed."""
    chance = random.Random(7)
    found: list[Entry] = []
    for label, speed in (("main", 1.0), ("early PDL triggers", 1.08)):
        found += [served(chance, label, at_once, speed=speed) for at_once in (1, 4, 8, 16, 32, 64)]
        found.append(forward(label, speed=speed))
        found += [stepped(chance, kind, label, speed=speed) for kind in ("decode", "probe")]
        found += [answered(chance, label, run) for run in range(4)]
    faults = ("3 of 120 requests failed: cut off (the connection broke)",)
    found.append(served(chance, "main", 128, speed=0.9, complete=False, faults=faults))
    return found
