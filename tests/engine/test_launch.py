"""A real engine process, spoken to over the wire by the real client."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from flashstep.engine.launch import start_engine
from flashstep.ipc.client import EngineClient, EngineDied, RequestRejected
from tests.engine import fake
from tests.scheduler.driving import request
from tests.scheduler.fake_runner import expected

ROOT = Path(__file__).parents[2]


@asynccontextmanager
async def running(build=fake.build, **options):
    with start_engine(fake.config(**options), build=build, log_level="warning") as process:
        client = EngineClient(process.addresses, sentinel=process.sentinel)
        try:
            await client.start(timeout_s=30)
            yield process, client
        finally:
            client.close()


async def follow(stream) -> tuple[list[int], str | None]:
    tokens, reason = [], None
    async for output in stream:
        tokens += output.tokens
        reason = output.finish_reason
    return tokens, reason


async def gone(process, timeout_s: float = 5.0) -> int | None:
    end = time.monotonic() + timeout_s
    while process.exit_code is None and time.monotonic() < end:
        await asyncio.sleep(0.02)
    return process.exit_code


async def idle(client, timeout_s: float = 2.0) -> bool:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        stats = client.stats
        if stats is not None and stats.running == stats.waiting == 0 and stats.cache_usage == 0:
            return True
        await asyncio.sleep(0.02)
    return False


async def test_requests_are_served_refused_aborted_and_the_engine_ends_when_asked():
    async with running() as (process, client):
        ready = client.ready
        assert (ready.max_model_len, ready.max_num_seqs, ready.block_size) == (256, 8, 4)
        requests = [request(f"r{i}", range(2, 4 + i), 30, seed=i) for i in range(40)]
        results = await asyncio.gather(*(follow(stream) for stream in client.submit(requests)))
        for item, (tokens, reason) in zip(requests, results, strict=True):
            assert (tokens, reason) == expected(item, vocab_size=97, max_model_len=256)

        with pytest.raises(RequestRejected, match="prompt is empty"):
            await follow(client.submit([request("empty", ())])[0])

        (stream,) = client.submit([request("endless", (5, 6), 250, ignore_eos=True)])
        await anext(stream)
        client.abort(["endless"])
        assert (await follow(stream))[1] == "abort"

        # A20: readers that leave, at once or after some tokens, while others queue
        for round_ in range(10):
            items = [request(f"leave{round_}-{i}", (fake.PAUSE, 6), 250, ignore_eos=True) for i in range(12)]
            streams = client.submit(items)
            await anext(streams[0])
            for stream in streams:
                stream.close()
        assert await idle(client)
        assert client.num_unfinished == 0
        assert client.stats.prefix_queries > 0 and client.stats.steps > 0

        client.close()
        assert await gone(process) == 0


async def test_sigterm_ends_cleanly_and_the_client_notices():
    async with running() as (process, client):
        (stream,) = client.submit([request("r", (fake.PAUSE, 6), 250, ignore_eos=True)])
        await anext(stream)
        os.kill(process.pid, signal.SIGTERM)
        assert (await follow(stream))[1] == "abort"
        assert await gone(process) == 0
        assert "ended" in await asyncio.wait_for(client.wait_failed(), 5)
        assert not client.alive
        with pytest.raises(EngineDied):
            client.submit([request("s", (5,))])


async def test_sigkill_is_noticed():
    async with running() as (process, client):
        (stream,) = client.submit([request("r", (fake.PAUSE, 6), 250, ignore_eos=True)])
        await anext(stream)
        start = time.monotonic()
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(EngineDied, match="killed"):
            await follow(stream)
        assert time.monotonic() - start < 2
        assert not client.alive


async def test_a_crash_in_a_step_is_reported_with_its_reason():
    async with running() as (process, client):
        ok, bad = client.submit([request("r", (5,), 200, ignore_eos=True), request("bad", (fake.POISON,))])
        for stream in (ok, bad):
            with pytest.raises(EngineDied, match="RuntimeError: the device is on fire"):
                await follow(stream)
        assert await gone(process) == 1


def test_the_engine_does_not_outlive_its_front_end():
    """The front end is killed without a chance to say anything."""
    script = (
        "from tests.engine import fake\n"
        "from flashstep.engine.launch import start_engine\n"
        "import time\n"
        "if __name__ == '__main__':\n"
        "    print(start_engine(fake.config(), build=fake.build, log_level='error').pid, flush=True)\n"
        "    time.sleep(60)\n"
    )
    front = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    engine = int(front.stdout.readline())
    time.sleep(1.0)
    assert is_running(engine)
    front.kill()
    front.wait()
    end = time.monotonic() + 10
    while is_running(engine) and time.monotonic() < end:
        time.sleep(0.05)
    assert not is_running(engine)


def state_of(pid: int) -> str:
    """The kernel's letter (R runs, T is stopped, Z has ended); empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def is_running(pid: int) -> bool:
    return state_of(pid) not in ("", "Z")


async def test_a_failure_to_build_is_reported_before_ready_and_without_a_traceback(capfd):
    with pytest.raises(EngineDied, match=r"^the checkpoint lacks layers\.3"):
        async with running(build=fake.build_never):
            pass
    assert "Traceback" not in capfd.readouterr().err


async def test_sigterm_while_building_ends_at_once():
    with start_engine(fake.config(), build=fake.build_slowly, log_level="warning") as process:
        client = EngineClient(process.addresses, sentinel=process.sentinel)
        starting = asyncio.create_task(client.start(timeout_s=30))
        await asyncio.sleep(1.5)
        start = time.monotonic()
        process.stop()
        assert time.monotonic() - start < 5
        with pytest.raises(EngineDied):
            await starting
        client.close()


def test_a_second_signal_while_a_stuck_engine_is_waited_for_leaves_nothing_behind():
    process = start_engine(fake.config(), build=fake.build, log_level="error")
    os.kill(process.pid, signal.SIGSTOP)  # it will not see SIGTERM
    while state_of(process.pid) != "T":  # of two signals that wait, the kernel hands out SIGTERM first
        time.sleep(0.01)
    second = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    second.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            process.stop(timeout_s=30)
    finally:
        second.cancel()  # a signal that nobody waits for would end the whole test run
    assert process.exit_code == -signal.SIGKILL
    assert not is_running(process.pid) and not Path(process.addresses.folder).exists()
