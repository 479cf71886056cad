"""The store of responses: bounded in number and bytes, the oldest that ended goes first, those that run stay."""

import asyncio

import pytest

from flashstep.server.errors import ApiError
from flashstep.server.responses.store import Ended, ResponseStore, Running


def ended(size: int = 10, *, background: bool = False) -> Ended:
    return Ended(response=b"r" * (size - 1), items=b"i", background=background)


def running(cancelled: list[bool] | None = None, *, size: int = 0) -> Running:
    log = [] if cancelled is None else cancelled
    task: asyncio.Task[None] = asyncio.create_task(asyncio.sleep(0))
    return Running(task=task, cancel=lambda: log.append(True), snapshot=lambda: b"{}", num_bytes=size)


def holds(store: ResponseStore, id: str) -> bool:
    try:
        store.find(id)
    except ApiError as error:
        assert error.status == 404
        return False
    return True


def test_number() -> None:
    store = ResponseStore(max_responses=3, max_bytes=1000)
    for at in range(5):
        store.end(str(at), ended())
    assert [holds(store, str(at)) for at in range(5)] == [False, False, True, True, True]
    assert store.num_bytes == 30


def test_bytes() -> None:
    store = ResponseStore(max_responses=100, max_bytes=100)
    for at in range(5):
        store.end(str(at), ended(40))
    assert (len(store), store.num_bytes) == (2, 80)
    store.end("too large", ended(101))
    assert (holds(store, "too large"), len(store)) == (False, 2)
    store.end("just", ended(100))
    assert (holds(store, "just"), len(store), store.num_bytes) == (True, 1, 100)
    store.forget("just")
    assert (len(store), store.num_bytes) == (0, 0)


@pytest.mark.asyncio
async def test_running_stay() -> None:
    store = ResponseStore(max_responses=2, max_bytes=100)
    store.end("old", ended())
    store.run("a", running())
    store.check_background(0)
    store.run("b", running())
    assert [holds(store, id) for id in ("old", "a", "b")] == [False, True, True]
    with pytest.raises(ApiError, match="run already") as caught:
        store.check_background(0)
    assert (caught.value.status, caught.value.headers) == (503, {"Retry-After": "1"})
    store.end("a", ended(background=True))
    assert isinstance(store.find("a"), Ended)
    store.check_background(0)


@pytest.mark.asyncio
async def test_running_count_bytes() -> None:
    """What they answer makes room as what has ended does; beyond it no other begins."""
    store = ResponseStore(max_responses=9, max_bytes=100)
    store.end("old", ended(50))
    store.check_background(60)
    store.run("a", running(size=60))
    assert (holds(store, "old"), store.num_bytes) == (False, 60)
    store.check_background(40)
    with pytest.raises(ApiError, match="run already") as caught:
        store.check_background(41)
    assert caught.value.status == 503
    with pytest.raises(ApiError, match="101 bytes; 100 are kept") as caught:
        store.check_background(101)
    assert caught.value.status == 400
    store.end("a", ended(70, background=True))
    assert store.num_bytes == 70
    store.run("b", running(size=10))
    store.forget("b")
    assert store.num_bytes == 70


@pytest.mark.asyncio
async def test_forgotten_while_it_ran() -> None:
    """It is cancelled, and what it still had to say does not bring it back."""
    store = ResponseStore(max_responses=2, max_bytes=100)
    cancelled: list[bool] = []
    store.run("a", running(cancelled))
    store.forget("a")
    store.end("a", ended(background=True))
    assert (cancelled, holds(store, "a")) == ([True], False)


def test_keeps_nothing() -> None:
    store = ResponseStore(max_responses=0, max_bytes=100)
    store.end("a", ended())
    assert not store.fits(0)
    assert not holds(store, "a")
    with pytest.raises(ApiError, match="keeps no responses"):
        store.check_background(0)


def test_continuing() -> None:
    store = ResponseStore(max_responses=2, max_bytes=100)
    store.end("a", Ended(response=b"{}", items=b'[{"role":"user"}]', background=False))
    assert store.items("a") == [{"role": "user"}]
    store.end("b", Ended(response=b"{}", items=b"", background=False))
    with pytest.raises(ApiError, match="no answer to continue from"):
        store.items("b")
    with pytest.raises(ApiError, match="'c'") as caught:
        store.items("c")
    assert (caught.value.status, caught.value.param) == (404, "previous_response_id")
