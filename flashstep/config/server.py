"""What ``flashstep serve`` takes from the command line for the HTTP server, under vLLM's flag names where vLLM has one.

A field is a flag, its docstring the help text; ``problems`` says in sentences what cannot be meant. Knows no parser, no HTTP.
"""

from typing import Literal

import msgspec

from flashstep.config.engine_options import EngineOptions
from flashstep.config.errors import ConfigError

MAX_PORT = 65535


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The HTTP server before the engine."""

    host: str = "127.0.0.1"
    """address to listen on; 0.0.0.0 for every interface"""
    port: int = 8000
    """port to listen on; 0 takes a free one and prints it"""
    served_model_name: tuple[str, ...] = ()
    """names clients may ask for, the first stands in answers; the default is the checkpoint folder's name"""
    max_body_bytes: int | None = None
    """longest request body; the default allows what could fit into the context, and at least 8 MiB"""
    uvicorn_log_level: Literal["critical", "error", "warning", "info", "debug", "trace"] = "warning"
    """what the HTTP server logs of itself"""
    per_request_spec_decode_metrics: Literal["none", "summary"] = "none"
    """summary: every answer tells under `metrics` how many drafts were made for it and how many stood"""
    ready_timeout_s: float = 600.0
    """how long the engine may take to load, in seconds"""
    acceptance_log_s: float = 10.0
    """how often the log tells what speculation did, in seconds"""

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
        for name in ("max_body_bytes", "ready_timeout_s", "acceptance_log_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                rules.append(f"--{name.replace('_', '-')} is {value}; it must be above 0")
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
