"""What ``flashstep serve`` takes from the command line for the HTTP server, under vLLM's flag names where vLLM has one.

A field is a flag, its docstring the help text; ``problems`` says in sentences what cannot be meant. Knows no parser, no HTTP.
"""

import re
import ssl
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import msgspec

from flashstep.config.engine_options import EngineOptions
from flashstep.config.errors import ConfigError
from flashstep.config.generation import AUTO, sampling_override, template_defaults

MAX_PORT = 65535
ANY = "*"
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s\"\[\],]+")
ABOVE_ZERO = (
    "max_body_bytes",
    "max_stored_response_bytes",
    "ready_timeout_s",
    "max_num_queued_reqs",
    "max_num_queued_tokens",
    "h11_max_incomplete_event_size",
    "h11_max_header_count",
    "receive_timeout_s",
    "send_timeout_s",
    "keep_alive_timeout_s",
)


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The HTTP server before the engine."""

    host: str = "127.0.0.1"
    """address to listen on; 0.0.0.0 for every interface"""
    port: int = 8000
    """port to listen on; 0 takes a free one and prints it"""
    ssl_keyfile: str | None = None
    """private key of the certificate (PEM); with `--ssl-certfile` the server speaks https"""
    ssl_certfile: str | None = None
    """certificate (PEM), and those that vouch for it"""
    served_model_name: tuple[str, ...] = ()
    """names clients may ask for, the first stands in answers; the default is the checkpoint folder's name"""
    max_body_bytes: int | None = None
    """longest request body; the default allows what could fit into the context, and at least 8 MiB"""
    max_stored_responses: int = 1024
    """how many responses of /v1/responses are kept in memory, to be asked for or continued; 0 keeps none"""
    max_stored_response_bytes: int = 256 << 20
    """how large they may be together, with the conversations they end; the oldest goes first"""
    uvicorn_log_level: Literal["critical", "error", "warning", "info", "debug", "trace"] = "warning"
    """what the HTTP server logs of itself"""
    per_request_spec_decode_metrics: Literal["none", "summary"] = "none"
    """summary: every answer tells under `metrics` how many drafts were made for it and how many stood"""
    reasoning_field: Literal["both", "reasoning", "reasoning_content"] = "both"
    """the name of reasoning in answers: vLLM's `reasoning`, DeepSeek's `reasoning_content`, or both"""
    generation_config: str = AUTO
    """sampling defaults: auto (the checkpoint's generation_config.json, if there), vllm (none), or the folder of such a file"""
    override_generation_config: str | None = None
    """sampling defaults, as a JSON object: temperature, top_p, top_k, min_p, repetition_penalty"""
    default_chat_template_kwargs: str | None = None
    """what chats say that say nothing of it, as a JSON object: thinking, enable_thinking, reasoning_effort"""
    stream_style: Literal["vllm", "deepseek"] = "vllm"
    """deepseek: usage rides on the chunk that finishes, `"usage": null` on those before it, and no chunk is without choices"""
    enable_force_include_usage: bool = False
    """tell the usage of every stream, as if each had asked with `stream_options.include_usage`"""
    api_key: tuple[str, ...] = ()
    """keys, of which clients must send one; others on this machine see them with `ps`, unlike those of `--api-key-file`"""
    api_key_file: str | None = None
    """a file of such keys, one a line"""
    allowed_origins: tuple[str, ...] = ()
    """origins (https://host, or * for all) whose web pages may call this server (CORS); the default is none"""
    allowed_methods: tuple[str, ...] = (ANY,)
    """HTTP methods such pages may use"""
    allowed_headers: tuple[str, ...] = (ANY,)
    """HTTP headers such pages may send"""
    allow_credentials: bool = False
    """let such pages send cookies and the like"""
    max_num_queued_reqs: int | None = None
    """most requests that wait or run, each of `n` counted; beyond it new ones get 503. The default is no limit"""
    max_num_queued_tokens: int | None = None
    """once so many tokens stand in prompts without a first token, new requests get 503. The default is no limit"""
    h11_max_incomplete_event_size: int = 64 << 10
    """longest head of a request, in bytes"""
    h11_max_header_count: int = 256
    """most headers of a request"""
    receive_timeout_s: float = 30.0
    """how long a client may take to send a request, in seconds, and one more for every 1000 bytes"""
    send_timeout_s: float = 60.0
    """how long a client may read nothing of its answer, in seconds, before its request is aborted"""
    keep_alive_timeout_s: int = 75
    """how long a connection without a request stays open, in seconds"""
    sse_keep_alive_interval: float = 0.0
    """seconds without an event after which a stream gets a comment, so that proxies keep it; 0 is never"""
    shutdown_timeout: int = 5
    """how long running answers may take to end once the server is told to stop, in seconds"""
    disable_uvicorn_access_log: bool = False
    """no log line for each request"""
    disable_access_log_for_endpoints: str = "/health,/ping,/metrics,/load,/status"
    """paths whose requests get no log line, separated by commas"""
    ready_timeout_s: float = 600.0
    """how long the engine may take to load, in seconds"""
    otlp_traces_endpoint: str | None = None
    """where to send a span of each request: the http(s) URL of an OTLP/HTTP collector (needs the extra `otel`)"""
    disable_status_page: bool = False
    """no page at / and no figures at /status; whoever reaches the port sees both, as /metrics, with `--api-key` too"""
    acceptance_log_s: float = 10.0
    """how often the log tells what speculation did, in seconds; 0 is never"""

    def problems(self) -> list[str]:
        """Every value that cannot be meant, as sentences that begin with the flag."""
        rules = []
        if not 0 <= self.port <= MAX_PORT:
            rules.append(f"--port is {self.port}; ports lie in 0..{MAX_PORT}")
        if not self.host:
            rules.append("--host is empty; 127.0.0.1 listens locally, 0.0.0.0 on every interface")
        rules += [
            f"--served-model-name holds {name!r}; a name has at least one character"
            for name in self.served_model_name
            if not name.strip()
        ]
        if len(set(self.served_model_name)) != len(self.served_model_name):
            rules.append("--served-model-name holds one name twice")
        for name in ABOVE_ZERO:
            value = getattr(self, name)
            if value is not None and not value > 0:
                rules.append(f"--{name.replace('_', '-')} is {value}; it must be above 0")
        for name in (
            "sse_keep_alive_interval",
            "shutdown_timeout",
            "max_stored_responses",
            "acceptance_log_s",
        ):
            if not getattr(self, name) >= 0:
                rules.append(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be 0 or more")
        for parse, text in (
            (sampling_override, self.override_generation_config),
            (template_defaults, self.default_chat_template_kwargs),
        ):
            try:
                parse(text)
            except ConfigError as error:
                rules += [f"{error.subject}: {problem}" for problem in error.problems]
        return [
            *rules,
            *self._certificate_problems(),
            *self._key_problems(),
            *self._origin_problems(),
            *self._trace_problems(),
        ]

    def _certificate_problems(self) -> list[str]:
        if self.ssl_keyfile is None and self.ssl_certfile is None:
            return []
        if self.ssl_keyfile is None or self.ssl_certfile is None:
            return ["--ssl-keyfile and --ssl-certfile go together; one of them is given"]
        try:
            ssl.create_default_context().load_cert_chain(self.ssl_certfile, self.ssl_keyfile, password="")
        except (OSError, ValueError) as error:  # a bad certificate is an SSLError, which is an OSError
            return [
                f"--ssl-certfile {self.ssl_certfile} and --ssl-keyfile {self.ssl_keyfile} cannot be used: {error}"
            ]
        return []

    def keys(self) -> tuple[str, ...]:
        """All keys that are taken; none: the server asks for none. ``OSError`` if the file cannot be read."""
        if self.api_key_file is None:
            return self.api_key
        lines = Path(self.api_key_file).read_text().splitlines()
        return (*self.api_key, *(line.strip() for line in lines if line.strip()))

    def _key_problems(self) -> list[str]:
        """Keys are never shown."""
        try:
            keys = self.keys()
        except (OSError, UnicodeDecodeError) as error:
            return [f"--api-key-file {self.api_key_file} cannot be read: {error}"]
        if self.api_key_file is not None and len(keys) == len(self.api_key):
            return [f"--api-key-file {self.api_key_file} holds no key; write one a line"]
        if not all(key and key.isascii() and key.isprintable() and " " not in key for key in keys):
            return [
                "--api-key: a key is empty, or has characters that no HTTP header carries; use visible ASCII"
            ]
        return []

    def _trace_problems(self) -> list[str]:
        endpoint = self.otlp_traces_endpoint
        if endpoint is None:
            return []
        if not re.fullmatch(r"https?://[^\s/]+\S*", endpoint):
            return [
                f"--otlp-traces-endpoint is {endpoint!r}; it must be an http(s) URL, such as http://localhost:4318/v1/traces"
                " (OTLP over gRPC is not spoken)"
            ]
        try:
            found = find_spec("opentelemetry.exporter.otlp.proto.http")
        except ModuleNotFoundError:  # of a package around it
            found = None
        return [] if found else ["--otlp-traces-endpoint needs OpenTelemetry: pip install 'flashstep[otel]'"]

    def _origin_problems(self) -> list[str]:
        rules = [
            f"--allowed-origins holds {origin!r}; give *, or scheme://host[:port] without a path"
            for origin in self.allowed_origins
            if origin != ANY and not ORIGIN.fullmatch(origin)
        ]
        unused = self.allow_credentials or self.allowed_methods != (ANY,) or self.allowed_headers != (ANY,)
        if unused and not self.allowed_origins:
            rules.append(
                "--allow-credentials, --allowed-methods and --allowed-headers need --allowed-origins"
            )
        return rules


def check_serving(engine: EngineOptions, server: ServerOptions) -> None:
    """Raise ``ConfigError`` with all problems of both, and of the two together."""
    found = [*engine.problems(), *server.problems()]
    if server.per_request_spec_decode_metrics != "none" and engine.speculative_config is None:
        found.append(
            f"--per-request-spec-decode-metrics is {server.per_request_spec_decode_metrics}, and there is nothing to tell "
            "without --speculative-config"
        )
    if engine.emulate is not None:
        found.append(
            f"--emulate {engine.emulate} has a part of the vocabulary and random weights: nothing that could be served; measure "
            "it with `flashstep bench forward` or `bench latency`"
        )
    if found:
        raise ConfigError("the command line", found)
