"""kernels.py in Triton: every kernel against its PyTorch body, or against float64.

On a GPU as it is:      python -m pytest tests/triton_cases.py          (and -m slow: the rest)
in the interpreter:     the same with TRITON_INTERPRET=1, as test_kernels.py runs it

What a kernel reads and writes lies in the middle of larger tensors full of garbage, NaN or huge:
what it reads beyond its own shows in its results, what it writes there is found at the end.
"""

import itertools
import math
import random

import pytest
import torch

import kernels
import sample
from sample import Row, SamplingParams

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
assert kernels.on_triton(torch.empty(0, device=DEVICE)), "no GPU: set TRITON_INTERPRET=1"
BFLOAT16 = 2.0**-7 if kernels.INTERPRETED else 2.0**-8  # the interpreter cuts its last bit off
# Attention rounds twice: the weights that multiply values, and the result. Here they stay float32.
ROUNDINGS = 1 if kernels.INTERPRETED else 2
HALF_STEP = {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: BFLOAT16}  # relative
DTYPES = list(HALF_STEP)
MARGIN = 4096  # elements around each tensor

torch.set_num_threads(1)


# ---------------------------------------------------------------- helpers


class Guard:
    """Stands for torch in kernels.py: what it allocates has garbage around it and in it."""

    def __init__(self):
        self.wholes: list[tuple[torch.Tensor, torch.Tensor]] = []  # buffer, its garbage
        self.inputs: list[tuple[torch.Tensor, torch.Tensor]] = []  # tensor, what was in it

    def __getattr__(self, name):
        return getattr(torch, name)

    def empty(self, *shape, dtype=torch.float32, device=DEVICE, garbage=None, pin_memory=None):
        if pin_memory is not None:  # what is on its way to the device
            return torch.empty(*shape, dtype=dtype, pin_memory=pin_memory)
        shape = shape[0] if isinstance(shape[0], (tuple, torch.Size)) else shape
        if garbage is None:
            garbage = math.nan if dtype.is_floating_point else 2**30
        count = math.prod(shape)
        whole = torch.full((count + 2 * MARGIN,), garbage, dtype=dtype, device=device)
        self.wholes.append((whole, whole[:MARGIN].clone()))
        return whole[MARGIN : MARGIN + count].view(shape)

    def empty_like(self, x):
        return self.empty(x.shape, dtype=x.dtype, device=x.device)

    def around(self, x, garbage=None):
        """An input, surrounded; nobody may write it."""
        found = self.empty(x.shape, dtype=x.dtype, garbage=garbage)
        found.copy_(x)
        self.inputs.append((found, x.to(DEVICE).clone()))
        return found

    def columns(self, x, before, after):
        """An input (T, heads, D) that is a slice of more heads, which are garbage."""
        T, heads, dim = x.shape
        whole = self.empty(T, before + heads + after, dim, dtype=x.dtype)
        found = whole[:, before : before + heads]
        found.copy_(x)
        return found

    def check(self):
        for whole, garbage in self.wholes:
            assert same_bits(whole[:MARGIN], garbage), "written before a tensor"
            assert same_bits(whole[-MARGIN:], garbage), "written after a tensor"
        for x, before in self.inputs:
            assert same_bits(x, before), "an input was written"


def same_bits(a, b):
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(integers), b.contiguous().view(integers))


@pytest.fixture(autouse=True)
def guard(monkeypatch):
    found = Guard()
    monkeypatch.setattr(kernels, "torch", found)
    yield found
    found.check()


