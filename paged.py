"""Paged attention: the cache as fixed blocks, handed out as requests grow, shared where equal.

The idea      A contiguous cache must keep room for the longest answer a request may get, and
              most of it stays empty. Here the cache is a pool of blocks of S tokens; a request
              has a block table, as a process has a page table, and takes the next block when
              its last one is full. Blocks are counted, so several requests can hold the same
              one: the samples of a prompt share it, and a block that is full is remembered by
              what is in it and before it, so that the next prompt that begins the same way
              finds it. Layers that keep the same are a group, with pools and tables of its own:
              a window gives back what no later row sees, a state is one block for all tokens.

The data      tables   A  5 1 7        A's tokens 0..15 are in block 5, 16..31 in block 1, ...
                       B  5 1 2        B began like A: references of 5 and 1 are 2
              pool     | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |     block 0 is never handed out
                        null AB  B       c   AB      A       c: cached, in no table
              index    hash(salt, ids 0..15) -> 5    hash(that, ids 16..31) -> 1    ...
              free     3 6             take: a free block, else evict the cached one whose
                                       turn it is (least recently used, tails before heads)
              groups   full    5 1 7 4     every token's
                       window  0 0 7 4     0: left the window, given back
                       state   3 8         what the step reads, what it writes; then  8
                       A prefix is found where all of them can go on: all blocks are known,
                       all of the last window, a state after just that many tokens.

Invariants    1. free + held + cached == blocks; no block is in two of them
              2. a block's references are the tables that hold it
              3. no table holds a free block
              4. the index holds full blocks of committed ids only, each under its own prefix
              5. a block that several tables hold is never written: a match ends before the
                 last token, and the one block that is not full is copied at a fork
              6. a match is by ids: two prefixes with the same hash are a miss
              7. a windowed table has the blocks that the next row sees, and 0 before them
              8. a state is written once, by the step that follows the one it reads; state 0 is
                 the one before the first token, and is all zeros

Units         blocks; S tokens a block; lengths and positions in tokens.
Articles      "Paged Attention: Virtual Memory for the KV Cache",
              "Prefix Caching: When It Pays and How to Design Prompts for It" and
              "When Most Layers Stop Caching: Hybrid, Sliding, and Sparse Attention, Sized"
Try           python paged.py                   a pool before and after sharing, forks, eviction
              python paged.py --block-size 8    smaller blocks: less waste, longer tables
              python paged.py --kinds           a prefix found again in windows and states too
              python tests/mutations.py paged.py   change it: known bugs, each with its test
Imports       kernels, kv_cache.
"""

import heapq
from dataclasses import dataclass, field

import torch
from torch import Tensor

import kernels
from kv_cache import LayerSpec, block_bytes, rows, shapes

# ---------------------------------------------------------------- which blocks: integers only


@dataclass(eq=False)
class Entry:
    """A full block in the prefix index: the ids in it, and the entry of the block before."""

    key: int
    parent: "Entry | None"  # None: the block begins a prompt
    salt: str | None
    ids: tuple[int, ...]
    block: int
    depth: int  # blocks before it
    used: int = 0  # when a request last let it go
    idle: bool = False  # no table holds it: it may be evicted


def chain(parent: Entry | None, salt: str | None, ids: tuple[int, ...]) -> int:
    """A block's key: a hash over all tokens up to its end, through its parent's key."""
    return hash((parent.key if parent else salt, ids))


def unknown(parent: Entry | None, salt: str | None, ids: tuple[int, ...]) -> Entry:
    """A prefix without a block: what comes after it may have one."""
    return Entry(chain(parent, salt, ids), parent, salt, ids, 0, parent.depth + 1 if parent else 0)


def same(a: Entry | None, b: Entry | None) -> bool:
    """Whether two entries stand for the same tokens; mostly they are the same entry."""
    while a is not b:
        if a is None or b is None or a.ids != b.ids or a.salt != b.salt:
            return False
        a, b = a.parent, b.parent
    return True


def least_recently_used(entry: Entry) -> tuple:
    """Eviction order, smallest first. Blocks let go together leave from the tail."""
    return entry.used, -entry.depth


