"""The speculation part of ``flashstep check``: does the draft compute what the oracle's does, and do drafts leave tokens alone?

One engine does it all: other drafters take the place of its own, among them one that proposes nothing, which is plain decoding.
Drafts that are right up to a chosen place make every number of them stand at odd and even positions; tokens must be those of
plain decoding, greedy and drawn. Point masses only: drawn drafts keep a distribution, not tokens (docs/decisions/005).
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.table import Table

from flashstep.cli.terminal import waiting
from flashstep.config.errors import ConfigError
from flashstep.config.speculative import DraftSampleMethod, RejectionSampleMethod, SpeculativeOptions
from flashstep.request import SamplingParams

if TYPE_CHECKING:
    from flashstep.cli.local import LocalModel
    from flashstep.speculate.dspark import Drafter

LENGTHS = (1, 8, 16, 24, 37, 48, 64, 80)  # with 48 tokens more most end where a block does
NEW_TOKENS = 48
CONTINUED = 4
FORCED = 100.0  # a bias that no logit outweighs: it makes a prompt's next token the one that the oracle drafts behind
CONFIDENCE_TOLERANCE = 1e-5  # the sigmoid's, fp32


@dataclass(frozen=True)
class DraftComparison:
    """Drafts behind some anchors: how many blocks, how many that differ, and the largest difference of a confidence."""

    anchors: int
    different: int
    largest: float


@dataclass(frozen=True)
class DrafterRun:
    """Some requests under one drafter: those whose tokens are not plain decoding's, and what the drafts saved."""

    name: str
    requests: int
    different: int
    steps: int
    mean_length: float | None


def options_for_check(given: SpeculativeOptions | None) -> SpeculativeOptions:
    """What ``check`` runs with; ``ConfigError`` for what it cannot compare token by token."""
    if given is None:
        return SpeculativeOptions()
    problems = []
    if given.draft_sample_method is not DraftSampleMethod.GREEDY:
        problems.append(
            'check compares tokens; with draft_sample_method "probabilistic" only distributions are kept: leave it out'
        )
    if given.rejection_sample_method is RejectionSampleMethod.SYNTHETIC:
        problems.append(
            "check compares tokens; synthetic acceptance makes wrong ones on purpose: leave it out"
        )
    if problems:
        raise ConfigError("--speculative-config", problems)
    return given


def compare_drafts(
    local: "LocalModel", ids: Sequence[int], lengths: Sequence[int], oracle_drafts: dict
) -> DraftComparison:
    """The engine's drafts behind ``ids[n]``, n in ``lengths``, against the oracle's (``python -m oracle --draft-at``)."""
    from flashstep.speculate.scripted import Watched

    own = local.runner.drafter
    assert own is not None
    different, largest = 0, 0.0
    expected = zip(
        oracle_drafts["draft_positions"].tolist(),
        oracle_drafts["draft_tokens"].tolist(),
        oracle_drafts["draft_confidence"].double().sigmoid().tolist(),
        strict=True,
    )
    by_position = {position: (tokens[1:], sure) for position, tokens, sure in expected}
    for n in lengths:
        watched = Watched(own)
        local.runner.drafter = watched
        forced = SamplingParams(
            max_tokens=2 + len(by_position[n][0]),
            temperature=0.0,
            ignore_eos=True,
            logit_bias={ids[n]: FORCED},
        )
        for _ in local.stream(ids[:n], forced):
            if watched.seen:
                break  # the first proposal is all that is wanted
        anchor, proposal = watched.seen[0]
        assert (anchor.position, anchor.token) == (n, ids[n])
        tokens, sure = by_position[n]
        count = len(proposal.tokens)
        apart = max(abs(a - b) for a, b in zip(proposal.confidences, sure, strict=False))
        different += list(proposal.tokens) != tokens[:count] or apart > CONFIDENCE_TOLERANCE
        largest = max(largest, apart)
    local.runner.drafter = own
    return DraftComparison(len(lengths), different, largest)


