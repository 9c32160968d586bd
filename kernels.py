"""Kernels: the few tensor operations a transformer layer is made of.

The idea      A decode step reads every weight once and uses it for one row; a prompt uses the
              same weight for hundreds of rows. So the same operation is limited by memory in
              one case and by arithmetic in the other, and its layout decides which limit it
              reaches. On a CPU the weights are therefore reordered once, at load time, into
              the blocked layout that oneDNN reads fastest.

The data      x (T, E)     T rows: prompt chunks and decodes of all requests, one below another
              weight (out, in) as stored;  pack(weight) -> Packed, opaque, made once
              qk (T, H + G, D)   a head's first and second half are the two rope coordinates:
                           | x0 x1 ... x(D/2-1) | y0 y1 ... y(D/2-1) |   pair i is (xi, yi)
              pool (P, S, G, D)  keys (or values) of a layer in blocks of S tokens; a View says
                           where each row goes, and where the context of each request lies

Invariants    1. an operation's result for a row depends on that row alone, up to rounding
              2. norms and rotations are computed in float32 and returned in x's type
              3. a Packed weight is never written after it is made
              4. attention reads what a request has written and nothing else: a place in the pool
                 that is not its own may hold anything, NaN included

Units         bytes, FLOPs (a multiply-add is two), seconds.
Article       "Prefill vs. Decode: Why the Second Token Is a Different Workload"
Try           python kernels.py                  one decode step and one prompt, on three cards
              python kernels.py --rows 16        a batch of 16 decodes instead of one
              python tests/mutations.py kernels.py   change it: known bugs, each with its test
Imports       nothing of ours.
"""

import ctypes
import functools
import inspect
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, record_function


@dataclass(frozen=True)
class Packed:
    """A weight (out, in) ready for `linear`; `data` is opaque when `blocked`."""

    data: Tensor
    out_features: int
    in_features: int
    nbytes: int
    blocked: bool


