"""``flashstep check``: is this checkpoint usable, and does the engine compute what the oracle computes on it?

First the engine is built, which refuses a checkpoint with everything that is wrong with it. Then the oracle, in a process of
its own (docs/decisions/004), gives the logits of whole sequences, and the engine's log-probabilities of their beginnings,
prefilled through the paged caches, are compared with them position by position. Equal means equal, bit for bit. A checkpoint with
draft layers is checked with speculation, too (``check_drafts``).
"""

import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import tyro
from rich.table import Table

from flashstep.cli.check_drafts import (
    CONFIDENCE_TOLERANCE,
    DraftComparison,
    DrafterRun,
    compare_drafts,
    compare_tokens,
    options_for_check,
)
from flashstep.cli.check_drafts import table as drafter_table
from flashstep.cli.model import Model, resolve
from flashstep.cli.terminal import OUT, note, waiting
from flashstep.config.engine_options import EngineOptions
from flashstep.config.errors import ConfigError
from flashstep.config.model import ModelConfig
from flashstep.request import MAX_LOGPROBS, SamplingParams, TokenLogprob

if TYPE_CHECKING:
    from torch import Tensor

    from flashstep.cli.local import LocalModel

SEQUENCES = 2
LONGEST = 1200  # tokens; the oracle keeps whole attention matrices
DIFFERENT = 1


@dataclass(frozen=True)
class Comparison:
    """One prompt: its rows, how many differ in any log-probability, by how much, and how many agree on the best token."""

    sequence: int
    rows: int
    different: int
    largest: float
    same_best: int


@dataclass(frozen=True, kw_only=True)
class Check:
    """Validate a checkpoint and compare the engine with the oracle on it."""

    model: Model = None
    options: tyro.conf.OmitArgPrefixes[EngineOptions] = field(default_factory=EngineOptions)

    def run(self) -> int:
        if self.options.load_format != "auto":
            raise ValueError("check compares the weights on disk: it cannot be used with --load-format dummy")
        folder = resolve(self.model)
        config = self.options.checked().engine(folder)
        wrong = [
            name for name in config.falsifies if name != "synthetic acceptance"
        ]  # that has a sentence of its own
        if wrong:
            raise ConfigError(
                "the comparison",
                [
                    f"check compares what the model says; {name} changes that on purpose: leave it out"
                    for name in wrong
                ],
            )
        model = ModelConfig.read(folder)
        drafts = model.num_nextn_predict_layers > 0 or config.speculative is not None
        if drafts:
            config = msgspec.structs.replace(config, speculative=options_for_check(config.speculative))

        from flashstep.cli.local import LocalModel

        local = LocalModel(config)
        note(
            f"{folder}: configuration, tensor names, shapes and dtypes, and the tokenizer's token map are as they must be"
        )
        lengths = prompt_lengths(model, min(local.max_model_len - 1, LONGEST))
        found: list[Comparison] = []
        drafted: list[DraftComparison] = []
        for number in range(SEQUENCES):
            ids = random.Random(number).choices(range(model.vocab_size), k=lengths[-1])
            with waiting(f"oracle: sequence {number + 1} of {SEQUENCES}, {len(ids)} tokens"):
                expected = oracle_tensors(folder, ids, draft_at=lengths[:-1] if drafts else ())
            with waiting(f"engine: sequence {number + 1} of {SEQUENCES}, {len(lengths)} prompts"):
                found += [
                    compare(local, ids[:length], expected["logits"][:length], sequence=number + 1)
                    for length in lengths
                ]
                if drafts and lengths[:-1]:
                    drafted.append(compare_drafts(local, ids, lengths[:-1], expected))
        OUT.print(table(found))
        bad = sum(comparison.different for comparison in found)
        rows = sum(comparison.rows for comparison in found)
        OUT.print(
            f"{rows} rows compared, {bad} differ" if bad else f"{rows} rows compared, all equal bit for bit"
        )
        if drafts:
            bad += self._report_drafts(drafted, compare_tokens(local))
        return DIFFERENT if bad else 0

    def _report_drafts(self, drafted: Sequence[DraftComparison], runs: Sequence[DrafterRun]) -> int:
        """Print both comparisons; the number of differences."""
        blocks = sum(comparison.anchors for comparison in drafted)
        wrong_blocks = sum(comparison.different for comparison in drafted)
        OUT.print(
            f"{blocks} blocks of drafts compared with the oracle's, {wrong_blocks} differ in a token or by more than "
            f"{CONFIDENCE_TOLERANCE:g} in a confidence (largest difference {max((c.largest for c in drafted), default=0.0):.1g})"
        )
        OUT.print(drafter_table(runs))
        wrong_requests = sum(run.different for run in runs)
        requests = sum(run.requests for run in runs)
        OUT.print(
            f"speculation: tokens of {requests} requests compared with plain decoding, "
            + (f"{wrong_requests} differ" if wrong_requests else "all equal")
        )
        return wrong_blocks + wrong_requests


