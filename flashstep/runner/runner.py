"""One rank's device side: runs a StepPlan (batch, forward, sample) and gives its StepResult.

Owns what lasts between steps: token histories by request and tables by slot. Plans run in order, so the input of a span may be a
token that the step before has sampled. Knows no policy; blocks are numbers that plans bring.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from flashstep.model.transformer import Transformer
from flashstep.request import Request, TokenLogprob
from flashstep.runner.batch import BatchBuilder, prompt_logprob_count, wanted_offsets
from flashstep.runner.facts import RunnerFacts
from flashstep.runner.histories import History, Slots
from flashstep.sampling.logprobs import token_logprobs
from flashstep.sampling.sampler import SampleRow, sample
from flashstep.step import Span, SpanResult, StepPlan, StepResult

PARALLEL_ROWS = 512  # the smallest step at which a second thread was seen to pay: docs/log.md, 2026-11-30


class ModelRunner:
    """The runner of a whole model on one device (see ``facts.Runner``). Requests come with a seed: the engine draws it.

    Torch's threads are chosen by step, in the thread that runs it: one for few rows (decode), all that torch was given for many.
    """

    def __init__(self, facts: RunnerFacts, *, model: Transformer, batches: BatchBuilder) -> None:
        self._facts = facts
        self._model = model
        self._batches = batches
        self._threads = torch.get_num_threads()
        self._histories: dict[str, History] = {}
        self._slots = Slots(
            facts.scheduler.max_num_seqs, max_model_len=facts.max_model_len, block_size=facts.cache.block_size
        )

    @property
    def facts(self) -> RunnerFacts:
        return self._facts

    @torch.inference_mode()
    def run(self, plan: StepPlan, requests: Sequence[Request]) -> StepResult:
        """Run one step; ``requests`` are those that ``plan`` admits for the first time."""
        self._follow(plan, requests)
        rows = sum(span.length for span in plan.spans)
        torch.set_num_threads(self._threads if rows >= PARALLEL_ROWS else 1)
        logits_RV = self._model.forward(self._batches.build(plan.spans, self._slots))
        histories = [self._slots.holder(span.slot) for span in plan.spans]
        counts = [
            len(wanted_offsets(span, history)) for span, history in zip(plan.spans, histories, strict=True)
        ]
        by_span = logits_RV.split(counts)
        prompt_logprobs = [
            _prompt_logprobs(logits, span, history)
            for logits, span, history in zip(by_span, plan.spans, histories, strict=True)
        ]
        sampled = self._sample(by_span, plan.spans, histories)
        return StepResult(
            step=plan.step,
            spans=tuple(
                SpanResult(
                    slot=span.slot,
                    request_id=history.request.id,
                    tokens=sampled[index][0] if index in sampled else (),
                    logprobs=sampled[index][1] if index in sampled else (),
                    prompt_logprobs=prompt_logprobs[index],
                )
                for index, (span, history) in enumerate(zip(plan.spans, histories, strict=True))
            ),
        )

    def _follow(self, plan: StepPlan, requests: Sequence[Request]) -> None:
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
            self._histories[request.id] = History(request=request)
        for admission in plan.admitted:
            self._slots.take(admission, self._histories[admission.request_id])
        for span in plan.spans:
            self._slots.extend(span)

    def _sample(
        self, by_span: Sequence[Tensor], spans: Sequence[Span], histories: Sequence[History]
    ) -> dict[int, tuple[tuple[int, ...], tuple[TokenLogprob, ...]]]:
        """For each span that samples: its token, appended to its history, and the log-probability if it was asked for."""
        chosen = [index for index, span in enumerate(spans) if span.sample]
        if not chosen:
            return {}
        logits_RV = torch.stack([by_span[index][-1] for index in chosen])
        tokens = sample(logits_RV, [self._sample_row(spans[index], histories[index]) for index in chosen])
        results: dict[int, tuple[tuple[int, ...], tuple[TokenLogprob, ...]]] = {}
        for row, (index, token) in enumerate(zip(chosen, tokens, strict=True)):
            history = histories[index]
            history.output.append(token)
            count = history.request.params.logprobs
            logprobs = (
                [] if count is None else token_logprobs(logits_RV[row : row + 1], [token], counts=[count])
            )
            results[index] = ((token,), tuple(logprobs))
        return results

    def _sample_row(self, span: Span, history: History) -> SampleRow:
        assert span.start + span.length == history.length, "only the newest position is sampled"
        return SampleRow(
            params=history.request.params,
            seed=history.request.params.seed or 0,  # None only where nothing is drawn
            position=len(history.output),
            prompt=history.request.prompt,
            output=history.output,
            eos_token_ids=self._facts.eos_token_ids,
        )


def _prompt_logprobs(logits_RV: Tensor, span: Span, history: History) -> tuple[TokenLogprob, ...]:
    """Of the prompt tokens at positions span.start + 1 .. , one for each row that predicts one."""
    count = prompt_logprob_count(span, history)
    if count == 0:
        return ()
    asked = history.request.params.prompt_logprobs
    assert asked is not None
    tokens = history.request.prompt[span.start + 1 : span.start + 1 + count]
    return tuple(token_logprobs(logits_RV[:count], tokens, counts=[asked] * count))
