"""One span for each request, under vLLM's names (``--otlp-traces-endpoint``), with children for queue, prefill and decoding.

Imported only where traces are wanted: OpenTelemetry is an extra. No text of users is in a span.
"""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

import flashstep
from flashstep.server.metrics.outcome import Outcome
from flashstep.telemetry.trace import Attributes, Phase, Tracer, current_request_id, within

SPAN = "llm_request"


class Traced:
    """ASGI middleware: the spans of a request join the trace that its ``traceparent`` names. Stands within the gate."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with within(Headers(scope=scope), request_id=scope["state"]["visit"].id):
            await self._app(scope, receive, send)


class RequestTracer:
    """Hears of every request's end; ``close`` sends what is left."""

    def __init__(self, endpoint: str, *, model: str) -> None:
        self._tracer = Tracer(endpoint, name="flashstep", version=flashstep.__version__)
        self._model = model
        self.close = self._tracer.close

    def ended(self, outcome: Outcome, n: int) -> None:
        """``n`` requests answer the prompt of this one."""
        self._tracer.request(
            SPAN,
            took_s=outcome.end_to_end_s,
            attributes=_attributes(outcome, n=n, model=self._model),
            phases=_phases(outcome),
            failed=outcome.reason == "error",
        )


def _attributes(outcome: Outcome, *, n: int, model: str) -> Attributes:
    told = {
        "gen_ai.request.id": current_request_id() or outcome.request_id,
        "gen_ai.request.n": n,
        "gen_ai.request.max_tokens": outcome.max_tokens,
        "gen_ai.request.temperature": outcome.temperature,
        "gen_ai.request.top_p": outcome.top_p,
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reasons": (outcome.reason,),
        "gen_ai.usage.prompt_tokens": outcome.prompt_tokens,
        "gen_ai.usage.completion_tokens": outcome.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": outcome.cached_tokens,
        "gen_ai.latency.e2e": outcome.end_to_end_s,
        "gen_ai.latency.time_to_first_token": outcome.first_token_s,
        "gen_ai.latency.time_in_queue": outcome.queued_s,
        "gen_ai.latency.time_in_model_prefill": outcome.prefill_s,
        "gen_ai.latency.time_in_model_decode": outcome.decode_s,
        "gen_ai.latency.time_in_model_inference": outcome.inference_s,
        "flashstep.engine_request_id": outcome.request_id,
        "flashstep.preemptions": outcome.preemptions,
    }
    return {name: value for name, value in told.items() if value is not None}


def _phases(outcome: Outcome) -> list[Phase]:
    phases = []
    if outcome.queued_s is not None and outcome.prefill_s is not None:
        phases.append(Phase("queue", began_s=0.0, took_s=outcome.queued_s))
        phases.append(Phase("prefill", began_s=outcome.queued_s, took_s=outcome.prefill_s))
    if outcome.first_token_s is not None and outcome.decode_s is not None:
        phases.append(Phase("decode", began_s=outcome.first_token_s, took_s=outcome.decode_s))
    return phases
