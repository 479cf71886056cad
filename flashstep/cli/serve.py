"""``flashstep serve``: an engine process and, in this process, the HTTP server before it.

The engine process starts first and loads while this one imports the server, so a small model is ready within seconds.
"""

import json
import signal
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import msgspec
import tyro

from flashstep.cli.model import Model, resolve, served_name
from flashstep.cli.terminal import OUT, note, warn_of_falsified
from flashstep.config.engine_options import EngineOptions
from flashstep.config.generation import sampling_defaults
from flashstep.config.server import ServerOptions, check_serving

FAILED = 1


@dataclass(frozen=True, kw_only=True)
class Serve:
    """Serve a model over HTTP, with the APIs of OpenAI and Anthropic.

    vLLM's flags are taken too, or refused with what to use instead (docs/from-vllm.md).
    """

    model: Model = None
    revision: str | None = None
    """branch, tag or commit, where MODEL is a name in the Hugging Face cache"""
    engine: tyro.conf.OmitArgPrefixes[EngineOptions] = field(default_factory=EngineOptions)
    server: tyro.conf.OmitArgPrefixes[ServerOptions] = field(default_factory=ServerOptions)

    def run(self) -> int:
        started = time.monotonic()
        check_serving(self.engine, self.server)
        folder = resolve(self.model, self.revision)
        names = self.server.served_model_name or (served_name(self.model, folder),)
        defaults = sampling_defaults(
            self.server.generation_config, self.server.override_generation_config, checkpoint=folder
        )
        options = msgspec.structs.replace(
            self.server, served_model_name=names, override_generation_config=json.dumps(defaults)
        )
        from flashstep.engine.launch import start_engine
        from flashstep.telemetry.log import configure

        configure()
        note(f"loading {folder}")
        config = self.engine.engine(folder)
        warn_of_falsified(config.falsifies)
        with ExitStack() as ends:
            with _stopping_later():
                engine = ends.enter_context(start_engine(config))
            from flashstep.ipc.client import EngineClient, EngineDied

            # at once: an engine that fails early finds somebody who listens
            client = EngineClient(engine.addresses, sentinel=engine.sentinel)
            ends.callback(client.close)

            from flashstep.chat.encode import ChatEncoder
            from flashstep.chat.tokenizer import TextTokenizer
            from flashstep.server.app import run_server

            def announce(host: str, port: int) -> None:
                shown = f"[{host}]" if ":" in host else host
                scheme = "http" if options.ssl_certfile is None else "https"
                seconds = time.monotonic() - started
                OUT.print(
                    f"{names[0]} is served at {scheme}://{shown}:{port}/v1 (ready in {seconds:.1f} s)",
                )

            try:
                encoder = ChatEncoder(TextTokenizer.from_file(folder / "tokenizer.json"))
                run_server(client, encoder, options, on_listening=announce)
            except (EngineDied, TimeoutError) as error:
                note(f"flashstep: {error}")
                return FAILED
            except OSError as error:
                note(f"flashstep: cannot listen on {options.host}, port {options.port}: {error.strerror}")
                return FAILED
        return 0


@contextmanager
def _stopping_later() -> Generator[None]:
    """A signal to stop takes effect after the block: half a started engine could be neither used nor ended.

    From then on, until the server has its own handlers, SIGTERM means what Ctrl-C means, so that the engine is ended too.
    """
    told: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _frame: told.append(number))
    yield
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    if told:
        raise KeyboardInterrupt
