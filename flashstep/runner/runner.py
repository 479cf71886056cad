"""One rank's device side: runs a StepPlan and gives its StepResult.

Owns what lasts between steps: token histories by request and tables by slot, on the host; and, where steps of decoding run on the
device by themselves (``decode``), the order in which their results come in. Such a step is launched and not waited for; every
other one (prompts, grammars, penalties, drafts that were drawn, ..) is resolved from the histories, run and sampled here and now.
Plans run in order, so the input of a span may be a token that the step before has sampled. Knows no policy; blocks are numbers
that plans bring.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashstep.cache.filled import FilledCache
from flashstep.config.speculative import DraftSampleMethod, RejectionSampleMethod, Speculation
from flashstep.model.transformer import Transformer
from flashstep.request import Constraint, Request, TokenLogprob
from flashstep.runner.batch import BatchBuilder, prompt_logprob_count, wanted_offsets
from flashstep.runner.decode import DecodeStep, Form
from flashstep.runner.facts import Compiled, RunnerFacts
from flashstep.runner.histories import ABSENT, History, Slots
from flashstep.runner.resolve import Resolved, adapt, resolve
from flashstep.runner.routing import Counted, ExpertRouting
from flashstep.runner.staging import Returning, to_device
from flashstep.sampling.constraint import Matcher, Vocabulary
from flashstep.sampling.logprobs import token_logprobs
from flashstep.sampling.sampler import SampleRow
from flashstep.speculate.depth import CostTable, survivals
from flashstep.speculate.dspark import Anchor, Drafter, Proposal
from flashstep.speculate.verify import Drafted, verify
from flashstep.step import Span, SpanResult, StepPlan, StepResult
from flashstep.telemetry.log import Log

PARALLEL_ROWS = 512  # the smallest step at which a second thread was seen to pay: docs/log.md, 2026-11-30
log = Log("runner")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """What a span that samples has brought; ``failure``: why its constraint lets nothing follow."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    failure: str | None = None


NOTHING = Sampled(tokens=(), logprobs=())


class Step:
    """A step that was launched (``facts.Launched``). ``outcome`` is what the device will say of it, of ``histories`` in order."""

    def __init__(
        self,
        runner: "ModelRunner",
        plan: StepPlan,
        *,
        done: StepResult | None = None,
        outcome: Returning | None = None,
        histories: Sequence[History] = (),
        verified: int = 0,
        counted: Counted | None = None,
    ) -> None:
        assert (done is None) != (outcome is None)
        self._runner = runner
        self.plan = plan
        self.done = done
        self.outcome = outcome
        self.histories = histories
        self.verified = verified
        self.counted = counted
        self._waiting: list[Callable[[], None]] = []

    @property
    def over(self) -> bool:
        return self.done is not None

    def when_over(self, call: Callable[[], None]) -> None:
        """See ``facts.Launched``."""
        if self.over:
            call()
        else:
            self._waiting.append(call)

    def end(self, result: StepResult) -> None:
        """It is over with ``result``."""
        self.done = result
        for call in self._waiting:
            call()

    def result(self) -> StepResult:
        """Waits for the device. Earlier steps are taken in first: their tokens stand before this one's."""
        if self.done is None:
            self._runner.settle(self)
        assert self.done is not None
        return self.done


def decodes_by_itself(speculation: Speculation | None) -> bool:
    """Whether steps under ``speculation`` can be decided on the device: drafts are point masses, as many as the plan says."""
    return speculation is None or (
        speculation.draft_sample_method is DraftSampleMethod.GREEDY and not speculation.adaptive
    )


