"""An OTLP/HTTP collector on a real socket, which decodes the protobuf that it is sent and keeps the spans."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector:
    """``spans`` and ``resources`` are what came in; ``paths`` where it was sent."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.spans: list[Any] = []
        self.resources: list[dict[str, Any]] = []
        self.paths: list[str] = []

    def take(self, path: str, body: bytes) -> None:
        self.paths.append(path)
        for one in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resources.append(attributes(one.resource))
            self.spans += [span for scope in one.scope_spans for span in scope.spans]

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]


@contextmanager
def collector() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            taken.take(self.path, self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            return

    server = HTTPServer(("127.0.0.1", 0), Handler)
    taken = Collector(server.server_port)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield taken
    server.shutdown()
    thread.join()
    server.server_close()


def attributes(owner: Any) -> dict[str, Any]:
    """Of a span or a resource, as Python values."""
    return {item.key: _value(item.value) for item in owner.attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind)