def compare_tokens(local: "LocalModel") -> list[DrafterRun]:
    """Plain decoding, then each drafter on the same requests."""
    own, speculation = local.runner.drafter, local.runner.facts.speculation
    assert own is not None and speculation is not None
    prompts, params = _requests(local)
    truth: dict[int | None, tuple[int, ...]] = {}
    continued: list[tuple[int, ...]] = []
    runs = []
    for name, drafter in _drafters(
        own, truth, num_tokens=speculation.num_tokens, vocab_size=local.vocab_size
    ):
        local.runner.drafter = drafter
        before = local.engine.stats()
        with waiting(f"engine: {len(prompts)} requests and their continuations, {name}"):
            answers = _answers(local, prompts, params, salt=name)
            if not truth:  # plain decoding, the first; in place, since the scripted drafters read it
                truth |= {p.seed: answer for p, answer in zip(params, answers, strict=True)}
            # asked on about what they were told, out of the cache: what drafts have left there counts, too
            asked_on = [[*prompt, *truth[p.seed], 0] for prompt, p in zip(prompts, params, strict=True)]
            greedy = [SamplingParams(max_tokens=CONTINUED, temperature=0.0, ignore_eos=True)] * len(prompts)
            more = _answers(local, asked_on, greedy, salt=name)
            continued = continued or more
        after = local.engine.stats()
        assert before.acceptance is not None and after.acceptance is not None
        verified = after.acceptance.steps - before.acceptance.steps
        stood = after.acceptance.accepted_tokens - before.acceptance.accepted_tokens
        runs.append(
            DrafterRun(
                name=name,
                requests=len(prompts),
                different=sum(
                    answer != truth[p.seed] or on != on_truth
                    for p, answer, on, on_truth in zip(params, answers, more, continued, strict=True)
                ),
                steps=after.steps - before.steps,
                mean_length=1 + stood / verified if verified else None,
            )
        )
    local.runner.drafter = own
    return runs


def _answers(
    local: "LocalModel", prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], *, salt: str
) -> list[tuple[int, ...]]:
    outputs = local.run_all(prompts, params, cache_salt=salt)
    return [tuple(token for output in of_one for token in output.tokens) for of_one in outputs]


def _requests(local: "LocalModel") -> tuple[list[list[int]], list[SamplingParams]]:
    """Half greedy, half drawn; the seed is the request's number."""
    chance = random.Random(3)
    longest = min(local.max_model_len - NEW_TOKENS - 1 - CONTINUED, 200)
    prompts = [chance.choices(range(local.vocab_size), k=max(min(length, longest), 1)) for length in LENGTHS]
    params = [
        SamplingParams(
            max_tokens=min(NEW_TOKENS, local.room(prompt)),
            temperature=float(number % 2),
            seed=number,
            ignore_eos=True,
        )
        for number, prompt in enumerate(prompts)
    ]
    return prompts, params


def _drafters(
    own: "Drafter", truth: dict[int | None, tuple[int, ...]], *, num_tokens: int, vocab_size: int
) -> "Sequence[tuple[str, Drafter]]":
    from flashstep.speculate.dspark import Anchor
    from flashstep.speculate.scripted import Scripted

    chance = random.Random(4)

    def right_until(anchor: Anchor, count: int) -> list[int]:
        """The true tokens, wrong at a place that changes from step to step."""
        following = list(truth.get(anchor.seed, ())[anchor.output_position + 1 :])[:count]
        place = anchor.position % (num_tokens + 1)
        return [
            (token + 1) % vocab_size if number == place else token for number, token in enumerate(following)
        ]

    named: list[tuple[str, Callable[[Anchor, int], Sequence[int]]]] = [
        ("no drafts", lambda _anchor, _count: ()),
        ("random drafts", lambda _anchor, count: chance.choices(range(vocab_size), k=count)),
        ("true drafts up to a place", right_until),
    ]
    scripted: list[tuple[str, Drafter]] = [(name, Scripted(drafts)) for name, drafts in named]
    return [*scripted, ("the model's own drafts", own)]


def table(runs: Sequence[DrafterRun]) -> Table:
    """One row a drafter; tokens a step are the mean acceptance length of steps that had drafts."""
    shown = Table("drafter", "requests that differ", "steps", "tokens a step")
    for run in runs:
        length = "-" if run.mean_length is None else f"{run.mean_length:.2f}"
        shown.add_row(run.name, f"{run.different} of {run.requests}", str(run.steps), length)
    return shown