class ModelRunner:
    """The runner of a whole model on one device (see ``facts.Runner``). Requests come with a seed: the engine draws it.

    ``vocabulary`` is what grammars need; ``drafter`` None decodes one token a step (checks put others in its place); ``costs``
    None verifies all that a plan allows; ``decode`` runs steps of plain decoding with ``drafter``'s own drafts, None: there are
    no such steps. Torch's threads are chosen by step, in the thread that runs it: one for few rows (decode), all that torch was
    given for many.
    """

    def __init__(
        self,
        facts: RunnerFacts,
        *,
        model: Transformer,
        batches: BatchBuilder,
        device: torch.device,
        vocabulary: Vocabulary | None,
        drafter: Drafter | None = None,
        costs: CostTable | None = None,
        decode: DecodeStep | None = None,
    ) -> None:
        self._facts = facts
        self._model = model
        self._batches = batches
        self._device = device
        self._vocabulary = vocabulary
        self.drafter = drafter
        self._costs = costs
        self.decode = decode
        self._own_drafter = drafter
        self.routing: ExpertRouting | None = None  # whoever measures puts these in
        self.filled: FilledCache | None = None
        self._in_flight: deque[Step] = deque()
        self._has_told = False
        self._threads = torch.get_num_threads()
        self._histories: dict[str, History] = {}
        self._slots = Slots(
            facts.scheduler.max_num_seqs, max_model_len=facts.max_model_len, block_size=facts.cache.block_size
        )

    @property
    def facts(self) -> RunnerFacts:
        return self._facts

    @property
    def balancedness(self) -> float | None:
        """See ``facts.Runner``."""
        return None if self.routing is None else self.routing.balancedness

    def compile(self, constraint: Constraint) -> Matcher:
        """What one request needs to follow ``constraint``. From any thread."""
        assert self._vocabulary is not None, "the engine refuses constraints where there is no tokenizer"
        return Matcher(self._vocabulary, constraint, drafts=self._facts.speculation is not None)

    def run(self, plan: StepPlan, requests: Sequence[Request]) -> StepResult:
        """Launch one step, of requests without constraints, and wait for it."""
        return self.launch(plan, requests, {}).result()

    @torch.inference_mode()
    def launch(self, plan: StepPlan, requests: Sequence[Request], compiled: Mapping[str, Compiled]) -> Step:
        """Run one step, or queue it; see ``facts.Runner``."""
        if plan.admitted:
            self.settle()  # a slot is taken with what its request has by now
        self._follow(plan, requests, compiled)
        if self.decode is not None and self._is_plain_decoding(plan):
            return self._launch_decoding(plan, self.decode)
        self.settle()
        if self.decode is not None:
            for span in plan.spans:
                self.decode.state.outdate(span.slot)
        return Step(self, plan, done=self._run(plan))

    # ---- steps that the device takes by itself -------------------------------------------------------------------

    def _is_plain_decoding(self, plan: StepPlan) -> bool:
        if any(span.drafts is None for span in plan.spans) or self.drafter is not self._own_drafter:
            return False  # prompts; or somebody else proposes, on the host
        # tokens that each may have got when this step is over, besides those that are known
        count = sum(1 + step.verified for step in self._in_flight) + max(
            1 + (span.drafts or 0) for span in plan.spans
        )
        holders = (self._slots.holder(span.slot) for span in plan.spans)
        plain = all(
            history.plain
            and len(history.output) >= history.request.params.min_tokens
            and (history.matcher is None or history.matcher.free(count))
            for history in holders
        )
        if not plain and not self._has_told:
            self._has_told = True
            log.info("steps wait for the host while a request has a grammar, a penalty or log-probabilities")
        return plain

    def _launch_decoding(self, plan: StepPlan, decode: DecodeStep) -> Step:
        bounds = [span.drafts or 0 for span in plan.spans]
        histories = [self._slots.holder(span.slot) for span in plan.spans]
        form = decode.form(
            len(plan.spans),
            verified=max(bounds),
            proposed=plan.propose,
            cuts=any(history.cuts for history in histories),
        )
        torch.set_num_threads(self._threads if form.rows >= PARALLEL_ROWS else 1)
        self.assign_experts(form)
        decode.state.tell(
            [span.slot for span in plan.spans], bounds, slots=self._slots, requests=form.requests
        )
        outcome = Returning(decode.launch(form))
        counted = None if self.routing is None else self.routing.counted(drafted=form.proposed > 0)
        step = Step(self, plan, outcome=outcome, histories=histories, verified=form.verified, counted=counted)
        self._in_flight.append(step)
        return step

    def assign_experts(self, form: Form) -> None:
        """Queue the experts of the next step of ``form``, where others than the routers choose them."""
        if self.routing is not None:
            self.routing.assign(form.rows)
            if form.proposed:
                self.routing.assign_drafts(self._draft_rows(form.requests))

    def settle(self, last: Step | None = None) -> None:
        """Take in what steps in flight have brought, oldest first, up to ``last`` (None: all of them)."""
        while self._in_flight:
            step = self._in_flight.popleft()
            self._take_in(step)
            if step is last:
                return

    def _take_in(self, step: Step) -> None:
        assert step.outcome is not None
        results = []
        for span, history, row in zip(
            step.plan.spans, step.histories, step.outcome.wait().tolist(), strict=False
        ):
            count, drafted, *numbers = row
            tokens, drafts = numbers[:count], numbers[1 + step.verified :]
            history.output.extend(tokens)
            if history.matcher is not None:
                history.matcher.accept(tokens)
            present = tuple(draft for draft in drafts if draft >= 0)
            # nobody asks for confidences: a runner that does never decodes by itself
            history.proposal = Proposal(tokens=present, confidences=()) if present else None
            results.append(
                SpanResult(
                    slot=span.slot, request_id=history.request.id, tokens=tuple(tokens), drafted=drafted
                )
            )
        if self.routing is not None:
            self.routing.record(step.counted)
        step.end(StepResult(step=step.plan.step, spans=tuple(results)))

    # ---- all others ----------------------------------------------------------------------------------------------

    def _run(self, plan: StepPlan) -> StepResult:
        resolved = self._resolve(plan)
        if not resolved:
            return StepResult(step=plan.step, spans=tuple(self._nothing(span) for span in plan.spans))
        rows = sum(item.span.length for item in resolved)
        torch.set_num_threads(
            self._threads if rows >= PARALLEL_ROWS else 1
        )  # of the CPU, which may be the device
        batch = self._batches.build(resolved, self._slots)
        if self.routing is not None:
            self.routing.assign(rows, tail_rows=None if batch.tail_rows is None else len(batch.tail_rows))
        logits_RV = self._model.forward(batch)
        by_span = logits_RV.split([len(wanted_offsets(item)) for item in resolved])
        prompt_logprobs = [
            _prompt_logprobs(logits, item) for logits, item in zip(by_span, resolved, strict=True)
        ]
        sampled = self._sample(by_span, resolved)
        drafted = False
        if self.drafter is not None and plan.propose:
            drafted = self._propose([item for item in resolved if item.span.sample], count=plan.propose)
        if self.routing is not None:
            self.routing.record(self.routing.counted(drafted=drafted))
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

    def _follow(self, plan: StepPlan, requests: Sequence[Request], compiled: Mapping[str, Compiled]) -> None:
        """Bring histories and slots up to ``plan``."""
        for request_id in plan.finished:
            del self._histories[request_id]
        for slot in plan.released:
            self._slots.drop(slot)
        for request in requests:
            assert request.id not in self._histories, f"{request.id} is already here"
            assert request.params.seed is not None or request.params.temperature == 0, (
                "the engine draws seeds"
            )
            matcher = compiled.get(request.id)
            assert matcher is None or isinstance(matcher, Matcher), "constraints are compiled here"
            assert (matcher is None) == (request.params.constraint is None), request.id
            self._histories[request.id] = History(request=request, matcher=matcher)
        for admission in plan.admitted:
            self._slots.take(admission, self._histories[admission.request_id])
            if self.decode is not None:
                self.decode.state.take(admission.slot)
        for span in plan.spans:
            self._slots.extend(span)
            if span.transferred:
                self._receive(span)

    def _receive(self, span: Span) -> None:
        """Put the records that precede ``span`` into its slot's blocks: whole blocks, whose other rows are written later."""
        assert self.filled is not None, "nobody hands records over"
        slot, size = span.slot, self._slots.block_size
        blocks = slice((span.start - span.transferred) // size, -(-span.start // size))
        windows = self._slots.window_blocks[slot, blocks]
        self.filled.fill(
            slot,
            to_device(self._slots.blocks[slot, blocks], self._device),
            to_device(windows[windows != ABSENT], self._device),
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
                allowed_V=None if mask is None else mask.to(self._device),
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
        if self.routing is not None:
            self.routing.assign_drafts(self._draft_rows(len(going_on)))
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
            window_table_RB=torch.from_numpy(self._slots.window_blocks[slots, :columns]).to(self._device),
            window_start_R=torch.from_numpy(self._slots.window_start[slots]).to(self._device),
            count=count,
        )
        for history, proposal in zip(histories, proposals, strict=True):
            history.proposal = proposal
        return True

    def _draft_rows(self, requests: int) -> int:
        """Rows of a draft pass: every block is run whole."""
        assert self._model.draft is not None
        return requests * self._model.draft.width


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
