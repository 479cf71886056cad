"""May a waiting request start now: prefix hit, blocks, and the memory of both pools with its fences.

A prompt is admitted only if all global blocks of its tokens are there, and takes them at once: two long prompts never
squeeze each other out half-way. Window blocks are taken chunk by chunk (they come back as the window slides). Where a prompt's
records come from outside, the blocks that they are written to are taken with the others, windows too.
"""

from collections import deque
from collections.abc import Iterable

from flashstep.cache.blocks import BlockPool
from flashstep.cache.prefix import NO_PREFIX, Prefix, longest_hit, with_transferred
from flashstep.config.cache import CacheConfig, HitPolicy
from flashstep.scheduler.states import Job, Tables


class Memory:
    """Both block pools of an engine, and the blocks that wait behind a step.

    A released block that a planned step may still touch is *fenced*: it counts as owned until that step has returned.
    """

    def __init__(
        self,
        cache: CacheConfig,
        *,
        window: int,
        ahead: int = 1,
        global_pool: BlockPool | None = None,
        window_pool: BlockPool | None = None,
    ) -> None:
        self.cache = cache
        self.window = window
        self.ahead = ahead  # rows that may be planned behind the newest known token
        self.blocks = global_pool or BlockPool(cache.num_blocks)
        self.window_blocks = window_pool or BlockPool(cache.num_window_blocks)
        self._fences: deque[tuple[int, list[int], list[int]]] = deque()

    @property
    def fenced(self) -> bool:
        """Blocks are on their way back."""
        return bool(self._fences)

    @property
    def usage(self) -> float:
        return self.blocks.owned / self.blocks.num_blocks

    @property
    def live_window_blocks(self) -> int:
        """Window blocks that a request holds at most when it decodes: its window and the blocks it writes."""
        return -(-(self.window + self.ahead - 1) // self.cache.block_size) + 1

    def give_back(self, tables: Tables, *, behind: int | None) -> None:
        """Release ``tables``; ``behind`` is the newest planned step that may touch them (None: no step does)."""
        blocks, window = tables.blocks[::-1], tables.window[::-1]
        if behind is None:
            self.blocks.release(blocks)
            self.window_blocks.release(window)
        else:
            self._fences.append((behind, blocks, window))

    def open_fences(self, step: int) -> None:
        """``step`` has returned: release what waited for it and earlier ones."""
        still: deque[tuple[int, list[int], list[int]]] = deque()
        for fence in self._fences:
            behind, blocks, window = fence
            if behind > step:
                still.append(fence)
                continue
            self.blocks.release(blocks)
            self.window_blocks.release(window)
        self._fences = still

    def slide(self, tables: Tables, position: int) -> None:
        """Rows before ``position`` have returned and none will run again: let go of windows that no later row reads."""
        behind = position - self.window
        if behind > 0:
            self.window_blocks.release(tables.slide(behind // self.cache.block_size), cold=True)

    def register(self, job: Job) -> None:
        """Tell the prefix cache of the blocks that ``job`` has filled (or has planned to) with known tokens.

        Steps run in order, so a block may be found from the moment that the step which fills it is planned. ``computed`` is a
        bound where drafts are in flight, but the row of every known token is computed or surely planned, except the last
        token that the request may have: nothing follows it, so it never gets a row.
        """
        tables, size = job.tables, self.cache.block_size
        full = min(job.computed, len(job.tokens), job.last_row + 1) // size
        if tables is None or full <= job.registered or not self.cache.enable_prefix_caching:
            return
        job.chain.extend(job.tokens)
        for index in range(job.registered, full):
            key = job.chain.keys[index]
            self.blocks.register(tables.blocks[index], key)
            if self.cache.hit_policy is HitPolicy.EXACT and index >= tables.window_first:
                self.window_blocks.register(tables.window[index - tables.window_first], key)
        job.registered = full

    def check_integrity(self, tables: Iterable[Tables]) -> None:
        """Assert that ``tables`` and the fences explain every owned block of both pools."""
        held = list(tables)
        self.blocks.check_integrity([*(t.blocks for t in held), *(blocks for _, blocks, _ in self._fences)])
        self.window_blocks.check_integrity(
            [*(t.window for t in held), *(window for _, _, window in self._fences)]
        )


def look_up(job: Job, memory: Memory) -> Prefix:
    """The prefix hit that ``job`` may use. At least one row is always left to compute.

    A request that still wants log-probabilities of its prompt takes none: they need every row.
    """
    cache = memory.cache
    if not cache.enable_prefix_caching or job.wants_prompt_logprobs:
        return NO_PREFIX
    job.chain.extend(job.tokens)
    usable = (job.length - 1) // cache.block_size
    return longest_hit(
        job.chain.keys[:usable],
        global_pool=memory.blocks,
        window_pool=memory.window_blocks,
        policy=cache.hit_policy,
        block_size=cache.block_size,
        window=memory.window,
    )


def _known_beginning(job: Job, memory: Memory) -> Prefix:
    """What ``job`` need not compute: what is cached here and, at its first admission, what comes from outside behind that."""
    hit = look_up(job, memory)
    transferred = job.request.transferred
    if job.admissions or transferred < hit.tokens:
        return hit
    if hit.replay:
        hit = (
            NO_PREFIX  # nothing cached here has windows, and what comes has them behind the whole of it only
        )
    if transferred == hit.tokens:
        return hit
    return with_transferred(hit, transferred, block_size=memory.cache.block_size, window=memory.window)


def admit(job: Job, memory: Memory, *, slot: int, now: float) -> bool:
    """Start ``job`` in ``slot`` if both pools have what it needs; else change nothing."""
    known = _known_beginning(job, memory)
    size = memory.cache.block_size
    total = -(-job.length // size)
    fresh = total - len(known.blocks)
    if memory.blocks.available - memory.blocks.unowned(known.blocks) < fresh:
        return False
    window_start = known.window_base + len(known.window_blocks)
    window_fresh = min(total - window_start, max(memory.live_window_blocks - len(known.window_blocks), 1))
    if memory.window_blocks.available - memory.window_blocks.unowned(known.window_blocks) < window_fresh:
        return False
    memory.blocks.share(known.blocks)
    memory.window_blocks.share(known.window_blocks)
    tables = Tables(slot, prefix=known)
    tables.blocks.extend(memory.blocks.allocate(fresh))
    if known.transferred:
        tables.window.extend(memory.window_blocks.allocate(-(-known.tokens // size) - window_start))
    job.admit(tables, prefix=known, now=now)
    return True
