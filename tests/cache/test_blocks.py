"""The block pool against a plain model of it, under random events."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flashstep.cache.blocks import BlockPool


class PoolMachine(RuleBasedStateMachine):
    """Tables of blocks come and go; the pool must always say what the tables say."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(9, order=[4, 7, 1, 0, 8, 2, 6, 3, 5])
        self.tables: list[list[int]] = []
        self.keys: dict[bytes, int] = {}
        self.count = 0

    def live(self) -> set[int]:
        return {block for table in self.tables for block in table}

    @rule(count=st.integers(1, 4))
    def allocate(self, count):
        if count > self.pool.available:
            with pytest.raises(AssertionError):
                self.pool.allocate(count)
            return
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count
        assert self.live().isdisjoint(blocks)
        self.keys = {key: block for key, block in self.keys.items() if block not in blocks}
        self.tables.append(blocks)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), cold=st.booleans())
    def release(self, data, cold):
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(table, cold=cold)

    @precondition(lambda self: self.live() - set(self.keys.values()))
    @rule(data=st.data())
    def register(self, data):
        block = data.draw(st.sampled_from(sorted(self.live() - set(self.keys.values()))))
        key = bytes([self.count % 256, self.count // 256])
        self.count += 1
        assert self.pool.register(block, key)
        self.keys[key] = block

    @precondition(lambda self: self.keys)
    @rule(data=st.data())
    def share(self, data):
        key = data.draw(st.sampled_from(sorted(self.keys)))
        block = self.pool.find(key)
        assert block == self.keys[key]
        self.pool.share([block])
        self.tables.append([block])

    @invariant()
    def the_pool_agrees(self):
        self.pool.check_integrity(self.tables)
        assert self.pool.owned == len(self.live())
        assert self.pool.cached == len(set(self.keys.values()) - self.live())
        for key, block in self.keys.items():
            assert self.pool.find(key) == block


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def filled(pool: BlockPool, *keys: bytes) -> list[int]:
    blocks = pool.allocate(len(keys))
    for block, key in zip(blocks, keys, strict=True):
        pool.register(block, key)
    return blocks


def test_blocks_are_first_used_in_the_order_given():
    assert BlockPool(4, order=[2, 0, 3, 1]).allocate(4) == [2, 0, 3, 1]
    with pytest.raises(AssertionError):
        BlockPool(4, order=[2, 0, 3])


def test_free_blocks_go_before_cached_ones_and_the_oldest_cached_goes_first():
    pool = BlockPool(4)
    a, b, c = filled(pool, b"a", b"b", b"c")
    for block in (b, a, c):
        pool.release([block])
    pool.allocate(1)
    assert [pool.find(k) is not None for k in (b"a", b"b", b"c")] == [True] * 3
    pool.allocate(1)
    assert [pool.find(k) is not None for k in (b"a", b"b", b"c")] == [True, False, True]


def test_cold_blocks_go_before_warm_ones_unless_they_were_found_again():
    pool = BlockPool(3)
    a, b, c = filled(pool, b"a", b"b", b"c")
    pool.release([a])
    pool.release([b, c], cold=True)
    pool.share([c])
    pool.release([c], cold=True)  # found since: it counts as warm now
    pool.allocate(1)
    assert [pool.find(k) is not None for k in (b"a", b"b", b"c")] == [True, False, True]
    pool.allocate(1)
    assert [pool.find(k) is not None for k in (b"a", b"b", b"c")] == [False, False, True]


def test_equal_contents_are_kept_once():
    pool = BlockPool(2)
    a, b = pool.allocate(2)
    assert pool.register(a, b"k")
    assert not pool.register(b, b"k")
    pool.release([a, b])
    assert pool.find(b"k") == a
    assert (pool.cached, pool.available) == (1, 2)
    pool.check_integrity([])


def test_misuse_is_an_assertion():
    pool = BlockPool(2)
    (a,) = pool.allocate(1)
    with pytest.raises(AssertionError, match="unknown"):
        pool.share([1 - a])
    pool.register(a, b"k")
    with pytest.raises(AssertionError, match="has a key"):
        pool.register(a, b"l")
    pool.release([a])
    with pytest.raises(AssertionError, match="more often"):
        pool.release([a])
    with pytest.raises(AssertionError, match="nobody owns"):
        pool.register(a, b"m")


def test_check_integrity_finds_a_lost_block_and_a_second_owner():
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    pool.check_integrity([blocks])
    with pytest.raises(AssertionError):
        pool.check_integrity([blocks[:1]])
    with pytest.raises(AssertionError):
        pool.check_integrity([blocks, blocks[:1]])