def in_pytorch(call, *arguments):
    """What the PyTorch body gives."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "on_triton", lambda x: False)
        return call(*arguments)


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def rounded_once(found, exact, extra=1e-5):
    """found is `exact` rounded to found's type, but for float32's own errors."""
    error = (found.double() - exact.double()).abs()
    assert error.isfinite().all()
    return bool((error <= exact.double().abs() * HALF_STEP[found.dtype] + extra).all())


def pairwise(**factors):
    """Few cases in which any two values of two factors meet; those after the first that have
    every value once are slow."""
    draw = random.Random(0)
    pairs = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(factors, 2)
        for x in factors[a]
        for y in factors[b]
    }
    values = {(name, value) for name in factors for value in factors[name]}
    cases = []
    while pairs:
        tries = []
        for first, second in draw.choices(sorted(pairs, key=str), k=40):
            case = {name: draw.choice(options) for name, options in factors.items()}
            tries.append(case | dict((first, second)))
        case = max(tries, key=lambda c: len(set(itertools.combinations(c.items(), 2)) & pairs))
        pairs -= set(itertools.combinations(case.items(), 2))
        marks = [] if values else [pytest.mark.slow]
        values -= set(case.items())
        name = " ".join(str(value).removeprefix("torch.") for value in case.values())
        cases.append(pytest.param(case, marks=marks, id=name))
    return cases


# ---------------------------------------------------------------- attention


def mixture(name, size):
    """Rows and length of each request, and how many rows are added."""
    chunk = min(size, 20)
    return {
        "alone": ([(1, size + 1)], 0),
        "first": ([(1, 1)], 0),
        "edges": ([(1, size - 1), (1, size), (1, size + 1), (1, 1)], 0),
        "padded": ([(1, 2 * size), (1, 3)], 3),
        "prompts": ([(chunk - 1, chunk - 1), (chunk, chunk), (chunk + 1, chunk + 1)], 0),
        "chunks": ([(chunk, size), (3, size + 1), (chunk + 1, size + chunk + 1)], 0),
        "verified": ([(3, size + 1), (5, size + 3), (1, 2), (3, 3)], 0),
        "mixed": ([(1, 2 * size + 5), (chunk, chunk), (1, size), (4, size + 2), (1, 1)], 0),
    }[name]


def laid_out(spans, size, blocks, shared, padded=0, window=0):
    """Tables and the View of requests [(n, length)], in buffers with garbage behind them. Blocks
    that left the window are block 0."""
    order = list(range(1, blocks - 1))  # 0 and the last are nobody's
    random.Random(size).shuffle(order)
    tables, head = [], [order.pop()]
    for n, length in spans:
        need = -(-length // size)
        if shared and need > 1:  # its first block is that of others too
            tables.append(head + [order.pop() for _ in range(need - 1)])
        else:
            tables.append([order.pop() for _ in range(need)])
        gone = max(length - n - window + 1, 0) // size if window else 0
        tables[-1][:gone] = [0] * gone
    count, width = sum(n for n, _ in spans), max(map(len, tables))
    layout = kernels.Layout(
        count + padded + 5, len(spans) + padded + 3, width + 2, size, DEVICE, torch.float32, window
    )
    layout.tables.tensor.fill_(blocks - 1)
    layout.spans.tensor.copy_(torch.tensor([0, 1, 3, 4, 0] * (len(spans) + padded + 3)))
    layout.slots.tensor.fill_(1)
    rows = list(itertools.accumulate([n for n, _ in spans], initial=0))
    whole = [(row, n, length - n) for row, (n, length) in zip(rows, spans)]
    return tables, layout.view(tables, whole, padded)


def places(table, length, size):
    return [table[p // size] * size + p % size for p in range(length)]


def exact(q, k, v, causal, window=0, scale=None, chosen=None):
    """float64 attention of the last rows of a request, q (n, H, D), k, v (N, G, D); and for
    each row and head the largest value that it sees. chosen: (n, N), what it sees of that."""
    n, heads, dim = q.shape
    q, k, v = (x.double().cpu() for x in (q, k, v))
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("nhd,khd->nhk", q, k) * (scale or dim**-0.5)
    seen = torch.ones(n, len(k), dtype=torch.bool).tril(len(k) - n if causal else len(k))
    seen = seen.triu(len(k) - n - window + 1) if window else seen
    seen = (seen if chosen is None else seen & chosen.cpu())[:, None]
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    largest = (v.abs().amax(-1).T[None] * seen).amax(-1)  # (n, H)
    return torch.einsum("nhk,khd->nhd", weights, v), largest


@pytest.mark.parametrize("case", pairwise(
    mix=["alone", "first", "edges", "padded", "prompts", "chunks", "verified", "mixed"],
    heads=[(1, 1), (2, 2), (3, 1), (6, 2), (5, 1), (8, 1), (16, 2)],
    dim=[8, 48, 64, 80, 96, 128, 256],
    size=[8, 16, 32, 64, 128, 256],
    dtype=[torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available(),
    splits=[1, 2, 4, 8, 16],
    causal=[True, False],
    shared=[True, False],
    garbage=[math.nan, 6e4],
))  # fmt: skip
def test_attention_is_that_of_float64(case, guard, monkeypatch):
    attention_case(guard, monkeypatch, **case)


def attention_case(guard, patch, mix, heads, dim, size, dtype, splits, causal, shared, garbage):
    patch.setattr(kernels, "key_splits", lambda programs, block_m: splits)
    (H, G), (spans, padded) = heads, mixture(mix, size)
    blocks = 3 + sum(-(-length // size) for _, length in spans) + 1
    tables, view = laid_out(spans, size, blocks, shared, padded)
    pools = []
    for seed in (1, 2):
        pool = torch.full((blocks, size, G, dim), garbage, dtype=dtype, device=DEVICE)
        for i, (table, (_, length)) in enumerate(zip(tables, spans)):
            content = randn(length, G, dim, seed=10 * i + seed, dtype=dtype)
            pool.flatten(0, 1)[places(table, length, size)] = content
        pools.append(guard.around(pool, garbage))
    count = sum(n for n, _ in spans)
    q = randn(count + padded, H, dim, dtype=dtype)
    q[count:] = garbage
    out = kernels.attention(guard.columns(q, 1, 2), *pools, view, causal)
    assert out.shape == q.shape and out.dtype == dtype
    assert out[count:].eq(0).all() and len(out) == count + padded, "padded rows are not 0"
    row = 0
    for table, (n, length) in zip(tables, spans):
        k, v = (pool.flatten(0, 1)[places(table, length, size)] for pool in pools)
        wanted, largest = exact(q[row : row + n], k, v, causal)
        error = (out[row : row + n].double().cpu() - wanted).abs().amax(-1)
        bound = 1e-5 if dtype == torch.float32 else ROUNDINGS * HALF_STEP[dtype] * largest
        assert (error <= bound).all(), f"{error.max():.2g} off, rows {row} to {row + n}"
        row += n


SMALL = {
    "heads": (2, 1), "dim": 8, "size": 8, "dtype": torch.float32, "shared": False,
    "garbage": math.nan,
}  # fmt: skip


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("mix, causal", [("verified", True), ("padded", True), ("edges", False)])
def test_attention_of_a_few_rows(mix, causal, splits, guard, monkeypatch):
    """Small enough for the mutations."""
    attention_case(guard, monkeypatch, mix=mix, causal=causal, splits=splits, **SMALL)


@pytest.mark.parametrize("length", [63, 64, 65, 129, 257])
@pytest.mark.parametrize("splits", [4, pytest.param(16, marks=pytest.mark.slow)])
def test_parts_of_the_keys_have_each_key_once_and_may_be_empty(length, splits, guard, monkeypatch):
    monkeypatch.setattr(kernels, "key_splits", lambda programs, block_m: splits)
    tables, view = laid_out([(1, length), (1, 1)], 16, 30, False)
    keys, values = (guard.around(randn(30, 16, 1, 64, seed=seed)) for seed in (1, 2))
    q = guard.around(randn(2, 1, 64))
    found = kernels.attention(q, keys, values, view)
    for row, used in ((0, length), (1, 1)):
        at = places(tables[row], used, 16)
        k, v = keys.flatten(0, 1)[at], values.flatten(0, 1)[at]
        wanted, _ = exact(q[row : row + 1], k, v, True)
        assert rounded_once(found[row : row + 1].cpu(), wanted)


def test_a_line_that_sees_nothing_of_a_part_takes_nothing_of_it(guard, monkeypatch):
    """Rows at 40 to 71 are a tile, and keys from 64 on a part: rows before 64 see none of it."""
    monkeypatch.setattr(kernels, "key_splits", lambda programs, block_m: 2)
    tables, view = laid_out([(40, 80)], 16, 20, False)
    keys, values = (guard.around(randn(20, 16, 1, 8, seed=seed)) for seed in (1, 2))
    q = guard.around(randn(40, 1, 8))
    found = kernels.attention(q, keys, values, view)
    at = places(tables[0], 80, 16)
    k, v = keys.flatten(0, 1)[at], values.flatten(0, 1)[at]
    assert rounded_once(found.cpu(), exact(q, k, v, True)[0])


HALVES = [torch.float16] + [torch.bfloat16] * torch.cuda.is_available()


@pytest.mark.parametrize("case", pairwise(
    mix=["alone", "edges", "padded", "chunks", "verified", "mixed"],
    window=["1", "S - 1", "S", "S + 1", "3 S", "500", "none"],
    heads=[(2, 2), (6, 2), (5, 1)],
    dims=[(16, 16), (24, 16), (16, 12)],
    size=[8, 16],
    dtype=[torch.float32, *HALVES],
    splits=[1, 4],
))  # fmt: skip
def test_attention_in_windows_and_over_latents_is_that_of_float64(case, guard, monkeypatch):
    window_case(guard, monkeypatch, **case)


def window_case(guard, patch, mix, window, heads, dims, size, dtype, splits):
    """Everything but what the rows see is NaN, block 0 too."""
    patch.setattr(kernels, "key_splits", lambda programs, block_m: splits)
    windows = {"S - 1": size - 1, "S": size, "S + 1": size + 1, "3 S": 3 * size, "none": 0}
    window = windows[window] if window in windows else int(window)
    (H, G), (spans, padded), (dim, short) = heads, mixture(mix, size), dims
    spans = [(n, length + 2 * size) for n, length in spans]
    blocks = 4 + sum(-(-length // size) for _, length in spans)
    tables, view = laid_out(spans, size, blocks, False, padded, window)
    pools = [torch.full((blocks, size, G, dim), math.nan, dtype=dtype) for _ in "kv"]
    for i, (table, (n, length)) in enumerate(zip(tables, spans)):
        at = places(table, length, size)[kernels.first_seen(length - n, window) :]
        for pool, seed in zip(pools, (1, 2)):
            pool.flatten(0, 1)[at] = randn(len(at), G, dim, seed=10 * i + seed, dtype=dtype).cpu()
    keys, values = (guard.around(pool, math.nan) for pool in pools)
    values = keys[..., :short] if short < dim else values
    q = randn(sum(n for n, _ in spans) + padded, H, dim, dtype=dtype)
    out = kernels.attention(guard.columns(q, 1, 2), keys, values, view, True, window, 0.3)
    assert out.shape == (*q.shape[:2], short)
    row = 0
    for table, (n, length) in zip(tables, spans):
        at = places(table, length, size)[kernels.first_seen(length - n, window) :]
        k, v = (pool.flatten(0, 1)[at] for pool in (keys, values))
        wanted, largest = exact(q[row : row + n], k, v, True, window, 0.3)
        error = (out[row : row + n].double().cpu() - wanted).abs().amax(-1)
        bound = 1e-5 if dtype == torch.float32 else ROUNDINGS * HALF_STEP[dtype] * largest
        assert (error <= bound).all(), f"{error.max():.2g} off, rows {row} to {row + n}"
        row += n
    assert out[row:].eq(0).all(), "padded rows are not 0"


@pytest.mark.parametrize("mix, splits", [("verified", 1), ("verified", 4), ("padded", 4)])
@pytest.mark.parametrize("window, dims", [("S", (16, 16)), ("S + 1", (24, 16)), ("none", (16, 12))])
def test_windows_of_a_few_rows(window, mix, dims, splits, guard, monkeypatch):
    """Small enough for the mutations."""
    case = {"heads": (3, 1), "dims": dims, "size": 8, "dtype": torch.float32}
    window_case(guard, monkeypatch, mix=mix, window=window, splits=splits, **case)


@pytest.mark.parametrize("H", [3, 20, pytest.param(128, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mix", ["padded", "verified"])
def test_heads_that_share_a_key_may_be_more_than_a_tile_has(H, mix, guard, monkeypatch):
    case = {"heads": (H, 1), "dims": (24, 16), "size": 8, "dtype": torch.float32}
    window_case(guard, monkeypatch, mix=mix, window="none", splits=1, **case)


@pytest.mark.parametrize("mix, top", [
    ("verified", 1), ("verified", 5), ("padded", 5), ("padded", 16), ("verified", 200),
])  # fmt: skip
def test_sparse_attention_reads_what_is_chosen(mix, top, guard):
    sparse_case(guard, mix, top)


@pytest.mark.parametrize("H, Hi, dims, dtype", [
    (20, 1, (24, 16), torch.float32), (1, 70, (16, 12), torch.float32),
    *[(3, 4, (16, 12), dtype) for dtype in HALVES],
])  # fmt: skip
def test_sparse_attention_of_other_heads_and_types(H, Hi, dims, dtype, guard, monkeypatch):
    monkeypatch.setattr(kernels, "SCORES", 100)  # a row at a time
    sparse_case(guard, "mixed", 9, H, Hi, dims, dtype)


def sparse_case(guard, mix, top, H=3, Hi=2, dims=(24, 16), dtype=torch.float32):
    """Scores are small integers: many are equal, and many 0. NaN is where nobody has written."""
    size, (spans, padded), (dim, short) = 8, mixture(mix, 8), dims
    blocks = 4 + sum(-(-length // size) for _, length in spans)
    tables, view = laid_out(spans, size, blocks, False, padded)
    count = sum(n for n, _ in spans) + padded
    keys = torch.full((blocks, size, 1, dim), math.nan, dtype=dtype)
    index = torch.full((blocks, size, 4), math.nan, dtype=dtype)
    for i, (table, (_, length)) in enumerate(zip(tables, spans)):
        at = places(table, length, size)
        keys.flatten(0, 1)[at] = randn(length, 1, dim, seed=10 * i, dtype=dtype).cpu()
        index.flatten(0, 1)[at] = randn(length, 4, seed=10 * i + 1, dtype=dtype).round().cpu()
    keys, index = guard.around(keys, math.nan), guard.around(index, math.nan)
    q = randn(count, H, dim, dtype=dtype)
    index_q = guard.around(randn(count, Hi, 4, seed=98, dtype=dtype).round())
    weights = guard.around(randn(count, Hi, seed=97).round())
    columns = guard.columns(q, 1, 2)
    out = kernels.sparse_attention(
        columns, keys, keys[..., :short], view, index_q, index, weights, top, 0.3
    )
    assert out.shape == (count, H, short)
    row = 0
    for table, (n, length) in zip(tables, spans):
        at, rows = places(table, length, size), slice(row, row + n)
        k = keys.flatten(0, 1)[at]
        chosen = kernels.choose(index_q[rows], index.flatten(0, 1)[at], weights[rows], top)
        wanted, largest = exact(q[rows], k, k[..., :short], True, 0, 0.3, chosen)
        error = (out[rows].double().cpu() - wanted).abs().amax(-1)
        bound = 1e-5 if dtype == torch.float32 else ROUNDINGS * HALF_STEP[dtype] * largest
        assert (error <= bound).all(), f"{error.max():.2g} off, rows {row} to {row + n}"
        row += n
    assert out[row:].eq(0).all(), "padded rows are not 0"


def test_what_is_not_chosen_is_not_read(guard):
    """Index keys say which: of 30 tokens those at 3 and 17, the rest is NaN."""
    tables, view = laid_out([(1, 30)], 8, 8, False)
    at = places(tables[0], 30, 8)
    keys = torch.full((8, 8, 1, 24), math.nan)
    index = torch.zeros(8, 8, 4)
    for p in (3, 17):
        keys.flatten(0, 1)[at[p]], index.flatten(0, 1)[at[p]] = randn(1, 24, seed=p).cpu(), 1.0
    keys, index, ones = (guard.around(x) for x in (keys, index, torch.ones(1, 2, 4)))
    q = guard.around(randn(1, 3, 24))
    out = kernels.sparse_attention(q, keys, keys[..., :16], view, ones, index, ones[..., 0], 2)
    k = keys.flatten(0, 1)[[at[3], at[17]]]
    assert rounded_once(out.cpu(), exact(q, k, k[..., :16], False)[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_without_values_go_where_the_slots_say(dtype, guard):
    k, pool = randn(3, 2, 12, dtype=dtype), guard.empty(2, 8, 12, dtype=dtype)
    pool.fill_(7)
    before = pool.clone()
    slots = guard.around(torch.tensor([9, -1, 3]))
    kernels.store_kv(guard.columns(k, 1, 1)[:, :1], None, pool, None, kernels.View(slots, 2))
    before.flatten(0, 1)[[9, 3]] = k[[0, 2], 0]
    assert torch.equal(pool, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("G, dim", [(1, 8), (3, 48), (2, 64)])
def test_keys_and_values_go_where_the_slots_say_and_nowhere_else(dtype, G, dim, guard):
    k, v = randn(5, G, dim, seed=1, dtype=dtype), randn(5, G, dim, seed=2, dtype=dtype)
    pools = [guard.empty(4, 8, G, dim, dtype=dtype) for _ in "kv"]
    for pool in pools:
        pool.fill_(7)
    before = pools[0].clone()
    slots = guard.around(torch.tensor([9, -1, 31, 0, -1]))
    view = kernels.View(slots, 3)
    kernels.store_kv(guard.columns(k, 2, 1), guard.columns(v, 0, 3), *pools, view)
    for pool, new in zip(pools, (k, v)):
        wanted = before.clone()
        wanted.flatten(0, 1)[[9, 31, 0]] = new[[0, 2, 3]]
        assert torch.equal(pool, wanted)


# ---------------------------------------------------------------- a row at a time


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, width", [(1, 1), (5, 7), (3, 64), (2, 100), (1, 3000)])
def test_rms_norm_is_that_of_pytorch(rows, width, dtype, guard):
    x = guard.around(randn(rows, width, dtype=dtype))
    weight = guard.around(randn(width, seed=1, dtype=dtype))
    found = kernels.rms_norm(x, weight, 1e-5)
    assert found.dtype == dtype
    assert rounded_once(found, in_pytorch(kernels.rms_norm, x.float(), weight.float(), 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads, dim", [(1, 8), (3, 48), (5, 128)])
def test_rms_norm_of_heads_has_a_weight_for_each_and_takes_a_slice(heads, dim, dtype, guard):
    x = randn(3, heads, dim, dtype=dtype)
    weight = guard.around(randn(heads, dim, seed=1, dtype=dtype))
    found = kernels.rms_norm(guard.columns(x, 0, 2), weight, 1e-5)
    assert rounded_once(found, in_pytorch(kernels.rms_norm, x.float(), weight.float(), 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, width", [(1, 1), (4, 100), (3, 576)])
def test_add_norm_norms_the_rounded_sum(rows, width, dtype, guard):
    x, delta = (guard.around(randn(rows, width, seed=seed, dtype=dtype) * 3) for seed in (1, 2))
    weight = guard.around(randn(width, seed=3, dtype=dtype))
    total, normed = kernels.add_norm(x, delta, weight, 1e-5)
    assert normed.dtype == dtype and rounded_once(total, x.float() + delta.float(), 0)
    assert rounded_once(normed, in_pytorch(kernels.rms_norm, total.float(), weight.float(), 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads, dim", [(1, 2), (3, 8), (7, 48), (4, 80), (5, 128)])
def test_rope_is_that_of_pytorch_also_of_a_slice(heads, dim, dtype, guard):
    x = randn(4, heads, dim, dtype=dtype)
    frequencies = 1e4 ** -(torch.arange(dim // 2, device=DEVICE) / (dim // 2))
    positions = torch.tensor([0, 1, 77, 4095], device=DEVICE)
    tables = guard.around(kernels.rope_tables(positions, frequencies, 1.25))
    found = kernels.rope(guard.columns(x, 1, 2), tables)
    assert found.dtype == dtype and found.shape == x.shape
    assert rounded_once(found, in_pytorch(kernels.rope, x.float(), tables))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads, dim, turned", [(1, 4, 2), (3, 48, 16), (2, 256, 64), (5, 10, 8)])
def test_rope_of_a_part_of_each_head_copies_the_rest(heads, dim, turned, dtype, guard):
    x = randn(4, heads, dim, dtype=dtype)
    frequencies = 1e4 ** -(torch.arange(turned // 2, device=DEVICE) / (turned // 2))
    positions = torch.tensor([0, 1, 77, 4095], device=DEVICE)
    tables = guard.around(kernels.rope_tables(positions, frequencies, 1.25))
    found = kernels.rope(guard.columns(x, 1, 2), tables)
    assert found.dtype == dtype and found.shape == x.shape
    assert same_bits(found[..., turned:], x[..., turned:])
    assert rounded_once(found, in_pytorch(kernels.rope, x.float(), tables))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wide", [False, True])
def test_norms_of_rows_in_half_precision_take_a_weight_in_float32(wide, dtype, guard):
    """A norm that multiplies by 1 + w has 1 + w in float32."""
    weight = guard.around(1 + randn(48, seed=1) / 1000)
    x, delta = (guard.around(randn(3, 48, seed=seed, dtype=dtype)) for seed in (2, 3))
    if wide:
        x = x[:, None].expand(3, 2, 48).contiguous()
        weight = weight.expand(2, 48).contiguous()
        found, total = kernels.rms_norm(x, weight, 1e-5), x
    else:
        total, found = kernels.add_norm(x, delta, weight, 1e-5)
    assert found.dtype == dtype
    assert rounded_once(found, in_pytorch(kernels.rms_norm, total.float(), weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads, dim", [(1, 8), (3, 10), (5, 128)])
@pytest.mark.parametrize("wide", [False, True])
def test_the_gated_norm_is_that_of_pytorch_also_of_slices(heads, dim, wide, dtype, guard):
    x, gate = (randn(3, heads, dim, seed=seed, dtype=dtype) * 3 for seed in (1, 2))
    weight = guard.around(randn(dim, seed=3, dtype=torch.float32 if wide else dtype))
    found = kernels.gated_norm(guard.columns(x, 0, 1), guard.columns(gate, 2, 1), weight, 1e-5)
    assert found.dtype == dtype and found.shape == x.shape
    exact = in_pytorch(kernels.gated_norm, x.float(), gate.float(), weight.float(), 1e-5)
    assert rounded_once(found, exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["silu_mul", "gelu_mul"])
@pytest.mark.parametrize("rows, width", [(1, 1), (3, 100), (2, 1024), (2, 1025), (1, 2500)])
def test_gated_products_are_those_of_pytorch(name, rows, width, dtype, guard):
    x = guard.around(randn(rows, 2 * width, dtype=dtype) * 4)
    operation = getattr(kernels, name)
    found, wanted = operation(x), in_pytorch(operation, x.double())
    assert found.dtype == dtype and found.shape == (rows, width)
    error = (found.double() - wanted).abs()
    extra = {torch.float32: 1e-5, torch.float16: 2.0**-20}.get(dtype, 1e-5)  # fp16's denormals
    assert (error <= wanted.abs() * (2.1 * HALF_STEP[dtype] + 2e-6) + extra).all()


# ---------------------------------------------------------------- linear attention

MIXES = {  # rows of each request, tables, rows of padding; more than 8 rows are chunks of 16
    "decodes": ([1, 1, 1], [[3, 9], [0, 4], [3, 6]], 2),
    "verified": ([3, 1, 8, 2], [[3, 9], [0, 4], [5, 6], [2, 1]], 1),
    "chunks": ([9, 24, 16, 23], [[0, 1], [2, 3], [4, 5], [6, 7]], 0),
    "mixed": ([1, 25, 2, 1, 5, 20], [[3, 9], [0, 1], [2, 10], [3, 4], [5, 6], [7, 8]], 3),
}


def stated(counts, tables, padded):
    """The view of requests with those rows, in a buffer with garbage behind them, and their rows."""
    rows = list(itertools.accumulate(counts, initial=0))
    layout = kernels.StateLayout(len(counts) + padded + 3, DEVICE)
    layout.spans.tensor.copy_(torch.tensor([0, 1, 3, 4] * (len(counts) + padded + 3)))
    spans = [(row, n, 0) for row, n in zip(rows, counts)]
    return layout.view(tables, spans, padded), [slice(a, b) for a, b in itertools.pairwise(rows)]


def states(guard, tables, *shape, dtype=torch.float32):
    """A pool of 12 states that are garbage but for the first, which is 0, and those that are read."""
    pool = guard.empty(12, *shape, dtype=dtype)
    pool[0] = 0
    for read in {read for read, _ in tables} - {0}:
        pool[read] = randn(*shape, seed=read, dtype=dtype)
    return pool, pool.clone()


def padded_columns(guard, x, padded):
    """x (T, heads, dim) with more rows and columns, which are garbage."""
    rows = torch.full((padded, *x.shape[1:]), math.nan, dtype=x.dtype, device=DEVICE)
    return guard.columns(torch.cat((x, rows)), 1, 2)


@pytest.mark.parametrize("case", pairwise(
    mix=list(MIXES), shape=[(5, 4), (600, 2), (3, 1), (20, 7)], dtype=DTYPES
))  # fmt: skip
def test_conv_is_that_of_pytorch_for_each_request(case, guard):
    conv_case(guard, **case)


def test_conv_of_a_few_rows(guard):
    """Small enough for the mutations."""
    for mix in ("decodes", "verified"):
        conv_case(guard, mix, (3, 4), torch.float32)


def conv_case(guard, mix, shape, dtype):
    channels, inputs = shape
    counts, tables, padded = MIXES[mix]
    view, rows = stated(counts, tables, padded)
    x = padded_columns(guard, randn(sum(counts), 1, channels, seed=1, dtype=dtype), padded)
    weight = guard.around(randn(channels, inputs, dtype=dtype))
    pool, before = states(guard, tables, inputs - 1, channels, dtype=dtype)
    found = kernels.conv(x[:, 0], weight, pool, view)
    assert found.dtype == dtype and found[sum(counts) :].eq(0).all(), "padded rows are not 0"
    for request, (read, write) in zip(rows, tables):
        given = x[request, 0].float(), weight.float(), before[read].float()
        wanted, after = kernels.convolve(*given)
        assert rounded_once(found[request], wanted)
        assert torch.equal(pool[write].float(), after)
        before[write] = pool[write]
    assert same_bits(pool, before), "another state was written"


@pytest.mark.parametrize("mix, shape, decay, dtype", [
    ("decodes", (2, 4, 12, 40), 1.0, torch.float32),
    ("decodes", (1, 2, 128, 64), 0.01, torch.bfloat16),
    ("verified", (1, 3, 20, 10), 0.1, torch.float32),
    ("chunks", (1, 1, 8, 10), 1e-3, torch.float32),
    ("chunks", (1, 2, 128, 16), 0.1, torch.bfloat16),
    ("chunks", (1, 1, 16, 8), 1e3, torch.float16),
    ("mixed", (1, 2, 20, 40), 0.1, torch.float32),
    ("mixed", (2, 2, 16, 16), 10.0, torch.bfloat16),
])  # fmt: skip
def test_recur_is_the_delta_rule_of_each_request(mix, shape, decay, dtype, guard):
    (counts, tables, padded), (shared, heads, dk, dv) = MIXES[mix], shape
    view, rows = stated(counts, tables, padded)
    count = sum(counts)
    q, k = (randn(count, shared, dk, seed=seed, dtype=dtype) for seed in (1, 2))
    v, beta = randn(count, heads, dv, seed=3, dtype=dtype), randn(count, heads, seed=4).sigmoid()
    g = -(randn(count, heads, seed=5) * 2).exp() * decay
    again = torch.arange(count) % 3 == 2  # keys that come again, of rows with beta 0 or 1
    k[again], beta[again] = k[0].clone(), (beta[again] > 0.4).float()
    q, k, v = (padded_columns(guard, x, padded) for x in (q, k, v))
    g, beta = (padded_columns(guard, x[..., None], padded)[..., 0] for x in (g, beta))
    pool, before = states(guard, tables, heads, dk, dv)
    found = kernels.recur(q, k, v, g, beta, pool, view)
    assert found.dtype == dtype and found[count:].eq(0).all(), "padded rows are not 0"
    tensor_cores = not kernels.INTERPRETED and dtype != torch.float32 and view.most > kernels.FEW
    extra = 1e-2 if tensor_cores else 1e-5
    for request, (read, write) in zip(rows, tables):
        given = (x[request].float() for x in (q, k, v, g, beta))
        wanted, after = kernels.delta_rule(*given, before[read])
        assert rounded_once(found[request], wanted, extra)
        assert rounded_once(pool[write], after, extra)
        before[write] = pool[write]
    assert same_bits(pool, before), "another state was written"


def test_a_small_decay_counts_in_a_chunk_also_after_a_large_one(guard):
    """e^-1000000 and then of a third of an eighth: a float32 sum of these has no such steps."""
    q, k, v = (guard.around(randn(12, 1, 16, seed=seed)) for seed in (1, 2, 3))
    g, beta = torch.full((12, 1), -0.125 / 3), torch.ones(12, 1, device=DEVICE)
    g[0] = -1e6
    pool, before = states(guard, [[0, 1]], 1, 16, 16)
    view, _ = stated([12], [[0, 1]], 0)
    found = kernels.recur(q, k, v, g.to(DEVICE), beta, pool, view)
    wanted, after = kernels.delta_rule(q, k, v, g.to(DEVICE), beta, before[0])
    assert rounded_once(found, wanted) and rounded_once(pool[1], after)


class TensorCores:
    """Stands for triton.language in kernels.py: products see 10 bits after the point."""

    def __getattr__(self, name):
        return getattr(TRITON, name)

    def dot(self, a, b, acc=None):
        bits = (x.to(TRITON.int32, bitcast=True) & -(2**13) for x in (a, b))
        return TRITON.dot(*(x.to(TRITON.float32, bitcast=True) for x in bits), acc)


TRITON = kernels.tl


@pytest.mark.skipif(not kernels.INTERPRETED, reason="a GPU has them")
@pytest.mark.parametrize("alike", [0.0, 0.3, 1.0])
def test_chunks_in_tensor_cores_are_as_exact_as_bfloat16(alike, guard, monkeypatch):
    """Of keys that are alike, the inverse of a chunk has numbers that nearly cancel."""
    q, k, v = (randn(96, 1, 16, seed=seed, dtype=torch.bfloat16).float() for seed in (1, 2, 3))
    k = (alike * k[:1] + (1 - alike) * k).bfloat16().float()
    g, beta = torch.zeros(96, 1, device=DEVICE), torch.ones(96, 1, device=DEVICE)
    pool, before = states(guard, [[0, 1]], 1, 16, 16)
    wanted, after = kernels.delta_rule(q, k, v, g, beta, before[0])
    view, _ = stated([96], [[0, 1]], 0)
    monkeypatch.setattr(kernels, "language", TRITON, raising=False)  # which the interpreter needs
    monkeypatch.setattr(kernels, "tl", TensorCores())
    found = kernels.recur(q, k, v, g, beta, pool, view)
    for a, b in ((found, wanted), (pool[1], after)):
        assert 1e-5 < (a - b).norm() / b.norm() < 2.0**-9


def test_a_step_of_padding_alone_reads_and_writes_nothing(guard):
    """As graphs are recorded."""
    view, _ = stated([], [], 3)
    pool, before = states(guard, [], 2, 8, 8)
    nan = guard.empty(3, 2, 8)
    assert kernels.recur(nan, nan, nan, nan[..., 0], nan[..., 0], pool, view).eq(0).all()
    assert same_bits(pool, before)
    pool, before = states(guard, [], 3, 8)
    assert kernels.conv(nan[:, 0], randn(8, 4), pool, view).eq(0).all()
    assert same_bits(pool, before)


# ---------------------------------------------------------------- experts


def experts_case(guard, T, K, X, E, F, dtype=torch.float32, choice=None, bad=()):
    """Triton's result (T, E) and PyTorch's. choice: experts that are chosen from."""
    draw = torch.Generator().manual_seed(T + X)
    among = torch.tensor(choice if choice is not None else range(X))
    chosen = torch.stack([among[torch.randperm(len(among), generator=draw)[:K]] for _ in range(T)])
    chosen = guard.around(chosen)
    shares = guard.around(torch.rand(T, K, generator=draw).to(dtype))
    gate_up = [randn(2 * F, E, seed=i, dtype=dtype) / E**0.5 for i in range(X)]
    down = [randn(E, F, seed=1000 + i, dtype=dtype) / F**0.5 for i in range(X)]
    x = randn(T, E, seed=7, dtype=dtype)
    x[list(bad)] = math.nan
    x = guard.around(x)
    packed = (guard.around(torch.stack(weights)) for weights in (gate_up, down))
    found = kernels.experts(x, chosen, shares, *packed)
    wide = [[weight.float() for weight in weights] for weights in (gate_up, down)]
    packed = [[kernels.pack(weight) for weight in weights] for weights in wide]
    return found, in_pytorch(kernels.experts, x.float(), chosen, shares.float(), *packed)


SLOW = pytest.mark.slow
EXPERTS = {
    "one row": {"T": 1, "K": 2, "X": 4, "E": 32, "F": 24},
    "one row, one expert": {"T": 1, "K": 1, "X": 1, "E": 8, "F": 5},
    "several tiles": {"T": 20, "K": 2, "X": 3, "E": 40, "F": 24},  # 40 pairs, tiles of 16
    "all to one": {"T": 35, "K": 1, "X": 4, "E": 32, "F": 70, "choice": [2]},
    "most have none": {"T": 6, "K": 2, "X": 16, "E": 32, "F": 24, "choice": [0, 7, 15]},
    "high tiles": {"T": 70, "K": 2, "X": 4, "E": 32, "F": 24},  # 140 pairs, tiles of 64
    "high tiles, all to the last": {"T": 130, "K": 1, "X": 4, "E": 16, "F": 8, "choice": [3]},
    "128 choose 8": {"T": 3, "K": 8, "X": 128, "E": 32, "F": 24},
    "wide": {"T": 3, "K": 2, "X": 4, "E": 130, "F": 100},
    "128 choose 8, high tiles": {"T": 260, "K": 8, "X": 128, "E": 16, "F": 8},
}


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[SLOW] if "128" in name and "high" in name else []) for name in EXPERTS
])  # fmt: skip
def test_experts_are_those_of_pytorch(name, guard):
    found, wanted = experts_case(guard, **EXPERTS[name])
    assert rounded_once(found, wanted)


@pytest.mark.parametrize("dtype", DTYPES[1:] if torch.cuda.is_available() else [torch.float16])
def test_experts_in_half_precision(dtype, guard):
    found, wanted = experts_case(guard, T=9, K=2, X=4, E=48, F=40, dtype=dtype)
    assert found.dtype == dtype
    error = (found.float() - wanted).abs().amax(-1)
    assert (error <= 4 * HALF_STEP[dtype] * wanted.abs().amax(-1)).all()


def test_a_row_of_nan_touches_no_other(guard):
    case = {"T": 20, "K": 2, "X": 3, "E": 40, "F": 24}
    clean, _ = experts_case(guard, **case)
    found, _ = experts_case(guard, **case, bad=[0, 7, 19])
    others = [i for i in range(20) if i not in (0, 7, 19)]
    assert torch.equal(found[others], clean[others])
    assert found[[0, 7, 19]].isnan().all()


# ---------------------------------------------------------------- sampling


def drawn(scores, rows):
    """The ids of Triton's and of PyTorch's draw."""
    found = sample._draw(scores, rows)
    return found.tolist(), in_pytorch(sample._draw, scores, rows).tolist()


def some_rows(count, seed):
    """Rows with any filters or none."""
    draw, rows = random.Random(seed), []
    for i in range(count):
        params = SamplingParams(
            temperature=draw.choice([0.3, 1, 1, 5]),
            top_k=draw.choice([0, 0, 1, 2, 5, 50]),
            top_p=draw.choice([1, 1, 0.9, 0.5, 0.05]),
            min_p=draw.choice([0, 0, 0.01, 0.3]),
        )
        rows.append(Row(params.with_defaults({}), draw.randrange(2**40), i))
    return rows


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 31, 33, 2048, 5000])
def test_masks_forbid_what_they_should_and_count_it(vocab, dtype, guard):
    """In the same rows, with the same bits to the last one; rows without a mask keep theirs.
    What is not finite is so after it, forbidden or not: there a sum's NaN may have other bits."""
    scores = randn(7, vocab, seed=vocab, dtype=dtype) * 3
    scores[1], scores[4, 0], scores[6, ::7] = -torch.inf, math.nan, math.nan
    scores[6, 3::7] = torch.inf
    draw = torch.Generator().manual_seed(vocab)
    words = torch.randint(-(2**31), 2**31, (4, -(-vocab // 32)), generator=draw).int().to(DEVICE)
    words[1], words[2] = 0, -1
    rows = torch.tensor([0, 2, 3, 6], device=DEVICE)
    given = guard.around(scores), guard.around(words), guard.around(rows)
    found, took = kernels.allow(*given)
    wanted, shares = in_pytorch(kernels.allow, scores, words, rows)
    assert same_bits(found[:6], wanted[:6])
    assert torch.equal(found[6].isnan(), wanted[6].isnan())
    assert same_bits(
        found[6].nan_to_num(0, math.inf, -math.inf), wanted[6].nan_to_num(0, math.inf, -math.inf)
    )
    assert same_bits(found[[1, 4, 5]], scores[[1, 4, 5]].float())
    assert torch.allclose(took[:3], shares[:3], atol=1e-5)


@pytest.mark.parametrize("vocab, count", [
    (1, 3), (2, 20), (96, 40), (2048, 10), (2049, 10), (5000, 10),
    pytest.param(300, 400, marks=SLOW), pytest.param(20_000, 100, marks=SLOW),
])  # fmt: skip
def test_the_same_ids_are_drawn(vocab, count, guard):
    scores = guard.around(randn(count, vocab, seed=vocab) * 3)
    found, wanted = drawn(scores, some_rows(count, vocab))
    assert found == wanted


def test_of_equals_the_smaller_ids_are_kept(guard):
    """12 ids share the first place. Of the top 5 no id above 4 is drawn, of the top 0.55 none
    above 6; and each of those kept is drawn."""
    for settings, kept in (({"top_k": 5}, 5), ({"top_p": 0.55}, 7), ({"top_p": 0.01}, 1)):
        params = SamplingParams(**settings).with_defaults({})
        rows = [Row(params, 3, i) for i in range(40)]
        scores = torch.full((40, 15), -50.0, device=DEVICE)
        scores[:, :12] = 2
        found, wanted = drawn(guard.around(scores), rows)
        assert found == wanted
        assert set(found) == set(range(kept))


@pytest.mark.parametrize("levels", [2, 5])
def test_the_same_ids_are_drawn_of_many_equals(levels, guard):
    scores = (randn(30, 60, seed=levels) * levels).round()
    found, wanted = drawn(guard.around(scores), some_rows(30, levels))
    assert found == wanted


def test_rows_with_masked_ids_and_without_a_finite_maximum(guard):
    """sample() whole: what is masked is never drawn, what has nothing to draw from is None."""
    scores = randn(12, 50, seed=5) * 3
    mask = [0x92492492 - 2**32, 0x24924]  # every third id, from 1 on
    rows = [Row(r.params, r.seed, i, mask=mask if i % 2 else None)
            for i, r in enumerate(some_rows(12, 9))]  # fmt: skip
    scores[2], scores[4, 7], scores[6, 3] = -torch.inf, math.nan, torch.inf
    rows[8] = Row(SamplingParams(temperature=0).with_defaults({}), 1, 8)
    found, *_ = sample.sample(guard.around(scores), rows)
    wanted, *_ = in_pytorch(sample.sample, scores, rows)
    assert found == wanted
    assert [found[i] for i in (2, 4, 6)] == [None] * 3 and found.count(None) == 3
    assert all(i % 3 == 1 for i in found[1::2]) and found[8] == scores[8].argmax()


def test_filtered_rows_that_are_not_finite_end(guard):
    """The search for a winner that is kept must not miss the one that always is."""
    scores = torch.zeros(40, 30, device=DEVICE)
    scores[:20, 7], scores[20:, 7] = math.nan, torch.inf
    filters = ({"top_k": 1}, {"top_p": 0.01})
    rows = [Row(SamplingParams(**filters[i % 2]).with_defaults({}), 1, i) for i in range(40)]
    assert sample.sample(guard.around(scores), rows)[0] == [None] * 40
