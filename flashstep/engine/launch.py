"""The engine's process: started with ``spawn``, ready or failed in words, ended by Shutdown, SIGTERM or its parent's end.

The front end calls ``start_engine`` and gives the result's ``addresses`` and ``sentinel`` to ``ipc.client.EngineClient``.
Importing this does not import torch: the runner is built in the child.
"""

import gc
import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.context import SpawnProcess
from types import TracebackType

from flashstep.config.engine import EngineConfig
from flashstep.engine.engine import Engine
from flashstep.engine.loop import EngineLoop
from flashstep.ipc.channel import Addresses, EngineEnd
from flashstep.ipc.messages import Failed
from flashstep.runner.facts import Runner
from flashstep.telemetry.log import Log, configure

STOP_TIMEOUT_S = 10.0
log = Log("engine.launch")


class EngineProcess:
    """An engine that runs in a child process. ``stop`` it, or use it as a context."""

    def __init__(self, process: SpawnProcess, addresses: Addresses) -> None:
        self.addresses = addresses
        self._process = process

    @property
    def sentinel(self) -> int:
        """Readable once the process has gone."""
        return self._process.sentinel

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.exitcode

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> int | None:
        """SIGTERM, wait, SIGKILL if it does not end; and, whatever cuts the wait, remove the sockets. Gives the exit code."""
        try:
            if self._process.is_alive():
                self._process.terminate()
            self._process.join(timeout_s)
        finally:
            if self._process.is_alive():
                log.warning("killed: it did not end in time", pid=self.pid)
                self._process.kill()
                self._process.join()
            self.addresses.remove()
        return self._process.exitcode

    def __enter__(self) -> "EngineProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def build_default(config: EngineConfig) -> Runner:
    """The model's runner, as ``config`` says."""
    from flashstep.runner.build import build_runner  # here, so that the front end's process never loads torch

    return build_runner(config)


def start_engine(
    config: EngineConfig, *, build: Callable[[EngineConfig], Runner] = build_default, log_level: str = "info"
) -> EngineProcess:
    """Start an engine process; it says Ready, or Failed with the reason, over the wire.

    ``build`` must be importable by name in the child (tests pass a fake runner's).
    """
    addresses = Addresses.fresh()
    process = multiprocessing.get_context("spawn").Process(
        target=_main, args=(config, addresses, build, log_level), name="flashstep-engine", daemon=True
    )
    process.start()
    return EngineProcess(process, addresses)


def _main(
    config: EngineConfig, addresses: Addresses, build: Callable[[EngineConfig], Runner], log_level: str
) -> None:
    """The child: build, serve, and say why if it fails."""
    configure(log_level)
    # Ctrl-C reaches the whole process group; the front end decides what it means and tells us over the wire
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _stop_early)
    end = EngineEnd(addresses)
    try:
        _serve(config, end, build)
    except SystemExit:
        raise  # what there was to say has been said
    except BaseException as error:
        end.send(Failed(reason=f"{type(error).__name__}: {error}"))
        raise
    finally:
        end.close()
        parent = multiprocessing.parent_process()
        if parent is not None and not parent.is_alive():
            addresses.remove()  # the front end was killed: nobody else will


def _serve(config: EngineConfig, end: EngineEnd, build: Callable[[EngineConfig], Runner]) -> None:
    parent = multiprocessing.parent_process()
    with ThreadPoolExecutor(1, thread_name_prefix="runner") as thread:
        # built in the thread that will run it: a device context and thread settings belong to a thread
        building = thread.submit(build, config)
        try:
            runner = building.result()
        except ValueError as error:  # the user's to mend: the reason, without our traceback
            end.send(Failed(reason=str(error)))
            raise SystemExit(1) from error
        engine = Engine(runner, seed=config.seed)
        gc.freeze()  # the model's objects stay: no collection during a step should walk them
        loop = EngineLoop(
            engine, end, runner_thread=thread, parent=None if parent is None else parent.sentinel
        )
        signal.signal(signal.SIGTERM, lambda _number, _frame: loop.stop())
        loop.run()


def _stop_early(_number: int, _frame: object) -> None:
    os._exit(0)  # nothing is being served yet, and the thread that builds cannot be interrupted
