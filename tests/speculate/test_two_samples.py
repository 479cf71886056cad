"""Speculation on against off, on continuations of a random model: one distribution; and a wrong one would be seen."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from flashstep.config.speculative import DraftSampleMethod, RejectionSampleMethod, SpeculativeOptions
from flashstep.engine.engine import Engine
from flashstep.request import SamplingParams
from flashstep.runner.build import build_runner
from flashstep.speculate import verify
from flashstep.speculate.dspark import Anchor, Proposal
from flashstep.weights.dummy import write_dummy
from tests.runner.conftest import write_tokenizer
from tests.speculate.memory import engine_config
from tests.speculate.two_samples import compare, draw
from tests.weights.conftest import tiny_json

COUNT = 1500
PROMPTS = [[5, 9, 33], [7], [40, 41, 42, 43, 44, 45, 46]]
PARAMS = SamplingParams(max_tokens=4, temperature=0.5, top_p=0.9, ignore_eos=True, frequency_penalty=0.1)
METHODS = [RejectionSampleMethod.STANDARD, RejectionSampleMethod.BLOCK]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("tiny")
    write_dummy(folder, tiny_json(), seed=11)
    write_tokenizer(folder)
    return folder


class Habits:
    """Draws its drafts from what came behind the newest token, the frequent made more frequent: often accepted, never right.

    (The random draft layers agree with the random target too rarely for any slip to show.)
    """

    def __init__(self, counts: Counter) -> None:
        self._weights_VV = torch.full((64, 64), 0.1)
        for (_, first, second), count in counts.items():
            self._weights_VV[first, second] += count

    def propose(self, anchors: Sequence[Anchor], *, count: int, **_tables: object) -> list[Proposal]:
        return [self._one(anchor, count) for anchor in anchors]

    def _one(self, anchor: Anchor, count: int) -> Proposal:
        logits_V = 2.5 * PARAMS.temperature * self._weights_VV[anchor.token].log()
        drafts = [
            verify.draw_drafts(
                logits_V.unsqueeze(0),
                torch.tensor([anchor.temperature]),
                seeds_R=torch.tensor([anchor.seed]),
                positions_R=torch.tensor([anchor.output_position]),
                offset=place,
            )
            for place in range(count)
        ]
        logits_KV = logits_V.repeat(count, 1)
        return Proposal(tokens=tuple(map(int, drafts)), confidences=(0.5,) * count, logits_KV=logits_KV)


def sample(
    checkpoint: Path, options: SpeculativeOptions | None, *, first_seed: int, habits: Counter | None = None
) -> Counter:
    config = engine_config(checkpoint, max_num_seqs=64, max_num_batched_tokens=512, speculative=options)
    runner = build_runner(config)
    if habits is not None:
        runner.drafter = Habits(habits)
    seeds = range(first_seed, first_seed + COUNT)
    found = draw(Engine(runner, seed=0), PROMPTS, seeds=seeds, params=PARAMS, depth=2)
    if habits is not None:
        assert found.acceptance is not None and found.acceptance.mean_length > 1.1
    return found.counts


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Counter:
    return sample(checkpoint, None, first_seed=0)


def drawn(method: RejectionSampleMethod) -> SpeculativeOptions:
    return SpeculativeOptions(
        num_speculative_tokens=3,
        draft_sample_method=DraftSampleMethod.PROBABILISTIC,
        rejection_sample_method=method,
    )


@pytest.mark.parametrize("method", METHODS)
def test_drawn_drafts_keep_the_distribution(
    checkpoint: Path, plain: Counter, method: RejectionSampleMethod
) -> None:
    found = compare(plain, sample(checkpoint, drawn(method), first_seed=COUNT, habits=plain))
    assert found.categories > 20
    assert found.p_value > 1e-4, found


@pytest.mark.parametrize("method", METHODS)
def test_the_two_samples_tell_a_wrong_residual(
    checkpoint: Path, plain: Counter, method: RejectionSampleMethod, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commonest slip, drawing from p again after a rejection."""

    def from_p(drafts_RK, log_p_RTV, log_q_RKV, accepted_R, *, log_scales_RT):
        return log_p_RTV[torch.arange(len(accepted_R)), accepted_R]

    monkeypatch.setattr(verify, "residual", from_p)
    found = compare(plain, sample(checkpoint, drawn(method), first_seed=COUNT, habits=plain))
    assert found.p_value < 1e-4, found
