"""What every handler needs, made once: the engine's client, the encoder, the names, the metrics, the limits."""

import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from tokenizers import Tokenizer

import flashstep
from flashstep.chat.encode import ChatEncoder
from flashstep.chat.tokenizer import TextTokenizer
from flashstep.config.errors import ConfigError
from flashstep.config.server import ServerOptions
from flashstep.engram.token_map import TokenMap
from flashstep.ipc.client import EngineClient
from flashstep.ipc.messages import Ready
from flashstep.server.defaults import defaults_of
from flashstep.server.errors import ApiError, engine_gone, quoted
from flashstep.server.metrics.registry import Metrics

BYTES_PER_TOKEN = 16  # a longer body holds more than the context, whatever it spells
LEAST_BODY_LIMIT = 8 << 20


class Frontend:
    """The server's fixed surroundings. Made after the engine is ready. ``options`` names at least one model."""

    def __init__(self, client: EngineClient, encoder: ChatEncoder, options: ServerOptions) -> None:
        assert client.ready is not None, "the engine must be ready"
        if not options.served_model_name:
            raise ValueError("a server needs at least one model name")
        _check_tokenizer(encoder.tokenizer, client.ready)
        self.client = client
        self.encoder = encoder
        self.ready: Ready = client.ready
        self.names: Sequence[str] = options.served_model_name
        self.created = int(time.time())
        kind = "falsified" if self.ready.falsifies else self.ready.hit_policy
        self.fingerprint = f"flashstep-{flashstep.__version__}-{kind}"
        self.metrics = Metrics(self.names[0], ready=self.ready, stats=lambda: client.stats)
        self.options = options
        self.defaults = defaults_of(options)
        self.num_in_flight = 0  # HTTP requests, but those that only watch the server
        self.tells_acceptance = options.per_request_spec_decode_metrics != "none"
        fits = max(LEAST_BODY_LIMIT, BYTES_PER_TOKEN * self.ready.max_model_len)
        self.max_body_bytes = fits if options.max_body_bytes is None else options.max_body_bytes

    @property
    def tokenizer(self) -> TextTokenizer:
        return self.encoder.tokenizer

    @contextmanager
    def in_flight(self) -> Generator[None]:
        """Count an HTTP request while it runs."""
        self.num_in_flight += 1
        try:
            yield
        finally:
            self.num_in_flight -= 1

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.names:
            served = ", ".join(self.names)
            raise ApiError(
                f"the model {quoted(name)} is not served here; served: {served}", param="model", status=404
            )

    def check_alive(self) -> None:
        if not self.client.alive:
            raise engine_gone(self.client.failure or "not ready yet")


def _check_tokenizer(tokenizer: TextTokenizer, ready: Ready) -> None:
    """Refuse a tokenizer that is not the engine's (case A34): shapes would fit, and every n-gram hash would be another."""
    if TokenMap.build(Tokenizer.from_str(tokenizer.definition)).fingerprint != ready.token_map_fingerprint:
        sentence = "its token map is not the one the engine was built with; serve with the checkpoint's own tokenizer.json"
        raise ConfigError("the tokenizer", [sentence])
