"""What speculation does for the embedded model: ``python -m tests.speculate.measure exactness | acceptance | speed``.

exactness   greedy and drawn tokens of 1,000 held-out prompts, every k and method, against plain decoding
acceptance  tokens a step at temperature 1, by task and method, and how sure the draft was against how often it was right
speed       one stream with and without drafts, paired and interleaved, with a bootstrap interval
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from rich.console import Console
from rich.progress import track
from rich.table import Table

from flashstep.cli.model import tiny_model
from flashstep.config.engine import EngineConfig
from flashstep.config.speculative import DraftSampleMethod, RejectionSampleMethod, SpeculativeOptions
from flashstep.engine.engine import Engine
from flashstep.request import Acceptance, Request
from flashstep.runner.build import build_runner
from tests.speculate.tasks import requests

OUT = Console(width=140)
BATCH = 64
RULES = (RejectionSampleMethod.STANDARD, RejectionSampleMethod.BLOCK)
POINTS, DRAWN = DraftSampleMethod.GREEDY, DraftSampleMethod.PROBABILISTIC


def engine(speculative: SpeculativeOptions | None, **options: object) -> Engine:
    """A fresh one on the embedded model."""
    defaults = {"max_num_seqs": BATCH, "max_model_len": 8192, "kv_cache_memory_bytes": 1 << 28}
    config = EngineConfig(model=tiny_model(), speculative=speculative, **(defaults | options))
    return Engine(build_runner(config), seed=0)


def tokens(of: Engine, items: Sequence[Request]) -> dict[str, tuple[int, ...]]:
    """What each request was answered, ``BATCH`` at a time."""
    found: dict[str, tuple[int, ...]] = {}
    for start in range(0, len(items), BATCH):
        for name, outputs in of.generate(items[start : start + BATCH]).items():
            found[name] = tuple(token for output in outputs for token in output.tokens)
    return found


# ---- exactness -----------------------------------------------------------------------------------------------------------


def arms(depths: Sequence[int]) -> Iterator[tuple[str, SpeculativeOptions]]:
    """Name and options of every method at every k, the deepest first."""
    for k in sorted(depths, reverse=True):
        for method in (POINTS, DRAWN):
            for rule in RULES:
                yield (
                    f"k = {k}, {method.value}, {rule.value}",
                    SpeculativeOptions(
                        num_speculative_tokens=k, draft_sample_method=method, rejection_sample_method=rule
                    ),
                )


def exactness(options: argparse.Namespace) -> dict[str, Any]:
    """Compare every arm with plain decoding; drawn drafts keep tokens at temperature 0 only."""
    t = options.temperature
    items = [item for task in requests(options.count, seed=7, temperature=t).values() for item in task]
    plain = tokens(engine(None), items)
    table = Table("arm", "prompts", "tokens", "prompts that differ", "tokens a step", "s")
    found: dict[str, Any] = {}
    for name, speculative in arms(options.depths):
        if t > 0 and speculative.draft_sample_method is DRAWN:
            continue
        started = time.monotonic()
        of = engine(speculative)
        answers = tokens(of, items)
        of.check_integrity()
        wrong = [key for key, answer in answers.items() if answer != plain[key]]
        seconds, length = time.monotonic() - started, _length(of.stats().acceptance)
        count = sum(map(len, answers.values()))
        table.add_row(name, str(len(answers)), str(count), str(len(wrong)), f"{length:.2f}", f"{seconds:.0f}")
        OUT.print(
            f"{name}: {len(wrong)} of {len(answers)} differ {wrong[:5]}, {count} tokens, {seconds:.0f} s"
        )
        found[name] = {"prompts": len(answers), "tokens": count, "wrong": wrong}
    OUT.print(table)
    return found


def _length(acceptance: Acceptance | None) -> float:
    assert acceptance is not None and acceptance.steps
    return 1 + acceptance.accepted_tokens / acceptance.steps


# ---- acceptance ----------------------------------------------------------------------------------------------------------


def acceptance(options: argparse.Namespace) -> dict[str, Any]:
    """Tokens a step on real generations, by task."""
    by_task = requests(options.count, seed=11, temperature=options.temperature)
    found: dict[str, Any] = {}
    methods = [(POINTS, RULES[0]), *((DRAWN, rule) for rule in RULES)]
    table = Table(
        "task", "prompts", *(f"{method.value}, {rule.value}" for method, rule in methods), "by place (last)"
    )
    totals: list[list[Acceptance]] = [[] for _ in methods]
    for task, items in by_task.items():
        shown = []
        for place, (method, rule) in enumerate(methods):
            of = engine(
                SpeculativeOptions(
                    num_speculative_tokens=5, draft_sample_method=method, rejection_sample_method=rule
                )
            )
            tokens(of, items)
            counts = of.stats().acceptance
            assert counts is not None
            totals[place].append(counts)
            found[f"{task}, {method.value}, {rule.value}"] = counts.histogram
            shown.append(f"{_length(counts):.2f}")
        rates = " ".join(f"{count / counts.steps:.2f}" for count in counts.per_position)
        table.add_row(task, str(len(items)), *shown, rates)
    pooled = [1 + sum(c.accepted_tokens for c in row) / sum(c.steps for c in row) for row in totals]
    table.add_row(
        "all steps", str(sum(map(len, by_task.values()))), *(f"{length:.2f}" for length in pooled), ""
    )
    OUT.print(table)
    return found


# ---- speed ---------------------------------------------------------------------------------------------------------------


def speed(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds a token of one stream after its first token, off and on in turn (ABBA), request by request."""
    torch.set_num_threads(1)
    arms = {"off": engine(None), "on": engine(SpeculativeOptions(num_speculative_tokens=options.depths[-1]))}
    items = [
        r for task in requests(options.count, seed=13, temperature=options.temperature).values() for r in task
    ]
    random.Random(1).shuffle(items)
    for of in arms.values():
        _seconds_a_token(of, replace(items[0], id="warm-up"))
    ratios: list[float] = []
    raw = []
    for number, item in enumerate(track(items, console=OUT, description="requests")):
        order = ("off", "on") if number % 2 == 0 else ("on", "off")
        taken = {name: _seconds_a_token(arms[name], item) for name in order}
        if taken["off"] is None or taken["on"] is None:
            continue  # an answer of one token has no decoding to time
        ratios.append(taken["off"] / taken["on"])
        raw.append({"request": item.id, **taken})
    chance = random.Random(2)
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(2000))
    OUT.print(
        f"{len(ratios)} pairs, temperature {options.temperature}: off / on in seconds a token: "
        f"median {statistics.median(ratios):.2f} "
        f"(95%: {medians[50]:.2f} to {medians[1949]:.2f}), ms a token off {1e3 * statistics.median(r['off'] for r in raw):.1f}, "
        f"on {1e3 * statistics.median(r['on'] for r in raw):.1f}; on: {_length(arms['on'].stats().acceptance):.2f} tokens a step"
    )
    return {"pairs": raw}


def _seconds_a_token(of: Engine, item: Request) -> float | None:
    of.add(item)
    first: float | None = None
    count = 0
    while of.has_work:
        for output in of.step():
            if first is None and output.tokens:
                first = time.perf_counter()
            elif output.tokens:
                count += len(output.tokens)
    end = time.perf_counter()
    return (end - first) / count if first is not None and count else None


def main() -> None:
    """Parse, measure, print; ``--json`` keeps the raw data."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.speculate.measure",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=("exactness", "acceptance", "speed"))
    parser.add_argument("--count", type=int, default=1000, help="prompts over all tasks")
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    found = {"exactness": exactness, "acceptance": acceptance, "speed": speed}[options.what](options)
    if options.json:
        options.json.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