def pack(weight: Tensor) -> Packed:
    """Lay a weight (out, in) out for `linear`: once, at load time.

    oneDNN (Intel's and AMD's CPUs, and Arm through ACL) multiplies a blocked copy; everywhere
    else, and for types it lacks, the weight stays as it is. The copy replaces the original.
    """
    out_features, in_features = weight.shape
    nbytes = weight.numel() * weight.element_size()
    blocked = (
        weight.device.type == "cpu"
        and torch.backends.mkldnn.is_available()
        and (
            weight.dtype == torch.float32
            or (weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
        )
    )
    data = weight.contiguous()
    if blocked:
        data = torch.ops.mkldnn._reorder_linear_weight(data, 1)
    return Packed(data, out_features, in_features, nbytes, blocked)


def linear(x: Tensor, weight: Packed, bias: Tensor | None = None) -> Tensor:
    """x (T, in) times weight (out, in) transposed, plus bias (out): (T, out).

    Reads out * in weights and does 2 * T * out * in FLOPs: at T = 1 that is one FLOP a byte
    in bfloat16, which no machine is limited by.
    """
    if weight.blocked:
        return torch.ops.mkldnn._linear_pointwise(x, weight.data, bias, "none", [], "")
    return F.linear(x, weight.data, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang & Sennrich 2019).

    Example: x = [3, 4], weight = [1, 1]: mean square 12.5, so [0.8485, 1.1314].
    """
    h = x.float()
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    return (h * weight).to(x.dtype)


def rope_tables(positions: Tensor, inverse_frequencies: Tensor, factor: float) -> Tensor:
    """Cosine and signed sine of every position's angles, once a step: (2, T, 1, D).

    positions (T,); inverse_frequencies (D / 2,) in radians a token. `factor` scales both: it
    is 1 except under YaRN. Float32, in which positions are exact up to 2^24.
    """
    angles = positions[:, None].float() * inverse_frequencies  # (T, D / 2)
    cos, sin = angles.cos() * factor, angles.sin() * factor
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)))[:, :, None]


def rope(x: Tensor, tables: Tensor) -> Tensor:
    """Turn every pair (x[i], x[i + D/2]) of x (T, heads, D) by its angle (Su et al. 2021).

    With the sine's sign in the table, the partner of each coordinate is the other half:
    out = x * cos + swap(x) * sin.
    """
    cos, sin = tables
    half = x.shape[-1] // 2
    return (x * cos + x.roll(half, -1) * sin).to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of gate_up (T, 2 * F): (T, F), the gated MLP of Shazeer 2020."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def keep_freed_memory():
    """Let the C library keep what tensors free, on Linux: else every large intermediate result
    is mapped anew, and the kernel clears its pages first. Sampling 32 rows of a vocabulary of
    49,152 takes 7 ms instead of 20."""
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return  # another C library
    mallopt(M_MMAP_THRESHOLD, 2**30)
    mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


# ---------------------------------------------------------------- attention


def attend(q: Tensor, keys: Tensor, values: Tensor, causal: bool = True) -> Tensor:
    """One request's attention in plain PyTorch: q (n, H, D), keys, values (N, G, D).

    The n rows are the last n of the N positions. Query heads that share a key/value head are
    neighbours (Ainslie et al. 2023); for a single row they become the rows of one product,
    so that shared keys are read once.
    """
    n, heads, dim = q.shape
    length, shared, _ = keys.shape
    keys, values = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]  # (1, G, N, D)
    if n == 1:
        q = q.view(1, shared, heads // shared, dim)
        return F.scaled_dot_product_attention(q, keys, values).view(1, heads, dim)
    mask = None
    if causal and length > n:  # a chunk: PyTorch's is_causal would align it to position 0
        mask = torch.ones(n, length, dtype=torch.bool, device=q.device).tril(length - n)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],  # (1, H, n, D)
        keys,
        values,
        attn_mask=mask,
        is_causal=causal and length == n,
        enable_gqa=heads != shared,
    )
    return out[0].transpose(0, 1)


@dataclass(frozen=True)
class Part:
    """Requests that one call computes: one of any number of rows, or several of one row each.

    rows: which rows of q. places: where the tokens they attend to lie in the pool, request by
    request; a shorter request is padded with its own first token, which the mask hides.
    """

    rows: slice | Tensor
    places: slice | Tensor
    mask: Tensor | None = None  # (b, 1, 1, N): 0, or -inf where a request is padded


@dataclass(frozen=True)
class View:
    """What a step's rows are to one cache group: made once a step, used by all its layers."""

    slots: Tensor  # (T,) int64, where each row's key and value go: block * S + offset
    parts: list[Part]


def view(slots: Tensor, tables: list[list[int]], spans, block_size: int, dtype) -> View:
    """The View of requests with block tables, and spans [(row, n, length)]: n rows from `row`
    on, `length` tokens once they are stored.

    Requests of one row go together, sorted by length: the longest of a part has at most half
    as many blocks again as the shortest, and four more. A part is one copy of its keys and
    values, and one product, whatever the number of its requests; 10 parts hold any lengths up
    to 8,192 in blocks of 16.
    """
    parts, single = [], []
    for table, (row, n, length) in zip(tables, spans):
        if n == 1:
            single.append((length, row, table))
        else:
            places = _places(table, length, block_size, slots.device)
            parts.append(Part(slice(row, row + n), places))
    single.sort(key=lambda entry: entry[0])
    while single:
        most = 1.5 * -(-single[0][0] // block_size) + 4
        count = sum(-(-length // block_size) <= most for length, _, _ in single)
        parts.append(_part(single[:count], block_size, dtype, slots.device))
        single = single[count:]
    return View(slots, parts)


def _places(table: list[int], length: int, block_size: int, device) -> slice | Tensor:
    """Places of a request's tokens; blocks that follow each other are a slice: no copy."""
    table = table[: -(-length // block_size)]
    if table == list(range(table[0], table[0] + len(table))):
        return slice(table[0] * block_size, table[0] * block_size + length)
    return _all_places(torch.tensor(table, device=device), block_size)[:length]


def _all_places(blocks: Tensor, block_size: int) -> Tensor:
    """Places of all the tokens of blocks (..., b): (..., b * S)."""
    offsets = torch.arange(block_size, device=blocks.device)
    return (blocks[..., None] * block_size + offsets).flatten(-2)


def _part(single: list[tuple[int, int, list[int]]], block_size: int, dtype, device) -> Part:
    """One Part of requests [(length, row, table)] of one row each, the longest last."""
    if len(single) == 1:
        length, row, table = single[0]
        return Part(slice(row, row + 1), _places(table, length, block_size, device))
    lengths = torch.tensor([length for length, _, _ in single], device=device)[:, None]
    rows = torch.tensor([row for _, row, _ in single], device=device)
    blocks = -(-single[-1][0] // block_size)
    padded = [table[:blocks] + [0] * (blocks - len(table)) for _, _, table in single]
    places = _all_places(torch.tensor(padded, device=device), block_size)  # (b, N)
    beyond = torch.arange(places.shape[1], device=device) >= lengths
    places = torch.where(beyond, places[:, :1], places)
    mask = torch.zeros(beyond.shape, dtype=dtype, device=device).masked_fill(beyond, -torch.inf)
    return Part(rows, places.flatten(), mask[:, None, None])


def store_kv(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, view: View):
    """Write a layer's keys and values of this step, k, v (T, G, D), into pools (P, S, G, D)."""
    keys.view(-1, *k.shape[1:])[view.slots] = k
    values.view(-1, *v.shape[1:])[view.slots] = v


def attention(q: Tensor, keys: Tensor, values: Tensor, view: View, causal: bool = True) -> Tensor:
    """Attention of mixed rows over a paged cache: q (T, H, D), pools (P, S, G, D) -> (T, H, D).

    A row at position p of its request sees positions 0..p (Kwon et al. 2023 for the pages);
    with causal=False every row sees all of its request.
    """
    heads, dim = q.shape[1:]
    shared = keys.shape[2]
    keys, values = keys.flatten(0, 1).flatten(1), values.flatten(0, 1).flatten(1)  # (P * S, G * D)
    out = torch.empty_like(q)
    for part in view.parts:
        if isinstance(part.places, slice):
            k, v = keys[part.places], values[part.places]
        else:
            k, v = keys.index_select(0, part.places), values.index_select(0, part.places)
        k, v = k.unflatten(1, (shared, dim)), v.unflatten(1, (shared, dim))  # (N, G, D)
        if part.mask is None:
            _attend_tiles(out[part.rows], q[part.rows], k, v, causal)
            continue
        count = len(part.rows)
        k, v = (x.unflatten(0, (count, -1)).transpose(1, 2) for x in (k, v))  # (b, G, N, D)
        grouped = q[part.rows].view(count, shared, heads // shared, dim)
        mixed = F.scaled_dot_product_attention(grouped, k, v, attn_mask=part.mask)
        out[part.rows] = mixed.view(count, heads, dim)
    return out


TILE = 128  # rows


def _attend_tiles(out: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool):
    """`attend` for the rows of one request, TILE at a time: no row meets the keys after its
    tile, which for a whole prompt is nearly half of them."""
    n, length = len(q), len(k)
    for row in range(0, n, TILE):
        end = min(row + TILE, n)
        seen = length - n + end if causal else length
        out[row:end] = attend(q[row:end], k[:seen], v[:seen], causal)


# ---------------------------------------------------------------- sampling


def allow(logits: Tensor, mask: Tensor) -> Tensor:
    """logits (V,) with -inf where the mask forbids.

    mask: packed int32 words, in which bit i of word w allows id 32 * w + i, rounded up to whole
    words; or one bool for each id.
    """
    if mask.dtype != torch.bool:
        bits = torch.arange(32, dtype=torch.int32, device=mask.device)
        mask = (mask[:, None] >> bits & 1).bool().flatten()[: logits.shape[-1]]
    return torch.where(mask, logits, -torch.inf)


# ---------------------------------------------------------------- what an operation costs


@dataclass
class Call:
    """One or several calls of an operation: the bytes they must move, the FLOPs they must do,
    and how long they took."""

    name: str
    nbytes: int = 0
    flops: float = 0.0
    seconds: float = 0.0
    count: int = 1


def _linear_cost(result, spans, x, weight, *rest) -> tuple[int, float]:
    return weight.nbytes + x.nbytes + result.nbytes, 2.0 * result.numel() * x.shape[-1]


def _attention_cost(result, spans, q, keys, values, view, causal=True, **rest):
    """What a request has stored is read once; its row at position p meets p + 1 of it."""
    heads, dim = q.shape[-2:]
    token_bytes = (keys[0, 0].numel() + values[0, 0].numel()) * keys.element_size()
    stored = sum(start + n for start, n in spans)
    pairs = sum(n * (start + n) - causal * (n * (n - 1) // 2) for start, n in spans)
    return stored * token_bytes + q.nbytes + result.nbytes, 4.0 * heads * dim * pairs


def _store_cost(result, spans, k, v, *rest) -> tuple[int, float]:
    return 2 * (k.nbytes + v.nbytes), 0.0


def _plain_cost(result, spans, *given, **options) -> tuple[int, float]:
    """Of all others: tensors and weights in and out once, 4 FLOPs an element of the largest."""
    values = [x for x in (*given, *options.values(), result) if isinstance(x, Tensor | Packed)]
    elements = max((x.numel() for x in values if isinstance(x, Tensor)), default=0)
    return sum(x.nbytes for x in values), 4.0 * elements


COSTS = {  # operation -> (bytes, FLOPs) of its result, the step's spans, and its arguments
    "linear": _linear_cost,
    "attention": _attention_cost,
    "store_kv": _store_cost,
}


@contextmanager
def measured(spans, names: dict[int, str] | None = None, also=(), ranges: bool = False):
    """Record every operation that is called meanwhile: the list of Calls, as they come.

    An operation is a public function of this file whose first argument is a tensor; what it
    calls itself belongs to it. They are exchanged for recording ones and put back at the end:
    at other times nothing is recorded and nothing is slower.

    spans   the step's requests as (first position, rows), for attention
    names   id of a weight -> what a call with it is named, instead of the operation's name
    also    further functions to record: (name, owner, attribute)
    ranges  open a range of torch.profiler for each call
    """
    ours = sys.modules[__name__]
    found = [(name, ours, name) for name, value in vars(ours).items() if _is_operation(value)]
    found += also
    before = [getattr(owner, attribute) for _, owner, attribute in found]
    recorder = _Recorder(spans, names or {}, ranges)
    try:
        for (name, owner, attribute), function in zip(found, before):
            setattr(owner, attribute, recorder.around(name, function))
        yield recorder.calls
    finally:
        for (_, owner, attribute), function in zip(found, before):
            setattr(owner, attribute, function)


def _is_operation(value) -> bool:
    if not inspect.isfunction(value) or value.__module__ != __name__ or value.__name__[0] == "_":
        return False
    return next(iter(inspect.get_annotations(value).values()), None) is Tensor


class _Recorder:
    def __init__(self, spans, names: dict[int, str], ranges: bool):
        self.spans, self.names, self.ranges = spans, names, ranges
        self.calls: list[Call] = []
        self.inside = False  # of a call that is being recorded

    def around(self, name: str, function):
        cost = COSTS.get(name, _plain_cost)

        @functools.wraps(function)
        def run(*given, **options):
            if self.inside:
                return function(*given, **options)
            label = next((self.names[id(x)] for x in given if id(x) in self.names), name)
            self.inside = True
            try:
                with record_function(label) if self.ranges else nullcontext():
                    began = time.perf_counter()
                    result = function(*given, **options)
                    seconds = time.perf_counter() - began
            finally:
                self.inside = False
            nbytes, flops = cost(result, self.spans, *given, **options)
            self.calls.append(Call(label, nbytes, flops, seconds))
            return result

        return run


@dataclass
class Measurement:
    """A step of an engine, and what came out when it was measured.

    run does the step and returns when its work is done; spans are its requests, as above.
    `seconds` is all of it: its calls and what lies between them.
    """

    title: str
    spans: list[tuple[int, int]]
    run: Callable[[], object]
    seconds: float = 0.0
    calls: list[Call] = field(default_factory=list)

    def measure(self, names, also=()):
        """Run it five times, or as often as a second allows: the run of median time counts."""
        runs: list[tuple[float, list[Call]]] = []
        while not runs or len(runs) < 5 and sum(seconds for seconds, _ in runs) < 1:
            with measured(self.spans, names, also) as calls:
                began = time.perf_counter()
                self.run()
                runs.append((time.perf_counter() - began, calls))
        self.seconds, self.calls = sorted(runs, key=lambda run: run[0])[len(runs) // 2]

    @property
    def rows(self) -> int:
        return sum(n for _, n in self.spans)

    @property
    def total(self) -> Call:
        return replace(total("all", self.calls), seconds=self.seconds)


def total(name: str, calls: list[Call]) -> Call:
    columns = zip(*((call.nbytes, call.flops, call.seconds, call.count) for call in calls))
    return Call(name, *(sum(column) for column in columns))


def trace(steps: list[Measurement], path, names, also=(), cuda: bool = False):
    """Run steps once more under torch.profiler and write its Chrome trace to `path`.

    On a GPU a call only orders work: its seconds become those that its kernels ran, which
    the profiler knows (no GPU has run this yet). OSError: `path` cannot be written.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it tells standard error what it does
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda
    with torch.profiler.profile(activities=activities) as profiler:
        for step in steps:
            with record_function(step.title):
                with measured(step.spans, names, also, ranges=True) as calls:
                    step.run()
            if cuda:
                step.calls = calls
    if cuda:
        set_seconds([call for step in steps for call in step.calls], profiler.events())
    with tempfile.TemporaryDirectory() as folder:  # the profiler keeps its failures to itself
        profiler.export_chrome_trace(os.path.join(folder, "trace.json"))
        shutil.copyfile(os.path.join(folder, "trace.json"), path)


def set_seconds(calls: list[Call], events, time_us: str = "device_time_total"):
    """Give calls, in their order, the time that torch.profiler's events of their names have."""
    names = {call.name for call in calls}
    ranges = [e for e in events if e.name in names and e.device_type == DeviceType.CPU]
    ranges.sort(key=lambda event: event.time_range.start)
    for call, event in zip(calls, ranges, strict=True):
        call.seconds = getattr(event, time_us) / 1e6


def multiply_rate(device: torch.device, dtype: torch.dtype, size: int | None = None) -> float:
    """FLOPs a second of `linear` on a large square product: the best of four."""
    size = size or (8192 if device.type == "cuda" else 2048)
    x = torch.ones(size, size, dtype=dtype, device=device)
    weight, seconds = pack(x), []
    for _ in range(4):
        began = time.perf_counter()
        linear(x, weight)[0, 0].item()  # waits for a GPU
        seconds.append(time.perf_counter() - began)
    return 2.0 * size**3 / min(seconds)


def report(prefill: Measurement, decode: Measurement, bandwidth: float, rate: float) -> str:
    """Both steps for people: a table of operations for each, what a token costs, and how far
    from this machine's limits they are, bandwidth (bytes/s) and rate (FLOP/s) as measured."""
    lines = []
    for step in (prefill, decode):
        lines += [*_table(step, bandwidth, rate), ""]
    prompt, answer = prefill.seconds / prefill.rows, decode.seconds / decode.rows
    lines += [
        f"a prompt token takes {1e3 * prompt:.3g} ms, an answer token {1e3 * answer:.3g} ms:"
        f" {answer / prompt:.1f} times as much",
        f"this machine reads {bandwidth / 1e9:,.1f} GB/s and multiplies at {rate / 1e9:,.0f}"
        f" GFLOP/s: below {rate / bandwidth:.1f} FLOP/byte memory is the limit",
        "(a share above 100%: caches, or the machine was busier when its limits were measured)",
        "",
        *_roofline({"P": prefill.total, "D": decode.total}, bandwidth, rate),
    ]
    return "\n".join(lines)


def _table(step: Measurement, bandwidth: float, rate: float) -> list[str]:
    """A line for each operation, in the order of the first calls."""
    groups: dict[str, list[Call]] = {}
    for call in step.calls:
        groups.setdefault(call.name, []).append(call)
    calls = [total(name, group) for name, group in groups.items()]
    between = max(0.0, step.seconds - sum(call.seconds for call in calls))
    calls += [Call("between them", seconds=between, count=0), step.total]
    rows = f"{step.rows:,} token" + "s" * (step.rows > 1)
    context = max(start + n for start, n in step.spans)
    return [
        f"{step.title}: {rows} in one step, context {context:,}, {1e3 * step.seconds:,.1f} ms",
        f"{'operation':<17}{'calls':>6}{'ms':>9}{'share':>6}{'MB':>9}{'GFLOP':>9}{'FLOP/byte':>10}"
        f"{'GB/s':>8}{'GFLOP/s':>9}  share of a limit",
        *(_line(call, step.seconds, bandwidth, rate) for call in calls),
    ]


def _line(call: Call, whole_s: float, bandwidth: float, rate: float) -> str:
    line = f"{call.name:<17}{call.count or '':>6}{1e3 * call.seconds:>9,.2f}"
    line += f"{call.seconds / whole_s:>6.0%}"
    if not call.nbytes or not call.seconds:
        return line
    memory, arithmetic = (x / call.seconds for x in (call.nbytes / bandwidth, call.flops / rate))
    return (
        f"{line}{call.nbytes / 1e6:>9,.1f}{call.flops / 1e9:>9,.2f}"
        f"{call.flops / call.nbytes:>10,.1f}{call.nbytes / call.seconds / 1e9:>8,.1f}"
        f"{call.flops / call.seconds / 1e9:>9,.1f}"
        f"  {'memory' if memory > arithmetic else 'arithmetic'} {max(memory, arithmetic):.0%}"
    )


def _roofline(points: dict[str, Call], bandwidth: float, rate: float) -> list[str]:
    """Marks at their FLOP/byte and FLOP/s, under the most a machine can do of these (Williams
    et al. 2009); both axes are logarithmic."""
    columns, rows = 61, 9
    places = {mark: (c.flops / c.nbytes, c.flops / c.seconds) for mark, c in points.items()}
    intensities = [rate / bandwidth, *(x for x, _ in places.values())]
    left, right = math.floor(math.log2(min(intensities))), math.ceil(math.log2(max(intensities)))
    left, right = left - 1, right + 1
    bottom = min(bandwidth * 2**left, *(y for _, y in places.values()))

    def row(y: float) -> int:
        return round((rows - 1) * math.log(rate / min(y, rate)) / math.log(rate / bottom))

    def column(x: float) -> int:
        return round((columns - 1) * (math.log2(x) - left) / (right - left))

    grid = [[" "] * columns for _ in range(rows)]
    for i in range(columns):
        roof = bandwidth * 2 ** (left + i * (right - left) / (columns - 1))
        grid[row(roof)][i] = "/" if roof < rate else "-"
    for mark, (x, y) in places.items():
        grid[row(y)][column(x)] = mark
    scale, end = [" "] * (columns + 8), 0
    for power in range(left, right + 1):
        text, at = f"{2.0**power:g}", column(2.0**power)
        if at >= end:
            scale[at : at + len(text)] = text
            end = at + len(text) + 3
    labels = {0: f"{rate / 1e9:,.3g}", rows - 1: f"{bottom / 1e9:,.3g}"}
    return [
        "  GFLOP/s",
        *(f"{labels.get(i, ''):>9} |{''.join(line).rstrip()}" for i, line in enumerate(grid)),
        f"{'':>9} +{'-' * columns}",
        f"{'':>11}{''.join(scale).rstrip()}  FLOP/byte",
        f"{'':>11}P: prefill, D: decode. / memory is the limit, - arithmetic is",
    ]


# ---------------------------------------------------------------- the experiment

CARDS = {  # published peaks: dense bfloat16 FLOP/s, memory bytes/s
    "RTX 4090": (165e12, 1.008e12),
    "A100 80GB": (312e12, 2.039e12),
    "H100 SXM": (989e12, 3.35e12),
}
SHAPE = {"layers": 32, "E": 4096, "H": 32, "G": 8, "D": 128, "F": 14336, "V": 128256}


def operations(
    rows: int, sequences: int, stored: int, attended: float
) -> list[tuple[str, float, float]]:
    """(name, bytes, FLOPs) of one step of Llama-3.1-8B in bfloat16.

    rows: tokens computed, of that many sequences; stored: tokens in each one's cache, read
    once; attended: how many of them a row attends to, on average.
    """
    s = SHAPE
    heads = (s["H"] + 2 * s["G"]) * s["D"]
    weights = {
        "q, k, v": s["layers"] * s["E"] * heads,
        "attention out": s["layers"] * s["E"] * s["H"] * s["D"],
        "gate, up, down": s["layers"] * 3 * s["E"] * s["F"],
        "logits": s["E"] * s["V"],
    }
    table = []
    for name, count in weights.items():
        used = sequences if name == "logits" else rows
        table.append((name, 2.0 * count, 2.0 * used * count))
    cache = s["layers"] * 2 * s["G"] * s["D"] * stored * sequences * 2.0
    scores = s["layers"] * 4.0 * s["H"] * s["D"] * attended * rows
    table.insert(1, ("attention", cache, scores))
    return table


def picture(rows: int, context: int) -> str:
    lines = []
    decode = f"decode: {rows} request{'s' * (rows > 1)} x 1 token, {context} in context"
    prefill = f"prefill: 1 request x {context} tokens"
    for title, n, table in (
        (decode, rows, operations(rows, rows, context, context)),
        (prefill, context, operations(context, 1, context, context / 2)),
    ):
        total = ("all", sum(b for _, b, _ in table), sum(f for _, _, f in table))
        lines.append(title)
        lines.append(f"  {'':<15}{'MB read':>10}{'GFLOP':>11}{'FLOP/byte':>11}")
        for name, nbytes, flops in [*table, total]:
            lines.append(
                f"  {name:<15}{nbytes / 1e6:>10,.1f}{flops / 1e9:>11,.1f}{flops / nbytes:>11,.1f}"
            )
        for card, (peak, bandwidth) in CARDS.items():
            memory, compute = total[1] / bandwidth * 1e3, total[2] / peak * 1e3
            limit = "memory" if memory > compute else "arithmetic"
            lines.append(
                f"  {card:<10} reading {memory:>7.2f} ms, computing {compute:>7.2f} ms"
                f"  -> {limit}, {n / max(memory, compute) * 1e3:,.0f} tokens/s at best"
            )
        lines.append("")
    lines += [
        "Llama-3.1-8B, bfloat16: both passes read the same weights, but the prompt uses each of",
        "them for all its rows. Below some 150 to 300 FLOP a byte, memory is a card's limit.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser(description="One step's bytes and FLOPs on three cards.")
    parser.add_argument("--rows", type=int, default=1, help="requests decoding (default 1)")
    parser.add_argument("--context", type=int, default=2048, help="tokens in each (default 2048)")
    args = parser.parse_args()
    if args.rows < 1 or args.context < 2:
        parser.error(f"--rows {args.rows} must be at least 1, --context {args.context} at least 2")
    print(picture(args.rows, args.context))
