"""Are continuations distributed alike with and without speculation? The two-sample test, on an engine's own continuations.

As a program: ``python -m tests.speculate.two_samples --count 20000`` on the embedded model, every method, with progress and a
table of p-values. A category is a prompt and the first tokens of its continuation; rare ones are taken together.
"""

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from scipy import stats

from flashstep.cli.model import tiny_model
from flashstep.config.engine import EngineConfig
from flashstep.config.speculative import DraftSampleMethod, RejectionSampleMethod, SpeculativeOptions
from flashstep.engine.engine import Engine
from flashstep.request import Acceptance, Request, SamplingParams
from flashstep.runner.build import build_runner

LEAST_EXPECTED = 10  # of a category, over both samples
Category = tuple[int, ...]  # number of the prompt, then tokens


class Sample(NamedTuple):
    """What some continuations began with, and what speculation did."""

    counts: Counter[Category]
    acceptance: Acceptance | None


class Comparison(NamedTuple):
    """A chi-square test of homogeneity."""

    p_value: float
    statistic: float
    categories: int


def draw(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    seeds: Sequence[int],
    params: SamplingParams,
    depth: int,
    batch: int = 64,
    tell: Callable[[int], None] = lambda _count: None,
) -> Sample:
    """One continuation of ``prompts[seed % len(prompts)]`` for each seed; categories look at its first ``depth`` tokens."""
    from msgspec.structs import replace

    counts: Counter[Category] = Counter()
    for start in range(0, len(seeds), batch):
        chunk = seeds[start : start + batch]
        requests = [
            Request(
                id=str(seed), prompt=tuple(prompts[seed % len(prompts)]), params=replace(params, seed=seed)
            )
            for seed in chunk
        ]
        outputs = engine.generate(requests)
        for seed in chunk:
            tokens = [token for output in outputs[str(seed)] for token in output.tokens]
            counts[(seed % len(prompts), *tokens[:depth])] += 1
        tell(len(chunk))
    return Sample(counts, engine.stats().acceptance)


def compare(one: Counter[Category], other: Counter[Category]) -> Comparison:
    """Do both samples come from one distribution?"""
    both = one + other
    common = [category for category, count in both.items() if count >= LEAST_EXPECTED]
    rows = [[sample[category] for category in common] for sample in (one, other)]
    rest = [sum(sample.values()) - sum(row) for sample, row in zip((one, other), rows, strict=True)]
    if sum(rest):
        rows = [[*row, left] for row, left in zip(rows, rest, strict=True)]
    result = stats.chi2_contingency(rows)
    return Comparison(float(result.pvalue), float(result.statistic), len(rows[0]))


def methods() -> Iterator[tuple[str, SpeculativeOptions]]:
    """Every method that promises the target's distribution."""
    for draft in DraftSampleMethod:
        for rule in (RejectionSampleMethod.STANDARD, RejectionSampleMethod.BLOCK):
            yield (
                f"{draft.value}, {rule.value}",
                SpeculativeOptions(draft_sample_method=draft, rejection_sample_method=rule),
            )


def main() -> None:
    """Parse, draw, compare, print; ``--json`` keeps all counts."""
    parser = argparse.ArgumentParser(prog="python -m tests.speculate.two_samples", description=__doc__)
    parser.add_argument("--count", type=int, default=20_000, help="continuations in each sample")
    parser.add_argument("--tokens", type=int, default=6, help="tokens of a continuation")
    parser.add_argument("--depth", type=int, default=4, help="of them, how many a category looks at")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    params = SamplingParams(max_tokens=options.tokens, temperature=1.5, top_p=0.95, ignore_eos=True)
    found: dict[str, Sample] = {}
    arms: list[tuple[str, SpeculativeOptions | None]] = [("off", None), *methods()]
    with Progress() as progress:
        for number, (name, speculative) in enumerate(arms):
            task = progress.add_task(name, total=options.count)
            seeds = range(number * options.count, (number + 1) * options.count)  # no seed is used twice
            config = EngineConfig(
                model=tiny_model(), kv_cache_memory_bytes=1 << 27, max_num_seqs=64, speculative=speculative
            )
            engine = Engine(build_runner(config), seed=0)
            start = time.monotonic()
            found[name] = draw(
                engine, prompts(), seeds=seeds, params=params, depth=options.depth,
                tell=lambda count, task=task: progress.advance(task, count),
            )  # fmt: skip
            progress.console.print(f"{name}: {time.monotonic() - start:.0f} s")
    table = Table("arm against off", "chi-square", "categories", "p", "tokens a step")
    for name, sample in found.items():
        if name != "off":
            c = compare(found["off"].counts, sample.counts)
            length = "-" if sample.acceptance is None else f"{sample.acceptance.mean_length:.2f}"
            table.add_row(name, f"{c.statistic:.1f}", str(c.categories), f"{c.p_value:.3f}", length)
    Console().print(table)
    if options.json:
        data = {
            name: {" ".join(map(str, category)): count for category, count in sample.counts.items()}
            for name, sample in found.items()
        }
        options.json.write_text(json.dumps(data), encoding="utf-8")


def prompts() -> list[list[int]]:
    """Conversations and beginnings after which the embedded model is unsure what comes."""
    from flashstep.chat.conversation import Conversation
    from flashstep.chat.encode import ChatEncoder
    from flashstep.chat.tokenizer import TextTokenizer

    tokenizer = TextTokenizer.from_file(tiny_model() / "tokenizer.json")
    encoder = ChatEncoder(tokenizer)
    asked = (
        "Tell me something.",
        "Hello!",
        "Anna has 12 pens and buys 4 boxes with 6 pens each. How many now?",
    )
    chats = [
        list(encoder.encode(Conversation(messages=[{"role": "user", "content": text}])).ids) for text in asked
    ]
    return [*chats, *(tokenizer.encode(text, add_special_tokens=True) for text in ("Anna has", "First,"))]


if __name__ == "__main__":
    main()
