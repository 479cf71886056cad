"""A step that the host resolves, runs and samples: prompts, grammars, penalties, log-probabilities, drafts that were drawn, ..

Takes plans whose slots and histories are up to date; gives their results, with what was sampled in the histories. ``decode`` is
its counterpart, which the device runs by itself. Knows no request but those in the slots, and no policy.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashstep.config.speculative import RejectionSampleMethod
from flashstep.model.transformer import Transformer
from flashstep.request import TokenLogprob
from flashstep.runner.batch import BatchBuilder, prompt_logprob_count, wanted_offsets
from flashstep.runner.facts import RunnerFacts
from flashstep.runner.histories import Slots
from flashstep.runner.resolve import Resolved, adapt, resolve
from flashstep.runner.routing import ExpertRouting
from flashstep.sampling.logprobs import token_logprobs
from flashstep.sampling.sampler import SampleRow
from flashstep.speculate.depth import CostTable, survivals
from flashstep.speculate.dspark import Anchor, Drafter
from flashstep.speculate.verify import Drafted, verify
from flashstep.step import Span, SpanResult, StepPlan, StepResult

PARALLEL_ROWS = 512  # the smallest step at which a second thread was seen to pay: docs/log.md, 2026-11-30


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """What a span that samples has brought; ``failure``: why its constraint lets nothing follow."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    failure: str | None = None


NOTHING = Sampled(tokens=(), logprobs=())


