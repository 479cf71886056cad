"""OpenTelemetry spans over OTLP/HTTP: finished requests in, spans out, sent in the background. Needs the extra ``otel``.

The SDK's own environment variables hold (OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS ...). A collector
that cannot be reached costs spans, never an answer. Knows nothing of what is traced, and gets no text of users.
"""

import threading
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from urllib.parse import urlsplit

from opentelemetry import context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

PATH = "/v1/traces"  # where collectors listen
CLOSE_S = 1.0
NS = 1_000_000_000
Attributes = Mapping[str, str | bool | int | float | Sequence[str]]

_propagator = TraceContextTextMapPropagator()
_request_id = context.create_key("request-id")


class Phase:
    """A part of a span: its name, when it began after the span did, and how long it took, in seconds."""

    __slots__ = ("began_s", "name", "took_s")

    def __init__(self, name: str, *, began_s: float, took_s: float) -> None:
        self.name = name
        self.began_s = began_s
        self.took_s = took_s


@contextmanager
def within(headers: Mapping[str, str], *, request_id: str) -> Generator[None]:
    """Spans of this block, and of tasks begun in it, belong to the trace that ``headers`` name (W3C traceparent), if any."""
    parent = _propagator.extract(headers, context=context.Context())
    token = context.attach(context.set_value(_request_id, request_id, parent))
    try:
        yield
    finally:
        context.detach(token)


def current_request_id() -> str | None:
    """What ``within`` was told."""
    found = context.get_value(_request_id)
    return found if isinstance(found, str) else None


class Tracer:
    """Sends spans to ``endpoint``, an http(s) URL; without a path that of OTLP is meant."""

    def __init__(self, endpoint: str, *, name: str, version: str) -> None:
        url = endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + PATH
        resource = Resource.create()
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: name}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._exporter = OTLPSpanExporter(endpoint=url)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer(name, version)

    def request(
        self, name: str, *, took_s: float, attributes: Attributes, phases: Sequence[Phase], failed: bool
    ) -> None:
        """A span that ends now, with a child for each phase."""
        end_ns = time.time_ns()
        start_ns = end_ns - round(took_s * NS)
        span = self._tracer.start_span(
            name, kind=SpanKind.SERVER, start_time=start_ns, attributes=dict(attributes)
        )
        if span.is_recording():
            inside = set_span_in_context(span)
            for phase in phases:
                began_ns = start_ns + round(phase.began_s * NS)
                child = self._tracer.start_span(phase.name, context=inside, start_time=began_ns)
                child.end(began_ns + round(phase.took_s * NS))
        if failed:
            span.set_status(Status(StatusCode.ERROR))
        span.end(end_ns)

    def close(self) -> None:
        """Send what is left, as far as the collector takes it soon."""
        patience = threading.Timer(CLOSE_S, self._exporter.shutdown)  # no more tries from then on
        patience.start()
        self._provider.shutdown()
        patience.cancel()
