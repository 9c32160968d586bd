"""Paged attention: the cache as fixed blocks, handed out as requests grow, shared where equal.

The idea      A contiguous cache must keep room for the longest answer a request may get, and
              most of it stays empty. Here the cache is a pool of blocks of S tokens; a request
              has a block table, as a process has a page table, and takes the next block when
              its last one is full. Blocks are counted, so several requests can hold the same
              one: the samples of a prompt share it, and a block that is full is remembered by
              what is in it and before it, so that the next prompt that begins the same way
              finds it.

The data      tables   A  5 1 7        A's tokens 0..15 are in block 5, 16..31 in block 1, ...
                       B  5 1 2        B began like A: references of 5 and 1 are 2
              pool     | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |     block 0 is never handed out
                        null AB  B       c   AB      A       c: cached, in no table
              index    hash(salt, ids 0..15) -> 5    hash(that, ids 16..31) -> 1    ...
              free     3 6             take: a free block, else evict the cached one whose
                                       turn it is (least recently used, tails before heads)

Invariants    1. free + held + cached == blocks; no block is in two of them
              2. a block's references are the tables that hold it
              3. no table holds a free block
              4. the index holds full blocks of committed ids only, each under its own prefix
              5. a block that several tables hold is never written: a match ends before the
                 last token, and the one block that is not full is copied at a fork
              6. a match is by ids: two prefixes with the same hash are a miss

Units         blocks; S tokens a block; lengths and positions in tokens.
Articles      "Paged Attention: Virtual Memory for the KV Cache" and
              "Prefix Caching: When It Pays and How to Design Prompts for It"
Try           python paged.py                   a pool before and after sharing, forks, eviction
              python paged.py --block-size 8    smaller blocks: less waste, longer tables
              python tests/mutations.py paged.py   change it: known bugs, each with its test
Imports       kernels, kv_cache.
"""

import heapq
from dataclasses import dataclass, field

import torch
from torch import Tensor

