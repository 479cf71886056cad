"""The engine in one process: add, abort, and a step in three moves, plan, run (launch, and wait for the result), commit.

Owns a scheduler and a runner. Takes Requests; gives RequestOutputs. ``loop`` drives the same moves with two steps in flight.
The door is here: what the scheduler or the sampler could trip over is refused with ``ValueError`` before it is queued.
"""

import random
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from typing import NamedTuple

import msgspec

from flashstep.engine.interrupt import held
from flashstep.ipc.messages import Ready, RequestOutput, Stats
from flashstep.request import Constraint, Request, problems
from flashstep.runner.facts import Compiled, Launched, Runner
from flashstep.scheduler.progress import Progress
from flashstep.scheduler.scheduler import Scheduler
from flashstep.step import MAX_IN_FLIGHT, StepPlan, StepResult

SEED_BITS = 63


class Planned(NamedTuple):
    """A plan, the requests that the runner hears of with it, and the constraints of those that have one."""

    plan: StepPlan
    requests: tuple[Request, ...]
    compiled: dict[str, Compiled]


class Engine:
    """See the module's docstring. ``seed`` makes the seeds of requests that bring none repeatable."""

    def __init__(self, runner: Runner, *, seed: int) -> None:
        facts = runner.facts
        self._runner = runner
        self._scheduler = Scheduler(
            facts.scheduler,
            facts.cache,
            sliding_window=facts.sliding_window,
            eos_token_ids=facts.eos_token_ids,
            speculation=facts.speculation,
        )
        self._vocab_size = facts.vocab_size
        self._seeds = random.Random(seed)
        self._compiled: dict[str, Compiled] = {}  # of requests that the runner has not heard of

    @property
    def ready(self) -> Ready:
        """What a front end must know."""
        facts = self._runner.facts
        return Ready(
            max_model_len=facts.scheduler.max_model_len,
            max_num_seqs=facts.scheduler.max_num_seqs,
            num_blocks=facts.cache.num_blocks,
            block_size=facts.cache.block_size,
            hit_policy=facts.cache.hit_policy.value,
            enable_prefix_caching=facts.cache.enable_prefix_caching,
            scheduling_policy=facts.scheduler.policy,
            falsifies=facts.falsifies,
            vocab_size=facts.vocab_size,
            token_map_fingerprint=facts.token_map_fingerprint,
        )

    # ---- requests ------------------------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """``ValueError`` tells the user what is wrong with ``request``, as far as can be seen without compiling a grammar."""
        found = problems(request.params, self._vocab_size)
        if request.prompt and not 0 <= min(request.prompt) <= max(request.prompt) < self._vocab_size:
            found.append(f"the prompt holds a token id outside 0..{self._vocab_size - 1}")
        if request.params.constraint is not None and not self._runner.facts.follows_grammars:
            found.append(
                "this checkpoint has no tokenizer.json that llguidance reads: no constraint can be followed"
            )
        if request.transferred and not self._runner.facts.fills_cache:
            found.append("no records come from outside this engine: the whole prompt is computed here")
        if found:
            raise ValueError("; ".join(found))

    def compile(self, constraint: Constraint) -> Compiled:
        """What ``add`` needs of a constraint that was checked; a large one takes a second. From any thread, beside the steps."""
        return self._runner.compile(constraint)

    def add(self, request: Request, compiled: Compiled | None = None) -> None:
        """Queue ``request``, with a seed if it has none; ``ValueError`` tells the user what is wrong with it.

        ``compiled`` None: its constraint, if it has one, is compiled here and now.
        """
        self.check(request)
        constraint = request.params.constraint
        if constraint is not None and compiled is None:
            compiled = self.compile(constraint)
        if compiled is not None and compiled.failure is not None:
            raise ValueError(compiled.failure)
        if request.params.seed is None:
            params = msgspec.structs.replace(request.params, seed=self._seeds.getrandbits(SEED_BITS))
            request = msgspec.structs.replace(request, params=params)
        if self._runner.facts.fills_cache:
            # all but the last token, whose row gives the first token of the answer
            request = msgspec.structs.replace(request, transferred=len(request.prompt) - 1)
        self._scheduler.add(request)
        if compiled is not None:
            self._compiled[request.id] = compiled

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """End requests now; unknown and finished ids are ignored."""
        progress = self._scheduler.abort(request_ids)
        for item in progress:
            self._compiled.pop(item.request_id, None)
        return [_output(item) for item in progress]

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    @property
    def in_flight(self) -> int:
        """Steps that were planned and not committed."""
        return self._scheduler.in_flight

    @property
    def unfinished(self) -> tuple[str, ...]:
        return self._scheduler.unfinished

    # ---- a step, in three moves ----------------------------------------------------------------------------------

    def plan(self) -> Planned | None:
        """The next step; None if nothing can run before a step in flight is committed, or nothing is to do."""
        plan = self._scheduler.plan()
        if plan is None:
            return None
        requests = self._scheduler.first_admitted()
        compiled = {
            request.id: self._compiled.pop(request.id)
            for request in requests
            if request.params.constraint is not None
        }
        return Planned(plan, requests, compiled)

    def launch(self, planned: Planned) -> Launched:
        """Start a planned step, which may not be over then. In order, every plan, always from the same thread."""
        return self._runner.launch(planned.plan, planned.requests, planned.compiled)

    def run(self, planned: Planned) -> StepResult:
        """Start a planned step and wait for it."""
        return self.launch(planned).result()

    def commit(self, result: StepResult) -> list[RequestOutput]:
        """Take the result of the oldest step in flight."""
        return [_output(item) for item in self._scheduler.commit(result)]

    def step(self) -> list[RequestOutput]:
        """Plan, run, commit, one after the other. Empty when there is nothing to do."""
        planned = self.plan()
        return [] if planned is None else self.commit(self.run(planned))

    def steps(self, *, ahead: bool = True) -> Generator[list[RequestOutput]]:
        """Run until nothing is left to do, as the loop does it: the next step is launched before a result is waited for.

        Gives the outputs of one step after the other. A step that was over when it was launched does not wait for the launch
        behind it; ``ahead`` False: none does. Requests may be added and aborted in between; whoever leaves early leaves no step
        in flight. Ctrl-C leaves so, too, behind the step that runs (``interrupt``).
        """
        launched: deque[Launched] = deque()
        with held() as check:
            while self.has_work:
                while (
                    len(launched) < (MAX_IN_FLIGHT if ahead else 1)
                    and not (launched and launched[0].over)
                    and (planned := self.plan()) is not None
                ):
                    launched.append(self.launch(planned))
                outputs = self.commit(launched.popleft().result())
                try:
                    yield outputs
                    check()
                except (GeneratorExit, KeyboardInterrupt):
                    while launched:
                        self.commit(launched.popleft().result())
                    raise

    def generate(self, requests: Sequence[Request]) -> dict[str, list[RequestOutput]]:
        """Run ``requests`` to their ends and give all outputs of each, by id. Where it ends early, they are aborted."""
        outputs: dict[str, list[RequestOutput]] = {request.id: [] for request in requests}
        try:
            for request in requests:
                self.add(request)
            with closing(self.steps()) as steps:
                for step in steps:
                    for output in step:
                        outputs[output.id].append(output)
        finally:
            self.abort(outputs)
        return outputs

    # ---- telling -------------------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        return Stats(
            **msgspec.structs.asdict(self._scheduler.stats()), balancedness=self._runner.balancedness
        )

    def check_integrity(self) -> None:
        """Assert that no block or slot is lost or held twice; when idle, that none is held."""
        self._scheduler.check_integrity()


def _output(item: Progress) -> RequestOutput:
    if item.finish_reason is None and item.cached_tokens is None:  # the common case: one more token
        return RequestOutput(
            id=item.request_id,
            tokens=item.tokens,
            logprobs=item.logprobs,
            prompt_logprobs=item.prompt_logprobs,
        )
    return RequestOutput(
        id=item.request_id,
        tokens=item.tokens,
        finish_reason=None if item.finish_reason is None else item.finish_reason.value,
        failure=item.failure,
        stop_token=item.stop_token,
        logprobs=item.logprobs,
        prompt_logprobs=item.prompt_logprobs,
        cached_tokens=item.cached_tokens,
        replayed_tokens=item.replayed_tokens,
        transferred_tokens=item.transferred_tokens,
        queued_s=item.queued_s,
        prefill_s=item.prefill_s,
        preemptions=item.preemptions,
        acceptance=item.acceptance,
    )