class HostStep:
    """Runs steps of ``slots``. ``drafter`` may be replaced between two steps; ``costs`` None verifies all that a plan allows."""

    def __init__(
        self,
        facts: RunnerFacts,
        *,
        model: Transformer,
        batches: BatchBuilder,
        slots: Slots,
        drafter: Drafter | None,
        costs: CostTable | None,
        routing: ExpertRouting,
    ) -> None:
        self._facts = facts
        self._model = model
        self._batches = batches
        self._slots = slots
        self.drafter = drafter
        self._costs = costs
        self._routing = routing
        self._threads = torch.get_num_threads()

    def use_threads(self, rows: int) -> None:
        """Torch's threads for a step of ``rows`` rows on a CPU: one for few, all that torch was given for many."""
        torch.set_num_threads(self._threads if rows >= PARALLEL_ROWS else 1)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Run ``plan``, whose slots have been extended, and wait for it."""
        resolved = self._resolve(plan)
        if not resolved:
            return StepResult(step=plan.step, spans=tuple(self._nothing(span) for span in plan.spans))
        rows = sum(item.span.length for item in resolved)
        self.use_threads(rows)
        batch = self._batches.build(resolved, self._slots)
        self._routing.assign(rows, tail_rows=None if batch.tail_rows is None else len(batch.tail_rows))
        logits_RV = self._model.forward(batch)
        by_span = logits_RV.split([len(wanted_offsets(item)) for item in resolved])
        prompt_logprobs = [
            _prompt_logprobs(logits, item) for logits, item in zip(by_span, resolved, strict=True)
        ]
        sampled = self._sample(by_span, resolved)
        drafted = False
        if self.drafter is not None and plan.propose:
            drafted = self._propose([item for item in resolved if item.span.sample], count=plan.propose)
        self._routing.record(self._routing.counted(drafted=drafted))
        results = {}
        for item, told in zip(resolved, prompt_logprobs, strict=True):
            news = sampled.get(item.span.slot, NOTHING)
            results[item.span.slot] = SpanResult(
                slot=item.span.slot,
                request_id=item.history.request.id,
                tokens=news.tokens,
                logprobs=news.logprobs,
                prompt_logprobs=told,
                drafted=len(item.drafts) + item.cut,
                failure=news.failure,
            )
        return StepResult(
            step=plan.step,
            spans=tuple(results.get(span.slot) or self._nothing(span) for span in plan.spans),
        )

    def _resolve(self, plan: StepPlan) -> list[Resolved]:
        speculation = self._facts.speculation
        found = (
            resolve(
                span,
                self._slots,
                max_model_len=self._facts.max_model_len,
                by_ratio=speculation is not None and not speculation.synthetic,
            )
            for span in plan.spans
        )
        resolved = [item for item in found if item is not None]
        return resolved if self._costs is None else adapt(resolved, self._costs)

    def _nothing(self, span: Span) -> SpanResult:
        """A decode span of a request that has all the tokens it may have."""
        return SpanResult(slot=span.slot, request_id=self._slots.holder(span.slot).request.id)

    # ---- sampling ------------------------------------------------------------------------------------------------

    def _sample(self, by_span: Sequence[Tensor], resolved: Sequence[Resolved]) -> dict[int, Sampled]:
        """By slot, for each span that samples: its tokens, appended to its history, and log-probabilities if asked for."""
        chosen = [
            (item, logits[-1 - len(item.drafts) :])
            for item, logits in zip(resolved, by_span, strict=True)
            if item.span.sample
        ]
        if not chosen:
            return {}
        speculation = self._facts.speculation
        verdicts = verify(
            torch.cat([logits for _, logits in chosen]),
            [self._drafted(item) for item, _ in chosen],
            rule=speculation.rejection_sample_method if speculation else RejectionSampleMethod.STANDARD,
            acceptance_rates=speculation.acceptance_rates if speculation else (),
        )
        results: dict[int, Sampled] = {}
        for (item, logits_RV), verdict in zip(chosen, verdicts, strict=True):
            history, tokens = item.history, verdict.tokens
            history.output.extend(tokens)
            if history.proposal is not None:
                history.foreseen = survivals(history.proposal.confidences)
                history.proposal = None
            failure = None
            if history.matcher is not None:
                # the history keeps what was sampled where nothing could be: its request ends, and steps in flight need a token
                tokens = tokens[: history.matcher.accept(tokens)]
                failure = history.matcher.failure
            count = history.request.params.logprobs
            logprobs = (
                []
                if count is None or not tokens
                else token_logprobs(logits_RV[: len(tokens)], tokens, counts=[count] * len(tokens))
            )
            results[item.span.slot] = Sampled(tokens=tokens, logprobs=tuple(logprobs), failure=failure)
        return results

    def _drafted(self, item: Resolved) -> Drafted:
        history = item.history
        params, prompt = history.request.params, history.request.prompt
        assert item.span.start + item.span.length - len(item.drafts) == history.length, (
            "only what follows the newest position is sampled"
        )
        masks: list[Tensor | None] = [None] * (1 + len(item.drafts))
        if history.matcher is not None:
            possible = item.drafts[: history.matcher.keep(item.drafts)]
            masks[: len(possible) + 1] = history.matcher.masks(possible)
        rows = [
            SampleRow(
                params=params,
                seed=params.seed or 0,  # None only where nothing is drawn
                position=len(history.output) + number,
                prompt=prompt,
                output=[*history.output, *item.drafts[:number]] if number else history.output,
                eos_token_ids=self._facts.eos_token_ids,
                allowed_V=None if mask is None else mask.to(self._batches.device),
            )
            for number, mask in enumerate(masks)
        ]
        drawn = history.proposal.logits_KV if history.proposal is not None and item.drafts else None
        return Drafted(rows=rows, drafts=item.drafts, draft_logits_KV=drawn)

    # ---- drafts --------------------------------------------------------------------------------------------------

    def _propose(self, resolved: Sequence[Resolved], *, count: int) -> bool:
        """Leave drafts with every request that has sampled and can use them. False: there is none."""
        assert self.drafter is not None
        going_on = [item for item in resolved if item.history.room(self._facts.max_model_len) > 1]
        if not going_on:
            return False
        self._routing.assign_drafts(draft_rows(self._model, len(going_on)))
        slots = [item.span.slot for item in going_on]
        histories = [item.history for item in going_on]
        columns = -(-max(history.length for history in histories) // self._slots.block_size)
        proposals = self.drafter.propose(
            [
                Anchor(
                    token=history.output[-1],
                    position=history.length - 1,
                    output_position=len(history.output) - 1,
                    seed=history.request.params.seed or 0,
                    temperature=history.request.params.temperature,
                )
                for history in histories
            ],
            window_table_RB=torch.from_numpy(self._slots.window_blocks[slots, :columns]).to(
                self._batches.device
            ),
            window_start_R=torch.from_numpy(self._slots.window_start[slots]).to(self._batches.device),
            count=count,
        )
        for history, proposal in zip(histories, proposals, strict=True):
            history.proposal = proposal
        return True


def draft_rows(model: Transformer, requests: int) -> int:
    """Rows of a draft pass: every block is run whole."""
    assert model.draft is not None
    return requests * model.draft.width


def _prompt_logprobs(logits_RV: Tensor, item: Resolved) -> tuple[TokenLogprob, ...]:
    """Of the prompt tokens at positions span.start + 1 .. , one for each row that predicts one."""
    request = item.history.request
    count = prompt_logprob_count(item.span, item.history)
    if count == 0:
        return ()
    asked = request.params.prompt_logprobs
    assert asked is not None
    tokens = request.prompt[item.span.start + 1 : item.span.start + 1 + count]
    return tuple(token_logprobs(logits_RV[:count], tokens, counts=[asked] * count))
