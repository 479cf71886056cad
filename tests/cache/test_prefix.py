"""The hash chain and the longest hit."""

import random

import pytest

from flashstep.cache.blocks import BlockPool
from flashstep.cache.prefix import NO_PREFIX, Chain, longest_hit
from flashstep.config.cache import HitPolicy

SIZE = 4


def keys_of(tokens, *, salt: str = "") -> list[bytes]:
    chain = Chain(SIZE, salt=salt)
    chain.extend(tokens)
    return chain.keys


def test_keys_name_everything_before_them():
    tokens = list(range(100, 120))
    keys = keys_of(tokens)
    assert len(keys) == 5
    assert len(set(keys)) == 5
    assert keys_of(tokens[:19]) == keys[:4], "only full blocks have keys"
    for position in range(20):
        other = tokens.copy()
        other[position] += 1
        changed = keys_of(other)
        assert [a == b for a, b in zip(keys, changed, strict=True)] == [
            i < position // SIZE for i in range(5)
        ]
    assert set(keys_of(tokens, salt="tenant")).isdisjoint(keys)
    assert keys_of([*tokens[4:8], *tokens[:4]])[1] != keys[0], "the same tokens elsewhere are another block"


def test_a_chain_grows_to_the_same_keys_in_any_steps():
    tokens = [random.Random(1).randrange(129280) for _ in range(60)]
    whole = keys_of(tokens)
    for step in (1, 3, 4, 7, 60):
        chain = Chain(SIZE, salt="")
        for end in range(step, 61, step):
            chain.extend(tokens[:end])
            chain.extend(tokens[:end])
        assert chain.keys == whole[: len(chain.keys)]


def test_ids_and_salts_do_not_run_into_each_other():
    assert keys_of([1, 0, 0, 0]) != keys_of([256, 0, 0, 0])
    assert keys_of([1, 2, 3, 4], salt="a\0") != keys_of([1, 2, 3, 4], salt="a")


def pools(global_keys, window_keys) -> tuple[BlockPool, BlockPool]:
    made = []
    for keys in (global_keys, window_keys):
        pool = BlockPool(16)
        for block, key in zip(pool.allocate(len(keys)), keys, strict=True):
            pool.register(block, key)
        made.append(pool)
    return made[0], made[1]


def hit(keys, held_global, held_window, policy=HitPolicy.EXACT, window=6):
    global_pool, window_pool = pools([keys[i] for i in held_global], [keys[i] for i in held_window])
    return longest_hit(
        keys, global_pool=global_pool, window_pool=window_pool, policy=policy, block_size=SIZE, window=window
    )


KEYS = keys_of(list(range(40)))  # 10 blocks


@pytest.mark.parametrize(
    ("held_global", "held_window", "blocks"),
    [
        (range(10), range(10), 10),
        (range(10), [], 0),
        ([], range(10), 0),
        (range(10), [5, 6], 7),  # a window of 6 tokens needs two blocks of 4 before the cut
        (range(10), [6], 0),
        (range(10), [0], 1),  # at the start one block is all there is
        (range(10), [1, 2, 4, 7, 8], 9),
        (range(10), [1, 2, 4, 7, 9], 3),
        ([0, 1, 2, 4, 5], range(10), 3),  # a hole in the global chain ends it
    ],
)
def test_an_exact_hit_needs_the_window_before_its_end(held_global, held_window, blocks):
    found = hit(KEYS, held_global, held_window)
    assert found.tokens == blocks * SIZE
    assert len(found.blocks) == blocks
    assert found.replay == 0
    if blocks:
        assert found.window_base == max(blocks - 2, 0)
        assert len(found.window_blocks) == min(blocks, 2)


@pytest.mark.parametrize(("held", "tokens"), [(10, 40), (2, 8), (1, 0), (0, 0)])
def test_a_bounded_hit_needs_no_window_but_must_be_longer_than_one(held, tokens):
    found = hit(KEYS, range(held), [], HitPolicy.BOUNDED)
    assert found.tokens == tokens
    if tokens:
        assert (found.replay, found.window_base, found.window_blocks) == (6, (tokens - 6) // SIZE, ())
    else:
        assert found == NO_PREFIX


def test_the_blocks_of_a_hit_stand_in_order():
    global_pool, window_pool = pools(list(reversed(KEYS)), list(reversed(KEYS)))
    found = longest_hit(
        KEYS,
        global_pool=global_pool,
        window_pool=window_pool,
        policy=HitPolicy.EXACT,
        block_size=SIZE,
        window=6,
    )
    assert list(found.blocks) == [global_pool.find(key) for key in KEYS]
    assert list(found.window_blocks) == [window_pool.find(key) for key in KEYS[8:]]