import kernels
from kv_cache import LayerSpec, bytes_per_token, rows

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

    def match(self, tokens: list[int], salt: str | None, size: int) -> list[int]:
        """Blocks of the longest known prefix, short of the last token: there is always a row to
        sample from, and the request writes into a block of its own."""
        blocks, parent = [], None
        for start in range(0, (len(tokens) - 1) // size * size, size):
            parent = self._find(parent, salt, tuple(tokens[start : start + size]))
            if parent is None:
                break
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
        None: another prefix has the same key."""
        key = chain(parent, salt, ids)
        if key not in self.entries:
            entry = Entry(key, parent, salt, ids, block, parent.depth + 1 if parent else 0)
            self.entries[key] = self.of_block[block] = entry
        return self._find(parent, salt, ids)

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

    def forget(self, block: int):
        """A block that is held is not to be found any more."""
        if block in self.of_block:
            del self.entries[self.of_block.pop(block).key]

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


class Pool:
    """The blocks 1..blocks of one cache group: free, held by tables, or cached."""

    def __init__(self, blocks: int, caching: bool):
        self.blocks = blocks
        self.caching = caching
        self.repair([])

    def repair(self, tables: list[list[int]]):
        """Begin anew from the tables: nothing is cached, what no table holds is free."""
        self.references = [0] * (self.blocks + 1)
        for table in tables:
            for block in table:
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


class BlockManager:
    """Who holds which blocks; of no tensor, and of a request only its integers.

    blocks      in each cache group's pool, of block_size tokens (a power of two, 8 to 256)
    groups      how many pools, each with a table in every request
    prefix_cache   whether full blocks can be found again
    reserve     take the blocks for the longest possible answer at once, as a contiguous cache
                does: nothing is ever preempted, and most of it stays empty
    """

    def __init__(self, blocks: int, block_size=16, groups=1, prefix_cache=True, reserve=False):
        if block_size not in BLOCK_SIZES:
            raise ValueError(f"block_size {block_size} is not a power of two from 8 to 256")
        if blocks < 1:
            raise ValueError(f"a cache of {blocks} blocks holds nothing; at least 1 is needed")
        self.blocks, self.block_size, self.reserve = blocks, block_size, reserve
        self.pools = [Pool(blocks, prefix_cache) for _ in range(groups)]
        self.chains: dict[object, list] = {}  # request -> per group (blocks entered, last Entry)
        self.clock = 0

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _demand(self, request, tokens: int) -> int:
        """Blocks a table needs for `tokens` tokens; at the end of its prompt, or in a
        reservation, those of its samples too: they share what is full and nothing else."""
        blocks = self._blocks(max(tokens, request.most) if self.reserve else tokens)
        if request.samples > 1 and (self.reserve or tokens >= len(request.tokens)):
            full = len(request.tokens) // self.block_size
            blocks = full + request.samples * (blocks - full)
        return blocks

    def door(self, request):
        """ValueError if the request cannot run even alone."""
        need = max(self._demand(request, len(request.tokens)), self._blocks(request.most))
        if need > self.blocks:
            how = "reserves" if self.reserve else "needs"
            raise ValueError(
                f"the request {how} {need:,} blocks of {self.block_size} tokens;"
                f" the cache has {self.blocks:,}"
            )

    def match(self, tokens: list[int], salt: str | None) -> tuple[list[list[int]], int]:
        """Take the longest cached prefix of some tokens: a table for each group, and how many
        tokens they hold. Whoever asks holds the blocks, and must release them.

        At most (len - 1) // S blocks: of 32 tokens with S = 16 one block, of 33 two.
        """
        found = [pool.index.match(tokens, salt, self.block_size) for pool in self.pools]
        count = min(map(len, found))
        tables = [blocks[:count] for blocks in found]
        for pool, table in zip(self.pools, tables):
            for block in table:
                pool.hold(block)
        return tables, count * self.block_size

    def limit(self, request, n: int) -> int:
        """Where a chunk must end; here anywhere."""
        return n

    def grow(self, request, n: int) -> bool:
        """Make sure every group's table has room for n more tokens, or leave all as they are."""
        request.tables = request.tables or [[] for _ in self.pools]
        needed = self._demand(request, request.computed + n)
        missing = [needed - len(table) for table in request.tables]
        if any(more > pool.available for more, pool in zip(missing, self.pools)):
            return False
        for more, pool, table in zip(missing, self.pools, request.tables):
            for _ in range(more):
                table.append(pool.take())
        return True

    def fork(self, parent, child):
        """Share the prompt's full blocks; what `grow` took for the child it takes over."""
        full = len(parent.tokens) // self.block_size
        for pool, table in zip(self.pools, parent.tables):
            own = (len(table) - full) // parent.samples
            shared = table[:full]
            for block in shared:
                pool.hold(block)
            child.tables.append(shared + [table.pop() for _ in range(own)])

    def commit(self, request):
        """Enter in the index what the request has filled with committed ids."""
        size, full = self.block_size, request.computed // self.block_size
        entered = self.chains.setdefault(request, [(0, None)] * len(self.pools))
        for group, pool in enumerate(self.pools):
            count, last = entered[group]
            for i in range(count, full if pool.caching else 0):
                if i and last is None:
                    break  # its prefix has the key of another one
                ids = tuple(request.tokens[i * size : (i + 1) * size])
                last = pool.index.insert(last, request.salt, ids, request.tables[group][i])
            entered[group] = full, last

    def forget(self, request):
        """Take what the request holds out of the index: something in it is wrong."""
        for pool, table in zip(self.pools, request.tables):
            for block in table:
                pool.index.forget(block)

    def release(self, request):
        """Give all blocks back, tails first; the full ones stay cached."""
        self.clock += 1
        self.chains.pop(request, None)
        for pool, table in zip(self.pools, request.tables):
            while table:
                pool.let_go(table.pop(), self.clock)
        request.tables = []

    def repair(self, running):
        """After an interruption between two lines the tables are the truth."""
        self.chains.clear()
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
            count = [0] * (self.blocks + 1)
            for table in tables:
                for block in table:
                    count[block] += 1
            index = pool.index
            idle = {entry.block for entry in index.entries.values() if entry.idle}
            held = {block for block, references in enumerate(count) if references}
            every = sorted([*pool.free, *idle, *held])
            assert every == list(range(1, self.blocks + 1)), "1: free + held + cached != blocks"
            assert count == pool.references, "2: references differ from the tables"
            assert index.idle == len(idle), f"1: {index.idle} idle, but {len(idle)} are"
            assert len(index.entries) == len(index.of_block), "4: a block entered twice"
            for request in running:
                self._check_entries(request, group)

    def _check_entries(self, request, group: int):
        size = self.block_size
        for i, block in enumerate(request.tables[group] if request.tables else ()):
            entry = self.pools[group].index.of_block.get(block)
            if entry is not None:
                ids = tuple(request.tokens[i * size : (i + 1) * size])
                assert entry.ids == ids and entry.depth == i, f"4: block {block} is not {ids}"
                assert (i + 1) * size <= request.computed, f"4: block {block} is not full"


BLOCK_SIZES = (8, 16, 32, 64, 128, 256)


# ---------------------------------------------------------------- what is in them: tensors


class PagedStep:
    """What the model sees of a paged cache in one forward pass: see kv_cache.Step."""

    def __init__(self, cache: "PagedCache", tokens, positions, sample_rows, views, padded=None):
        self.cache = cache
        self.tokens = tokens
        self.positions = positions
        self.sample_rows = sample_rows
        self.views = views  # one for each cache group
        self.padded = padded  # rows, of a decode step that was padded to one of the cache's sizes

    def store(self, layer: int, k: Tensor, v: Tensor):
        """Write a layer's keys and values of this step's rows: k, v (T, G, D)."""
        view = self.views[self.cache.group_of[layer]]
        kernels.store_kv(k, v, *self.cache.pools[layer], view)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
        """Store k, v (T, G, D), then attend with q (T, H, D): (T, H, D)."""
        self.store(layer, k, v)
        view = self.views[self.cache.group_of[layer]]
        return kernels.attention(q, *self.cache.pools[layer], view, causal)


class PagedCache:
    """The pools' tensors: keys and values (2, blocks + 1, S, G, D) for each layer.

    Tensors only: who holds which block is for `BlockManager` to know. Layers with the same
    spec are one cache group: they share block tables, and a step's View.

    budget, max_running: most rows a step, most requests at once; max_len: most tokens of one
    (default: the pool's); sizes: rows that decode steps are padded to, ascending.
    """

    def __init__(
        self,
        specs: list[LayerSpec],
        blocks: int,
        block_size: int,
        budget: int,
        max_running: int,
        device="cpu",
        dtype=torch.float32,
        max_len: int | None = None,
        sizes: tuple[int, ...] = (),
    ):
        kinds = {spec.kind for spec in specs} - {"full"}
        if kinds:
            raise ValueError(f"the paged cache holds full attention only, not {kinds}")
        self.block_size, self.sizes = block_size, sizes
        self.device, self.dtype = torch.device(device), dtype
        self.groups = list(dict.fromkeys(specs))
        self.group_of = [self.groups.index(spec) for spec in specs]
        shape = 2, blocks + 1, block_size
        self.pools = [
            torch.empty(*shape, spec.heads, spec.dim, dtype=dtype, device=device) for spec in specs
        ]
        self.nbytes = sum(pool.numel() * pool.element_size() for pool in self.pools)
        self.tokens, self.positions, self.sample_rows = (
            kernels.Buffer(size, self.device) for size in (budget, budget, budget + max_running)
        )
        self.uploaded = torch.cuda.Event() if self.device.type == "cuda" else None
        width = blocks if max_len is None else min(blocks, -(-max_len // block_size))
        self.layouts = [
            kernels.Layout(budget, max_running, width, block_size, self.device, dtype)
            for _ in self.groups
        ]

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
            padded,
        )
        if self.uploaded is not None:
            self.uploaded.record()
        return step

    def copy(self, parent, child, length: int):
        """A fork at `length` tokens: the child's copy of the block that is not full."""
        full = length // self.block_size
        if length % self.block_size:
            for layer, group in enumerate(self.group_of):
                pool = self.pools[layer]
                pool[:, child.tables[group][full]] = pool[:, parent.tables[group][full]]

    def commit(self, step: PagedStep, kept):
        """Nothing to do: rejected rows lie beyond `computed`, and length decides."""


def block_bytes(specs: list[LayerSpec], block_size: int, element_bytes: int) -> int:
    """Bytes of one block id: its keys and values in all layers.

    Example: SmolLM2-135M in bfloat16, 23,040 bytes a token: 368,640 for 16 tokens.
    """
    return bytes_per_token(specs, element_bytes) * block_size


# ---------------------------------------------------------------- the experiment


@dataclass(eq=False)
class Holder:
    """What the manager needs to know of a request."""

    tokens: list[int]
    samples: int = 1
    computed: int = 0
    most: int = 0
    salt: str | None = None
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


if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser(description="Draw a pool of blocks as requests come and go.")
    parser.add_argument("--block-size", type=int, default=16, help="tokens a block (default 16)")
    args = parser.parse_args()
    if args.block_size not in BLOCK_SIZES:
        parser.error(f"--block-size {args.block_size} is not one of {BLOCK_SIZES}")
    print(picture(args.block_size))
