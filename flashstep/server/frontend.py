"""What every handler needs, made once: the engine's client, the encoder, the names, the metrics, the limits."""

import time
from collections.abc import Sequence

import msgspec
from tokenizers import Tokenizer

import flashstep
from flashstep.chat.encode import ChatEncoder
from flashstep.chat.tokenizer import TextTokenizer
from flashstep.config.errors import ConfigError
from flashstep.engram.token_map import TokenMap
from flashstep.ipc.client import EngineClient
from flashstep.ipc.messages import Ready
from flashstep.server.errors import ApiError, engine_gone
from flashstep.server.metrics import Metrics

BYTES_PER_TOKEN = 16  # a longer body holds more than the context, whatever it spells
LEAST_BODY_LIMIT = 8 << 20


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the HTTP server is set up. ``served_model_names[0]`` is the name that answers carry; all are accepted.

    ``max_body_bytes`` None allows what could fit into the context, and at least 8 MiB. ``port`` 0 takes a free one.
    ``tells_acceptance``: every answer says what speculation did for it.
    """

    served_model_names: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    max_body_bytes: int | None = None
    log_level: str = "warning"
    ready_timeout_s: float = 600.0
    tells_acceptance: bool = False
    acceptance_log_s: float = 10.0


class Frontend:
    """The server's fixed surroundings. Made after the engine is ready."""

    def __init__(self, client: EngineClient, encoder: ChatEncoder, options: ServerOptions) -> None:
        assert client.ready is not None, "the engine must be ready"
        if not options.served_model_names:
            raise ValueError("a server needs at least one model name")
        _check_tokenizer(encoder.tokenizer, client.ready)
        self.client = client
        self.encoder = encoder
        self.ready: Ready = client.ready
        self.names: Sequence[str] = options.served_model_names
        self.created = int(time.time())
        self.fingerprint = f"flashstep-{flashstep.__version__}-{self.ready.hit_policy}"
        self.metrics = Metrics(self.names[0], ready=self.ready, stats=lambda: client.stats)
        self.tells_acceptance = options.tells_acceptance
        fits = max(LEAST_BODY_LIMIT, BYTES_PER_TOKEN * self.ready.max_model_len)
        self.max_body_bytes = fits if options.max_body_bytes is None else options.max_body_bytes

    @property
    def tokenizer(self) -> TextTokenizer:
        return self.encoder.tokenizer

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.names:
            served = ", ".join(self.names)
            raise ApiError(
                f"the model {name!r} is not served here; served: {served}", param="model", status=404
            )

    def check_alive(self) -> None:
        if not self.client.alive:
            raise engine_gone(self.client.failure or "not ready yet")


def _check_tokenizer(tokenizer: TextTokenizer, ready: Ready) -> None:
    """Refuse a tokenizer that is not the engine's (case A34): shapes would fit, and every n-gram hash would be another."""
    if TokenMap.build(Tokenizer.from_str(tokenizer.definition)).fingerprint != ready.token_map_fingerprint:
        sentence = "its token map is not the one the engine was built with; serve with the checkpoint's own tokenizer.json"
        raise ConfigError("the tokenizer", [sentence])
