"""``flashstep check``: is this checkpoint usable, and does the engine compute what the oracle computes on it?

First the engine is built, which refuses a checkpoint with everything that is wrong with it. Then the oracle, in a process of
its own (docs/decisions/004), gives the logits of whole sequences, and the engine's log-probabilities of their beginnings,
prefilled through the paged caches, are compared with them position by position. Equal means equal, bit for bit.
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

import tyro
from rich.table import Table

from flashstep.cli.model import Model, resolve
from flashstep.cli.terminal import OUT, note, waiting
from flashstep.config.errors import ConfigError
from flashstep.config.model import ModelConfig
from flashstep.config.serve import EngineOptions
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

        from flashstep.cli.local import LocalModel

        local = LocalModel(config)
        model = ModelConfig.read(folder)
        note(
            f"{folder}: configuration, tensor names, shapes and dtypes, and the tokenizer's token map are as they must be"
        )
        lengths = prompt_lengths(model, min(local.max_model_len - 1, LONGEST))
        found = []
        for number in range(SEQUENCES):
            ids = random.Random(number).choices(range(model.vocab_size), k=lengths[-1])
            with waiting(f"oracle: sequence {number + 1} of {SEQUENCES}, {len(ids)} tokens"):
                logits = oracle_logits(folder, ids)
            with waiting(f"engine: sequence {number + 1} of {SEQUENCES}, {len(lengths)} prompts"):
                found += [
                    compare(local, ids[:length], logits[:length], sequence=number + 1) for length in lengths
                ]
        OUT.print(table(found))
        different = sum(comparison.different for comparison in found)
        rows = sum(comparison.rows for comparison in found)
        OUT.print(
            f"{rows} rows compared, {different} differ"
            if different
            else f"{rows} rows compared, all equal bit for bit"
        )
        return DIFFERENT if different else 0


def prompt_lengths(model: ModelConfig, longest: int) -> list[int]:
    """Around every border that the architecture has: pairs, window, selection, candidates; ascending."""
    window, top = model.sliding_window, model.index_topk if model.kv_source_layer_ids else 0
    borders = [1, 2, 3, window, window + 1, 2 * window + 3, top + 1, 2 * top + 5, 2 * top + window + 8]
    if model.candidate_source_layer_id >= 0:
        borders.append(model.candidate_topk_blocks * model.candidate_block_size + window + 5)
    return sorted({length for length in borders if 1 <= length <= longest})


def oracle_logits(folder: Path, ids: Sequence[int]) -> "Tensor":
    """fp32 logits [T, V] of ``ids`` by ``python -m oracle``; ``ConfigError`` if it cannot run."""
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
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise ConfigError(
                "the comparison", [f"the oracle ended with exit code {done.returncode}: {last}"]
            )
        return load_file(out)["logits"]


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
