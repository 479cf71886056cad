"""One rank's device side: runs a StepPlan and gives its StepResult.

Owns what lasts between steps: token histories by request and tables by slot, on the host; and, where steps of decoding run on the
device by themselves (``decode``), the order in which their results come in. Such a step is launched and not waited for; every
other one (prompts, grammars, penalties, drafts that were drawn, ..) is resolved from the histories, run and sampled here and now.
Plans run in order, so the input of a span may be a token that the step before has sampled. Knows no policy; blocks are numbers
that plans bring.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch

from flashstep.config.speculative import DraftSampleMethod, Speculation
from flashstep.model.transformer import Transformer
from flashstep.request import Constraint, Request
from flashstep.runner.batch import BatchBuilder
from flashstep.runner.decode import DecodeStep, Form
from flashstep.runner.facts import Compiled, RunnerFacts
from flashstep.runner.histories import History, Slots
from flashstep.runner.host import HostStep, draft_rows
from flashstep.runner.routing import NOTHING_MEASURED, Counted, Measuring
from flashstep.runner.staging import Returning, to_device
from flashstep.sampling.constraint import Matcher, Vocabulary
from flashstep.speculate.depth import CostTable
from flashstep.speculate.dspark import Drafter, Proposal
from flashstep.step import SpanResult, StepPlan, StepResult
from flashstep.telemetry.log import Log

log = Log("runner")


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
    given for many. ``measuring`` puts other experts in, counts them, fills caches.
    """

    def __init__(
        self,
        facts: RunnerFacts,
        *,
        model: Transformer,
        batches: BatchBuilder,
        vocabulary: Vocabulary | None,
        drafter: Drafter | None = None,
        costs: CostTable | None = None,
        decode: DecodeStep | None = None,
        measuring: Measuring = NOTHING_MEASURED,
    ) -> None:
        self._facts = facts
        self._model = model
        self._batches = batches
        self._vocabulary = vocabulary
        self.decode = decode
        self._own_drafter = drafter
        self.routing, self._filled = measuring
        self._in_flight: deque[Step] = deque()
        self._has_told = False
        self._histories: dict[str, History] = {}
        self._slots = Slots(
            facts.scheduler.max_num_seqs, max_model_len=facts.max_model_len, block_size=facts.cache.block_size
        )
        self._host = HostStep(
            facts,
            model=model,
            batches=batches,
            slots=self._slots,
            drafter=drafter,
            costs=costs,
            routing=self.routing,
        )

    @property
    def drafter(self) -> Drafter | None:
        """What proposes behind the host's steps; checks put others in its place."""
        return self._host.drafter

    @drafter.setter
    def drafter(self, drafter: Drafter | None) -> None:
        self._host.drafter = drafter

    @property
    def facts(self) -> RunnerFacts:
        return self._facts

    @property
    def balancedness(self) -> float | None:
        """See ``facts.Runner``."""
        return self.routing.balancedness

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
        return Step(self, plan, done=self._host.run(plan))

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
        self._host.use_threads(form.rows)
        self.assign_experts(form)
        decode.state.tell(
            [span.slot for span in plan.spans], bounds, slots=self._slots, requests=form.requests
        )
        outcome = Returning(decode.launch(form))
        counted = self.routing.counted(drafted=form.proposed > 0)
        step = Step(self, plan, outcome=outcome, histories=histories, verified=form.verified, counted=counted)
        self._in_flight.append(step)
        return step

    def assign_experts(self, form: Form) -> None:
        """Queue the experts of the next step of ``form``, where others than the routers choose them."""
        self.routing.assign(form.rows)
        if form.proposed:
            self.routing.assign_drafts(draft_rows(self._model, form.requests))

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
        self.routing.record(step.counted)
        step.end(StepResult(step=step.plan.step, spans=tuple(results)))

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
                assert self._filled is not None, "nobody hands records over"
                blocks = (to_device(ids, self._batches.device) for ids in self._slots.receiving(span))
                self._filled.fill(span.slot, *blocks)