def prompt_lengths(model: ModelConfig, longest: int) -> list[int]:
    """Around every border that the architecture has: pairs, window, selection, candidates; ascending."""
    window, top = model.sliding_window, model.index_topk if model.kv_source_layer_ids else 0
    borders = [1, 2, 3, window, window + 1, 2 * window + 3, top + 1, 2 * top + 5, 2 * top + window + 8]
    if model.candidate_source_layer_id >= 0:
        borders.append(model.candidate_topk_blocks * model.candidate_block_size + window + 5)
    return sorted({length for length in borders if 1 <= length <= longest})


def oracle_tensors(folder: Path, ids: Sequence[int], *, draft_at: Sequence[int] = ()) -> dict[str, "Tensor"]:
    """What ``python -m oracle`` writes: fp32 ``logits`` [T, V] of ``ids``, and its drafts behind ``draft_at`` tokens.

    ``ConfigError`` if it cannot run.
    """
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory(prefix="flashstep-check-") as work:
        given, out = Path(work) / "ids.json", Path(work) / "logits.safetensors"
        given.write_text(json.dumps(list(ids)), encoding="utf-8")
        command = [
            sys.executable,
            "-m",
            "oracle",
            str(folder.resolve()),
            "--ids",
            str(given),
            "--out",
            str(out),
            *(["--draft-at", *map(str, draft_at)] if draft_at else []),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise ConfigError(
                "the comparison", [f"the oracle ended with exit code {done.returncode}: {last}"]
            )
        return load_file(out)


def compare(local: "LocalModel", ids: Sequence[int], logits: "Tensor", *, sequence: int) -> Comparison:
    """The engine's log-probabilities after each of ``ids`` against those of the oracle's ``logits`` [T, V]."""
    from flashstep.sampling.logprobs import token_logprobs

    params = SamplingParams(
        max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=MAX_LOGPROBS, prompt_logprobs=MAX_LOGPROBS
    )
    outputs = list(local.stream(ids, params))
    rows: list[TokenLogprob] = [row for output in outputs for row in output.prompt_logprobs]
    rows += [row for output in outputs for row in output.logprobs]
    assert len(rows) == len(ids), "one row for each token of the prompt: what follows it"
    expected = token_logprobs(logits, [row.token for row in rows], counts=[MAX_LOGPROBS] * len(rows))
    return Comparison(
        sequence=sequence,
        rows=len(rows),
        different=sum(mine != theirs for mine, theirs in zip(rows, expected, strict=True)),
        largest=max(difference(mine, theirs) for mine, theirs in zip(rows, expected, strict=True)),
        same_best=sum(
            mine.top[0][0] == theirs.top[0][0] for mine, theirs in zip(rows, expected, strict=True)
        ),
    )


def difference(mine: TokenLogprob, theirs: TokenLogprob) -> float:
    """Largest difference of log-probabilities of the tokens that both list."""
    others = {token: logprob for token, logprob, _ in theirs.top} | {theirs.token: theirs.logprob}
    pairs = [(mine.token, mine.logprob), *((token, logprob) for token, logprob, _ in mine.top)]
    return max(abs(logprob - others[token]) for token, logprob in pairs if token in others)


def table(found: Sequence[Comparison]) -> Table:
    """One row a prompt."""
    shown = Table("sequence", "tokens", "rows that differ", "max difference", "same best token")
    for c in found:
        shown.add_row(
            str(c.sequence), str(c.rows), str(c.different), f"{c.largest:.3g}", f"{c.same_best} of {c.rows}"
        )
    return shown
