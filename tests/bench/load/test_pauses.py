"""Pauses: kept while something runs, cut short together where nothing does. A pause of a minute that ends was cut."""

import asyncio

from flashstep.bench.load.pauses import Pauses

LONG_S = 60.0
SHORT_S = 0.05


def clock() -> float:
    return asyncio.get_running_loop().time()


async def test_a_pause_ends_when_it_is_due() -> None:
    pauses = Pauses(idle_s=LONG_S, lane_idle_s=LONG_S)
    begun = clock()
    await pauses.until(begun + SHORT_S, lane=0)
    assert clock() >= begun + SHORT_S and pauses.skipped_s == 0
    await pauses.until(begun - 1, lane=0)


async def test_with_nothing_running_all_pauses_are_shortened_alike() -> None:
    pauses = Pauses(idle_s=SHORT_S, lane_idle_s=LONG_S)
    begun, order = clock(), []

    async def wait(name: str, after_s: float, lane: int) -> None:
        await pauses.until(begun + after_s, lane=lane)
        order.append((name, clock()))
        pauses.sent(lane)

    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        group.create_task(wait("second", LONG_S + 0.1, 1))
        group.create_task(wait("first", LONG_S, 0))
    assert [name for name, _ in order] == ["first", "second"]
    assert order[1][1] - order[0][1] >= 0.09, "what lay between them stays"
    assert LONG_S - 1 < pauses.skipped_s < LONG_S


async def test_while_a_request_runs_nothing_is_cut() -> None:
    pauses = Pauses(idle_s=SHORT_S, lane_idle_s=LONG_S)
    pauses.sent(0)
    waiting = asyncio.create_task(pauses.until(clock() + LONG_S, lane=1))
    await asyncio.sleep(4 * SHORT_S)
    assert not waiting.done() and pauses.skipped_s == 0
    pauses.answered(0)
    async with asyncio.timeout(10):
        await waiting
    assert pauses.skipped_s > LONG_S - 2


async def test_an_idle_lane_is_cut_alone() -> None:
    pauses = Pauses(idle_s=LONG_S, lane_idle_s=SHORT_S)
    pauses.sent(1)
    other = asyncio.create_task(pauses.until(clock() + LONG_S, lane=1))
    async with asyncio.timeout(10):
        await pauses.until(clock() + LONG_S, lane=0)
    assert not other.done()
    other.cancel()


async def test_an_end_ends_all_pauses_now_and_later() -> None:
    pauses = Pauses(idle_s=LONG_S, lane_idle_s=LONG_S)
    waiting = asyncio.create_task(pauses.until(clock() + LONG_S, lane=0))
    await asyncio.sleep(0)
    pauses.end()
    async with asyncio.timeout(10):
        await waiting
        await pauses.until(clock() + LONG_S, lane=0)