class PrefixIndex:
    """Full blocks by their prefix: `match`, `insert`, `evict`. One cache group's."""

    def __init__(self, order=least_recently_used):
        self.order = order
        self.entries: dict[int, Entry] = {}  # by key
        self.of_block: dict[int, Entry] = {}
        self.idle = 0  # how many entries no table holds
        self.heap: list[tuple] = []  # (order, a number, entry); stale ones are skipped
        self.pushed = 0

    def match(self, tokens: list[int], salt: str | None, size: int, gaps=False) -> list[int]:
        """Blocks of the longest known prefix, short of the last token: there is always a row to
        sample from, and the request writes into a block of its own. gaps: all of the prefixes, 0
        for one that is not known."""
        blocks, parent = [], None
        for start in range(0, (len(tokens) - 1) // size * size, size):
            ids = tuple(tokens[start : start + size])
            entry = self._find(parent, salt, ids)
            if entry is None and not gaps:
                break
            parent = entry or unknown(parent, salt, ids)
            blocks.append(parent.block)
        return blocks

    def _find(self, parent: Entry | None, salt: str | None, ids: tuple[int, ...]) -> Entry | None:
        entry = self.entries.get(chain(parent, salt, ids))
        if entry and entry.ids == ids and entry.salt == salt and same(entry.parent, parent):
            entry.parent = parent  # which may have been evicted and entered anew
            return entry
        return None

    def insert(self, parent: Entry | None, salt, ids: tuple[int, ...], block: int) -> Entry | None:
        """Enter a block that a table holds. Known already, it stays as it is, and the answer is
        the block that is known: of two requests that fill equal blocks the first is entered.
        Block 0 is not entered: the answer is for what follows it. None: another prefix has the
        same key."""
        entry = unknown(parent, salt, ids)
        if entry.key in self.entries:
            return self._find(parent, salt, ids)
        entry.block = block
        if block:
            self.entries[entry.key] = self.of_block[block] = entry
        return entry

    def let_go(self, block: int, now: int):
        """No table holds the block any more: it waits for a match, or for its eviction."""
        entry = self.of_block[block]
        entry.used, entry.idle = now, True
        self.idle += 1
        self.pushed += 1
        heapq.heappush(self.heap, (self.order(entry), self.pushed, entry))
        if len(self.heap) > 2 * len(self.entries) + 64:  # mostly stale
            idle = [entry for entry in self.entries.values() if entry.idle]
            self.heap = [(self.order(entry), i, entry) for i, entry in enumerate(idle)]
            heapq.heapify(self.heap)

    def hold(self, block: int):
        """A match took an idle block."""
        self.of_block[block].idle = False
        self.idle -= 1

    def forget(self, block: int) -> bool:
        """A block is not to be found any more; whether it was idle, and so is free now."""
        entry = self.of_block.pop(block, None)
        if entry is None:
            return False
        del self.entries[entry.key]
        idle, entry.idle = entry.idle, False
        self.idle -= idle
        return idle

    def evict(self) -> int:
        """Forget the idle block whose turn it is, and hand it over."""
        item = heapq.heappop(self.heap)
        while not self._turn(item):
            item = heapq.heappop(self.heap)
        entry = item[2]
        entry.idle = False
        self.idle -= 1
        del self.entries[entry.key], self.of_block[entry.block]
        return entry.block

    def _turn(self, item: tuple) -> bool:
        """Whether the entry is idle still, and since this item was pushed."""
        order, _, entry = item
        return entry.idle and order == self.order(entry)


@dataclass(frozen=True)
class Room:
    """How many blocks a cache group has, and what a request keeps in them.

    window   tokens; 0: all. A block that no later row can see is given back at once
    state    a block is no part of the tokens but the state after all of them: a step reads one
             and writes the next, so that what was read can be kept, as a snapshot
    """

    blocks: int
    window: int = 0
    state: bool = False


class Pool:
    """The blocks 1..blocks of one cache group: free, held by tables, or cached.

    This one's requests keep all their blocks; `Windowed` and `States` say what they do else.
    """

    gaps = False  # a match may begin after blocks that are not known

    def __init__(self, room: Room, size: int, caching: bool):
        self.room, self.blocks, self.size = room, room.blocks, size
        self.caching = caching
        self.repair([])

    def cuts(self, blocks: list[int]):
        """Of the blocks of a match: after which of them a request can go on."""
        return range(1, len(blocks) + 1)

    def table(self, blocks: list[int], cut: int) -> list[int]:
        """What a request holds that goes on after `cut` of them."""
        return blocks[:cut]

    def missing(self, table: list[int], needed: int) -> int:
        """Blocks to take for a table of `needed` ones."""
        return needed - len(table)

    def extend(self, table: list[int], more: int):
        table.extend(self.take() for _ in range(more))

    def shrink(self, table: list[int], needed: int, now: int):
        """Give back what was for guesses that were wrong: it would be others' when they need it."""
        while len(table) > needed:
            self.let_go(table.pop(), now)

    def filled(self, table: list[int], i: int, computed: int) -> int:
        """The block that stands for the tokens of block i and all before; 0: there is none."""
        return table[i]

    def settle(self, table: list[int], computed: int, now: int):
        """Give back what no row from position `computed` on can see."""

    def fork(self, table: list[int], full: int, samples: int) -> list[int]:
        """The table of one of so many samples: full blocks are shared, and it takes over what
        `grow` took for it."""
        own = (len(table) - full) // samples
        for block in filter(None, table[:full]):
            self.hold(block)
        return table[:full] + [table.pop() for _ in range(own)]

    def repair(self, tables: list[list[int]]):
        """Begin anew from the tables: nothing is cached, what no table holds is free."""
        self.references = [0] * (self.blocks + 1)
        for table in tables:
            for block in filter(None, table):
                self.references[block] += 1
        self.free = [block for block in range(self.blocks, 0, -1) if not self.references[block]]
        self.index = PrefixIndex()

    @property
    def available(self) -> int:
        return len(self.free) + self.index.idle

    def take(self) -> int:
        """A block for one table to hold: a free one, else the one whose turn to go it is."""
        block = self.free.pop() if self.free else self.index.evict()
        self.references[block] = 1
        return block

    def hold(self, block: int):
        """One more table has the block; `let_go`: one less. Held by none, a block that the index
        knows stays cached, any other is free."""
        if self.references[block] == 0:
            self.index.hold(block)
        self.references[block] += 1

    def let_go(self, block: int, now: int):
        self.references[block] -= 1
        if self.references[block] == 0:
            if block in self.index.of_block:
                self.index.let_go(block, now)
            else:
                self.free.append(block)

    def forget(self, block: int):
        """A block is not to be found any more; one that nobody holds is free."""
        if self.index.forget(block):
            self.free.append(block)


class Windowed(Pool):
    """Of layers that see `window` tokens: in a table, 0 is a block that has left the window."""

    gaps = True

    def most(self, samples: int) -> int:
        """Blocks that a request needs at once, if it goes on in small chunks: of a window, the
        one that it begins in, the one to write, and one more for each other sample."""
        return -(-self.room.window // self.size) + 1 + samples

    def first(self, position: int) -> int:
        """The first block that a row at this position sees."""
        return max(position - self.room.window + 1, 0) // self.size

    def cuts(self, blocks):
        """After those that have all of the last window before them."""
        known = 0
        for cut, block in enumerate(blocks, 1):
            known = known + 1 if block else 0
            if known >= cut - self.first(cut * self.size):
                yield cut

    def table(self, blocks, cut):
        first = self.first(cut * self.size)
        return [0] * first + blocks[first:cut]

    def settle(self, table, computed, now):
        i = self.first(computed) - 1
        while i >= 0 and table[i]:
            self.let_go(table[i], now)
            table[i] = 0
            i -= 1


class States(Pool):
    """Of layers that keep a state: a table is [what the step reads, what it writes], 0 the state
    before the first token. Nobody writes what another one reads, so states are never copied."""

    gaps = True

    def most(self, samples: int) -> int:
        return 2

    def cuts(self, blocks):
        return [cut for cut, block in enumerate(blocks, 1) if block]

    def table(self, blocks, cut):
        return blocks[cut - 1 : cut]

    def missing(self, table, needed):
        return 2 - max(len(table), 1)

    def extend(self, table, more):
        if not table:
            table.append(0)
        super().extend(table, more)

    def shrink(self, table, needed, now):
        """It has as many as ever."""

    def filled(self, table, i, computed):
        return table[-1] if computed == (i + 1) * self.size else 0

    def settle(self, table, computed, now):
        if block := table.pop(0):
            self.let_go(block, now)

    def fork(self, table, full, samples):
        for block in filter(None, table):
            self.hold(block)
        return table.copy()


@dataclass(eq=False)
class Progress:
    """What the manager remembers of a request that runs."""

    entered: list[tuple[int, Entry | None]]  # per group: full blocks seen, and the last's entry
    prompt: int  # tokens when it began: what comes later is its answer
    branch: int = 0  # tokens that other requests have computed, where a state was not kept
    computed: int = 0
    tails: dict[int, Entry | None] = field(default_factory=dict)  # by group: see `_thin`


class BlockManager:
    """Who holds which blocks; of no tensor, and of a request only its integers.

    rooms       of each cache group: see `Room`; an integer is a number of blocks, all kept
    block_size  tokens a block (a power of two, 8 to 256)
    prefix_cache   whether full blocks can be found again
    reserve     take the blocks for the longest possible answer at once, as a contiguous cache
                does: nothing is ever preempted, and most of it stays empty
    """

    def __init__(
        self, rooms: int | list[int | Room], block_size=16, prefix_cache=True, reserve=False
    ):
        rooms = [rooms] if isinstance(rooms, int) else rooms
        rooms = [Room(room) if isinstance(room, int) else room for room in rooms]
        if block_size not in BLOCK_SIZES:
            raise ValueError(f"block_size {block_size} is not a power of two from 8 to 256")
        for room in rooms:
            if room.blocks < 1:
                raise ValueError(
                    f"a cache of {room.blocks} blocks holds nothing; at least 1 is needed"
                )
        self.block_size, self.reserve = block_size, reserve
        self.pools = [
            (States if room.state else Windowed if room.window else Pool)(
                room, block_size, prefix_cache
            )
            for room in rooms
        ]
        self.growing = [pool for pool in self.pools if not pool.gaps]
        self.states = any(room.state for room in rooms) and prefix_cache  # may be found again
        self.progress: dict[object, Progress] = {}  # of requests that hold blocks
        self.clock = 0

    @property
    def blocks(self) -> int:
        """Over all groups, as `held` and `cached`."""
        return sum(pool.blocks for pool in self.pools)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _demand(self, request, tokens: int, reserve: bool) -> int:
        """Blocks a table needs for `tokens` tokens; at the end of its prompt, or in a
        reservation, those of its samples too: they share what is full and nothing else."""
        blocks = self._blocks(max(tokens, request.most) if reserve else tokens)
        if request.samples > 1 and (reserve or tokens >= len(request.tokens)):
            full = len(request.tokens) // self.block_size
            blocks = full + request.samples * (blocks - full)
        return blocks

    def door(self, request):
        """ValueError if the request cannot run even alone."""
        need = self._demand(request, len(request.tokens), self.reserve)
        need = max(need, self._blocks(request.most))
        for pool in self.pools:
            least = min(need, pool.most(request.samples)) if pool.gaps else need
            if least > pool.blocks:
                how = "reserves" if self.reserve else "needs"
                raise ValueError(
                    f"the request {how} {least:,} blocks of {self.block_size} tokens;"
                    f" the cache has {pool.blocks:,}"
                )

    def match(self, tokens: list[int], salt: str | None) -> tuple[list[list[int]], int]:
        """Take the longest cached prefix that every group can go on from: a table for each, and
        how many tokens that is. Whoever asks holds the blocks, and must release them.

        At most (len - 1) // S blocks: of 32 tokens with S = 16 one block, of 33 two.
        """
        size = self.block_size
        kept = {pool: pool.index.match(tokens, salt, size) for pool in self.growing}
        if kept:  # nobody goes beyond what these know
            tokens = tokens[: min(map(len, kept.values())) * size + 1]
        found = [
            kept[pool] if pool in kept else pool.index.match(tokens, salt, size, gaps=True)
            for pool in self.pools
        ]
        cuts = [set(pool.cuts(blocks)) for pool, blocks in zip(self.pools, found)]
        cut = max(set.intersection(*cuts), default=0)
        tables = [pool.table(blocks, cut) for pool, blocks in zip(self.pools, found)]
        for pool, table in zip(self.pools, tables):
            for block in filter(None, table):
                pool.hold(block)
        return tables, cut * size

    def _known(self, tokens: list[int], salt: str | None) -> int:
        """Tokens of the longest prefix that the groups that keep all tokens have."""
        found = [pool.index.match(tokens, salt, self.block_size) for pool in self.growing]
        return min(map(len, found), default=0) * self.block_size

    def limit(self, request, n: int) -> int:
        """Where a chunk of a prompt must end: of n tokens, how many. Anywhere, but

        - a window's blocks must be enough for it, without those that others hold;
        - a state can be found again at the end of a block only, so chunks end there, and where
          the request leaves what others have computed: the next of its kind begins there.
        """
        size, done = self.block_size, request.computed
        if self.states:
            progress = self._progress(request)
            end = min(done + n, progress.prompt - 1) // size * size  # as far as a match goes
            end = progress.branch if done < progress.branch < end else end
            n = end - done if end > done else n
        for group, pool in enumerate(self.pools):
            if pool.room.window:
                table = request.tables[group] if request.tables else []
                left = pool.available - (request.samples - 1)
                n = min(n, (len(table) + left) * size - request.computed)
        return max(n, 1)

    def _progress(self, request) -> Progress:
        if request not in self.progress:
            branch = self._known(request.tokens, request.salt) if self.states else 0
            entered = [(0, None)] * len(self.pools)
            known = len(request.tokens)
            self.progress[request] = Progress(entered, known, branch, request.computed)
        return self.progress[request]

    def grow(self, request, n: int, ahead: int = 0) -> bool:
        """Make sure every group's table has room for n more tokens, or leave all as they are.

        ahead: all that a request which begins has to compute. Groups that keep all tokens make
        room for it at once, others for what they come to need at once: a request would else
        begin only to be preempted.
        """
        request.tables = request.tables or [[] for _ in self.pools]
        missing = []
        for pool, table in zip(self.pools, request.tables):
            more = self._missing(request, pool, table, n)
            if ahead > n:
                later = self._missing(request, pool, table, ahead)
                if pool.gaps:
                    later = min(later, pool.most(request.samples) - sum(map(bool, table)))
                more = max(more, later)
            if more > pool.available:
                return False
            missing.append(more)
        for more, pool, table in zip(missing, self.pools, request.tables):
            pool.extend(table, more)
        return True

    def _missing(self, request, pool: Pool, table: list[int], n: int) -> int:
        reserve = self.reserve and not pool.gaps
        return pool.missing(table, self._demand(request, request.computed + n, reserve))

    def fork(self, parent, child):
        """Share what the prompt has filled; what `grow` took for the child it takes over."""
        full = len(parent.tokens) // self.block_size
        for pool, table in zip(self.pools, parent.tables):
            child.tables.append(pool.fork(table, full, parent.samples))

    def commit(self, request):
        """Enter in the index what the request has filled with committed ids, and give back what
        it does not need any more."""
        self.clock += 1
        size, progress = self.block_size, self._progress(request)
        full = request.computed // size
        for group, pool in enumerate(self.pools):
            table = request.tables[group]
            count, last = progress.entered[group]
            for i in range(count, full if pool.caching else 0):
                if i and last is None:
                    break  # its prefix has the key of another one
                ids = tuple(request.tokens[i * size : (i + 1) * size])
                block = pool.filled(table, i, request.computed)
                last = pool.index.insert(last, request.salt, ids, block)
            progress.entered[group] = full, last
            pool.settle(table, request.computed, self.clock)
            needed = self._demand(request, len(request.tokens), self.reserve)
            pool.shrink(table, needed, self.clock)
        self._thin(request, progress)
        progress.computed = request.computed

    def _thin(self, request, progress: Progress):
        """Of the snapshots that a request leaves every block only the last stays: the next turn
        goes on from there. Those stay where prompts part, where its prompt ends, and after a
        long chunk of that."""
        size, done = self.block_size, request.computed
        stays = done in (progress.branch, (progress.prompt - 1) // size * size)
        stays |= done <= progress.prompt and done - progress.computed > size
        for group, pool in enumerate(self.pools):
            block = request.tables[group][-1] if pool.room.state else 0
            entry, last = pool.index.of_block.get(block), progress.tails.get(group)
            if entry is not None:
                if last and pool.index.of_block.get(last.block) is last:
                    pool.forget(last.block)
                progress.tails[group] = None if stays else entry

    def forget(self, request):
        """Take all that the request has read or written out of the index: something in it is
        wrong. That is what it holds, and the windows and states that it has left behind."""
        entered = self._progress(request).entered
        for pool, table, (_, entry) in zip(self.pools, request.tables, entered):
            for block in table:
                pool.forget(block)
            while entry is not None:
                if pool.index.of_block.get(entry.block) is entry:
                    pool.forget(entry.block)
                entry = entry.parent

    def release(self, request):
        """Give all blocks back, tails first; the full ones stay cached."""
        self.clock += 1
        self.progress.pop(request, None)
        for pool, table in zip(self.pools, request.tables):
            while table:
                if block := table.pop():
                    pool.let_go(block, self.clock)
        request.tables = []

    def repair(self, running):
        """After an interruption between two lines the tables are the truth."""
        self.progress.clear()
        for group, pool in enumerate(self.pools):
            pool.repair([request.tables[group] for request in running if request.tables])

    @property
    def held(self) -> int:
        """Blocks in tables, over all groups; a shared one counts once."""
        return sum(pool.blocks - pool.available for pool in self.pools)

    @property
    def cached(self) -> int:
        """Blocks that no table holds and a prompt can find, over all groups."""
        return sum(pool.index.idle for pool in self.pools)

    def check(self, running):
        """Raise AssertionError where an invariant does not hold for these requests."""
        for group, pool in enumerate(self.pools):
            tables = [request.tables[group] for request in running if request.tables]
            count = [0] * (pool.blocks + 1)
            for table in tables:
                for block in filter(None, table):
                    count[block] += 1
            index = pool.index
            idle = {entry.block for entry in index.entries.values() if entry.idle}
            held = {block for block, references in enumerate(count) if references}
            every = sorted([*pool.free, *idle, *held])
            assert every == list(range(1, pool.blocks + 1)), "1: free + held + cached != blocks"
            assert count == pool.references, "2: references differ from the tables"
            assert index.idle == len(idle), f"1: {index.idle} idle, but {len(idle)} are"
            assert len(index.entries) == len(index.of_block), "4: a block entered twice"
            for request in running:
                if request.tables:
                    self._check_table(request, pool, request.tables[group])

    def _check_table(self, request, pool: Pool, table: list[int]):
        size, window = self.block_size, pool.room.window
        assert len(table) <= 2 or not pool.room.state, f"8: {len(table)} states of one request"
        for i, block in enumerate(table):
            if not pool.room.state:
                gone = window and i < pool.first(request.computed)
                assert bool(block) != bool(gone), f"7: block {i} of {request.computed} tokens"
            entry = pool.index.of_block.get(block)
            if entry is not None:
                end = (entry.depth + 1) * size
                ids = tuple(request.tokens[end - size : end])
                assert entry.ids == ids, f"4: block {block} is not {ids}"
                assert entry.depth == i or pool.room.state, f"4: block {block} is not the {i}th"
                assert end <= request.computed, f"4: block {block} is not full"


BLOCK_SIZES = (8, 16, 32, 64, 128, 256)


# ---------------------------------------------------------------- what is in them: tensors


class PagedStep:
    """What the model sees of a paged cache in one forward pass: see kv_cache.Step."""

    def __init__(
        self, cache: "PagedCache", tokens, positions, sample_rows, views, plan, spans, padded=None
    ):
        self.cache = cache
        self.tokens = tokens
        self.positions = positions
        self.sample_rows = sample_rows
        self.views = views  # one for each cache group
        self.plan = plan
        self.spans = spans  # of each request: first row, rows, first position
        self.padded = padded  # rows, of a decode step that was padded to one of the cache's sizes
        self.drafted = any(request.draft for request, _ in plan)  # some rows may not stay
        self.inputs: list[tuple] = []  # then what states were made of: (layer, with what, from)

    def store(self, layer: int, k: Tensor, v: Tensor | None):
        """Write a layer's keys and values of this step's rows: k, v (T, G, D)."""
        pools = self.cache.pools[layer]
        kernels.store_kv(k, v, pools[0], None if v is None else pools[1], self._view(layer))

    def _view(self, layer: int):
        return self.views[self.cache.group_of[layer]]

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, causal: bool = True,
        scale: float | None = None, index: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """Store k, v (T, G, D), then attend with q (T, H, D): (T, H, Dv)."""
        self.store(layer, k, v)
        spec, pools, view = self.cache.specs[layer], self.cache.pools[layer], self._view(layer)
        keys, values = pools[0], pools[0][..., : spec.values] if v is None else pools[1]
        if index is None:
            return kernels.attention(q, keys, values, view, causal, spec.window, scale)
        index_q, index_k, weights = index
        kernels.store_kv(index_k[:, None], None, pools[1][:, :, None], None, view)
        return kernels.sparse_attention(
            q, keys, values, view, index_q, pools[1], weights, spec.top, scale
        )

    def conv(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        """A linear layer's short convolution and silu: x (T, C), weight (C, K) -> (T, C)."""
        return self._state(layer, self._conv, weight, x)

    def _conv(self, layer: int, view, weight: Tensor, x: Tensor) -> Tensor:
        return kernels.conv(x, weight, self.cache.pools[layer][0], view)

    def recur(self, layer: int, q, k, v, g, beta) -> Tensor:
        """A linear layer's gated delta rule over its state, see `kernels.delta_rule`."""
        return self._state(layer, self._recur, None, q, k, v, g, beta)

    def _recur(self, layer: int, view, weight, *given: Tensor) -> Tensor:
        return kernels.recur(*given, self.cache.pools[layer][1], view)

    def _state(self, layer: int, run, weight: Tensor | None, *given: Tensor) -> Tensor:
        if self.drafted:
            self.inputs.append((layer, run, weight, given))
        return run(layer, self._view(layer), weight, *given)

    def replay(self, stay: list[int]):
        """Write the states again of the requests of which not all rows stay: after those that do.
        What the step read is as it was."""
        at, rows, spans, short = 0, [], [], []
        for (request, n), (row, _, position), count in zip(self.plan, self.spans, stay):
            if count < n:
                rows += range(row, row + count)
                spans.append((at, count, position))
                short.append(request)
                at += count
        if not (short and self.inputs):
            return
        cache, chosen = self.cache, kernels.upload(rows, torch.int64, self.cache.device)
        views = [
            layout.view([request.tables[group] for request in short], spans)
            if cache.groups[group].kind == "linear"
            else None
            for group, layout in enumerate(cache.layouts)
        ]
        if cache.uploaded is not None:
            cache.uploaded.record()  # the next step waits for these copies too
        for layer, run, weight, given in self.inputs:
            run(layer, views[cache.group_of[layer]], weight, *(x[chosen] for x in given))


class PagedCache:
    """The pools' tensors, of each layer those of `kv_cache.shapes`: (blocks + 1, S, ...) of
    what it keeps of tokens, (blocks + 1, ...) of its states.

    Tensors only: who holds which block is for `BlockManager` to know. Layers with the same
    spec are one cache group: they share block tables, and a step's View. `blocks` is how many
    each group has.

    budget, max_running: most rows a step, most requests at once; max_len: most tokens of one
    (default: the pool's); sizes: rows that decode steps are padded to, ascending.
    """

    def __init__(
        self,
        specs: list[LayerSpec],
        blocks: int | list[int],
        block_size: int,
        budget: int,
        max_running: int,
        device="cpu",
        dtype=torch.float32,
        max_len: int | None = None,
        sizes: tuple[int, ...] = (),
    ):
        self.block_size, self.sizes = block_size, sizes
        self.device, self.dtype = torch.device(device), dtype
        self.specs, self.groups = list(specs), list(dict.fromkeys(specs))
        self.group_of = [self.groups.index(spec) for spec in specs]
        blocks = [blocks] * len(self.groups) if isinstance(blocks, int) else blocks
        self.pools = [
            [self._pool(blocks[group] + 1, *part) for part in shapes(spec, block_size)]
            for spec, group in zip(specs, self.group_of)
        ]
        self.nbytes = sum(x.numel() * x.element_size() for pools in self.pools for x in pools)
        self.tokens, self.positions, self.sample_rows = (
            kernels.Buffer(size, self.device) for size in (budget, budget, budget + max_running)
        )
        self.uploaded = torch.cuda.Event() if self.device.type == "cuda" else None
        width = max(blocks) if max_len is None else -(-max_len // block_size)
        self.layouts = [
            kernels.StateLayout(max_running, self.device)
            if spec.kind == "linear"
            else kernels.Layout(
                budget, max_running, width if spec.window else min(width, count), block_size,
                self.device, dtype, spec.window,
            )
            for spec, count in zip(self.groups, blocks)
        ]  # fmt: skip

    def _pool(self, blocks: int, shape: tuple[int, ...], dtype: torch.dtype | None) -> Tensor:
        pool = torch.empty(blocks, *shape, dtype=dtype or self.dtype, device=self.device)
        pool[0] = 0  # of states: the one before the first token
        return pool

    def prepare(self, plan, padded: int | None = None) -> PagedStep:
        """Lay a plan [(request, n)] out in rows: buffers filled, a View for each group.

        Where every request has one row, which it is sampled from once, rows are added up to
        `padded`, or the next of `sizes`: they write nothing, see nothing, and nobody reads what
        they give.
        """
        if self.uploaded is not None:
            self.uploaded.synchronize()  # else what a copy still reads would be overwritten
        tokens, positions, sample_rows, segments = rows(plan)
        count = len(tokens)
        if count == len(plan) == len(sample_rows) and padded is None:
            padded = next((size for size in self.sizes if size >= count), None)
        more = (padded or count) - count
        spans = [(s.row, s.n, s.start) for s in segments]
        views = [
            layout.view([request.tables[group] for request, _ in plan], spans, more)
            for group, layout in enumerate(self.layouts)
        ]
        step = PagedStep(
            self,
            self.tokens.fill(tokens + [0] * more),
            self.positions.fill(positions + [0] * more),
            self.sample_rows.fill(sample_rows + list(range(count, count + more))),
            views,
            plan,
            spans,
            padded,
        )
        if self.uploaded is not None:
            self.uploaded.record()
        return step

    def copy(self, parent, child, length: int):
        """A fork at `length` tokens: the child's copy of the block that is not full."""
        full = length // self.block_size
        for pools, group in zip(self.pools, self.group_of):
            if length % self.block_size and self.groups[group].kind != "linear":
                for pool in pools:
                    pool[child.tables[group][full]] = pool[parent.tables[group][full]]

    def commit(self, step: PagedStep, stay: list[int]):
        """Of each request of the plan so many rows stay. Keys of others lie beyond `computed`, and
        length decides; the next step reads the states that this one wrote, or writes here."""
        step.replay(stay)


def rooms(
    specs, memory: int, block_size: int, budget: int, max_running: int, element_bytes: int
) -> tuple[list[Room], int]:
    """Share bytes out among a model's cache groups; and how many requests can run at once.

    States come first: for each running request what it reads, what it writes, and snapshots of
    its prompt and of its answer.
    Then windows: for each the blocks of a window and one at either end, and a step's rows. Each
    of these takes at most half of what is left, unless it is the last, or half is not enough for
    one request. Groups that keep all tokens have the rest, the same number of blocks each.
    ValueError: there is not enough for one request.

    Example: SmolLM2-135M in bfloat16, 23,040 bytes a token: blocks of 368,640 bytes.
    """
    groups = list(dict.fromkeys(specs))
    each = {g: specs.count(g) * block_bytes(g, block_size, element_bytes) for g in groups}
    few = {g: least_blocks(g, block_size) for g in groups}
    least = {g: (few[g] + 1) * each[g] for g in groups}  # bytes
    if memory < sum(least.values()):
        raise ValueError(f"kv_memory {memory:,} bytes: {needs(few, each, block_size)}")
    order = sorted(groups, key=lambda g: (g.grows, g.kind != "linear"))
    found, left = {}, memory
    for at, spec in enumerate(order):
        later = order[at + 1 :]
        if spec.grows:
            room = Room(left // sum(each[g] for g in [spec, *later]) - 1)
            found |= dict.fromkeys([spec, *later], room)
            break
        share = max(left // 2, least[spec]) if later else left
        blocks = min(share, left - sum(least[g] for g in later)) // each[spec] - 1
        if spec.kind == "linear":
            max_running = min(max_running, blocks // 2)
            blocks = min(blocks, 4 * max_running)
        else:
            blocks = min(blocks, max_running * few[spec] + -(-budget // block_size))
        found[spec] = Room(blocks, spec.window, spec.kind == "linear")
        left -= (blocks + 1) * each[spec]
    return [found[g] for g in groups], max_running


def needs(few: dict, each: dict, block_size: int) -> str:
    """What a request needs of each cache group: blocks, and bytes of one of them."""
    lines = []
    for spec, count in few.items():
        what = "states" if spec.kind == "linear" else f"blocks of {block_size} tokens"
        lines.append(f"{spec.kind} layers {count + 1} {what}, {each[spec]:,} bytes each")
    total = sum((count + 1) * each[spec] for spec, count in few.items())
    return f"a request needs {total:,}: of {'; of '.join(lines)}"


def least_blocks(spec: LayerSpec, block_size: int) -> int:
    """Blocks without which no request runs: of a window, it and one at either end."""
    if spec.kind == "linear":
        return 2
    return 1 if spec.grows else -(-spec.window // block_size) + 2


# ---------------------------------------------------------------- the experiment


@dataclass(eq=False)
class Holder:
    """What the manager needs to know of a request."""

    tokens: list[int]
    samples: int = 1
    computed: int = 0
    most: int = 0
    salt: str | None = None
    draft: list[int] = field(default_factory=list)
    tables: list[list[int]] = field(default_factory=list)


class Drawing:
    """A pool of 12 blocks and those who hold them; a line an event."""

    def __init__(self, size: int):
        self.manager = BlockManager(12, size)
        self.names: dict[Holder, str] = {}
        self.lines: list[str] = []

    def show(self, event: str):
        self.manager.check(list(self.names))
        holders = [[] for _ in range(self.manager.blocks + 1)]
        for request, name in self.names.items():
            for block in request.tables[0]:
                holders[block].append(name)
        free = set(self.manager.pools[0].free)
        marks = ["".join(h) or (".*"[b not in free]) for b, h in enumerate(holders)]
        self.lines.append(f"{event:<50}" + "".join(f"{mark:>4}" for mark in marks[1:]))

    def arrive(self, name: str, tokens: list[int], samples: int = 1) -> Holder:
        request = Holder(tokens, samples)
        request.tables, request.computed = self.manager.match(tokens, None)
        found = request.computed
        self.names[request] = name
        self.compute(request)
        self.show(f"{name}: {len(tokens)} tokens, {found} of them found")
        return request

    def compute(self, request: Holder):
        grown = self.manager.grow(request, len(request.tokens) - request.computed)
        assert grown, "the pool is too small for the picture"
        request.computed = len(request.tokens)
        self.manager.commit(request)

    def leave(self, request: Holder, event: str):
        self.manager.release(request)
        self.show(f"{self.names.pop(request)} {event}")


def picture(size: int) -> str:
    """The pool, a line an event, and what is left empty in it."""
    draw = Drawing(size)
    shared = list(range(2 * size))  # the prompt that A, B and D begin with
    a = draw.arrive("A", shared + list(range(100, 100 + size // 2)))
    b = draw.arrive("B", shared + list(range(200, 200 + size)))
    a.tokens += list(range(300, 300 + size))
    draw.compute(a)
    draw.show(f"A has generated {size}: one block more")
    c = draw.arrive("C", list(range(400, 400 + size + size // 4)), samples=2)
    child = Holder(list(c.tokens), computed=c.computed)
    draw.manager.fork(c, child)
    c.samples = 1
    draw.names[child] = "c"
    draw.show("C's second sample c forks, its last block copied")
    draw.leave(b, "ends: what it filled can be found again")
    draw.leave(a, "ends")
    draw.arrive("D", shared + list(range(500, 500 + size)))
    draw.leave(c, "ends: c still holds their full block")
    before = draw.manager.cached
    draw.arrive("E", list(range(600, 600 + 6 * size)))
    draw.lines[-1] += f"   {before - draw.manager.cached} evicted"
    head = [
        f"a pool of 12 blocks of {size} tokens; a letter: who holds the block, *: cached, .: free",
        "",
        f"{'':<50}" + "".join(f"{block:>4}" for block in range(1, 13)),
    ]
    return "\n".join([*head, *draw.lines, "", *waste(size)])


def waste(size: int) -> list[str]:
    """Blocks on demand against blocks reserved for the longest answer, for the same requests."""
    import random

    draw = random.Random(0)
    requests = [(draw.randint(32, 256), draw.randint(16, 256)) for _ in range(1000)]
    lines = [
        "Requests of 32 to 256 prompt tokens that generate 16 to 256 and asked for up to 512,",
        f"all at their longest, in a pool of {32768 // size:,} blocks (32,768 tokens):",
    ]
    needs = {
        "block by block": [prompt + done for prompt, done in requests],
        "reserved": [prompt + 512 for prompt, _ in requests],
    }
    for name, tokens in needs.items():
        blocks = [-(-count // size) for count in tokens]
        together = fits = 0
        while together + blocks[fits] <= 32768 // size:
            together += blocks[fits]
            fits += 1
        used = sum(prompt + done for prompt, done in requests[:fits])
        share = used / (together * size)
        bar = "#" * round(40 * share)
        lines.append(
            f"  {name:<15}{fits:>4} at once, {share:>4.0%} of their blocks used  {bar:.<40}"
        )
    return lines


def kinds(size: int) -> str:
    """The same requests in a group that keeps all, one with a window, and one of states."""
    window = 2 * size + size // 2
    rooms = [Room(60), Room(40, window), Room(24, state=True)]
    manager, lines = BlockManager(rooms, size), []
    shared, part = list(range(2 * size + size // 2)), 4 * size

    def show(event: str, request: Holder):
        cells = [" ".join(str(block or ".") for block in table) for table in request.tables]
        cells = [f"{cell:<30}" for cell in cells[:2]] + cells[2:]
        lines.append(f"{event:<27}{request.computed:>4}  {''.join(cells)}".rstrip())
        manager.check([request])

    def serve(name: str, tokens: list[int], answer: int, limit: int = 4 * size):
        request = Holder(tokens)
        request.tables, request.computed = manager.match(tokens, None)
        show(f"{name}: {len(tokens)} tokens", request)
        while len(tokens) > request.computed:
            n = manager.limit(request, min(len(tokens) - request.computed, limit))
            grown = manager.grow(request, n)
            assert grown, "the pools are too small for the picture"
            request.computed += n
            manager.commit(request)
            chunk = n > 1 or len(tokens) > request.computed
            if chunk or answer == 0:
                show(f"  computes {n}" if chunk else f"  has generated {size}", request)
            if len(tokens) == request.computed and answer:
                tokens.append(1000 + answer)
                answer -= 1
        manager.release(request)
        return tokens

    first = serve("A", shared + list(range(100, 100 + part)), answer=size)
    serve("B begins like A", shared + list(range(200, 200 + part)), 0)
    serve("C does too", shared + list(range(300, 300 + part)), 0)
    serve("A's next turn", first + list(range(400, 400 + size)), 0)
    head = [
        f"blocks of {size} tokens, chunks of at most {4 * size}; a window of {window} tokens",
        "",
        f"{'':<23}computed  {'full':<30}{'window, .: given back':<30}state",
    ]
    tail = [
        "",
        "A match is as long as all three groups can go on from: B finds A's blocks but no state",
        "where they part, begins anew, and leaves one there for C. The next turn of a chat goes on",
        "from the last whole block of the answer.",
    ]
    return "\n".join([*head, *lines, *tail])


if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser(description="Draw a pool of blocks as requests come and go.")
    parser.add_argument("--block-size", type=int, default=16, help="tokens a block (default 16)")
    parser.add_argument("--kinds", action="store_true", help="windows and states beside it")
    args = parser.parse_args()
    if args.block_size not in BLOCK_SIZES:
        parser.error(f"--block-size {args.block_size} is not one of {BLOCK_SIZES}")
    print(kinds(args.block_size) if args.kinds else picture(args.block_size))
