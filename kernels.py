"""Kernels: the few tensor operations a transformer layer is made of.

The idea      A decode step reads every weight once and uses it for one row; a prompt uses the
              same weight for hundreds of rows. So the same operation is limited by memory in
              one case and by arithmetic in the other, and its layout decides which limit it
              reaches. On a CPU the weights are therefore reordered once, at load time, into
              the blocked layout that oneDNN reads fastest; or into 8 or 4 bits, since what is
              limited by memory takes as long as its bytes.

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
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


GROUP = 32  # neighbouring weights that share a scale and a zero, as in GGUF's Q4_0 and Q4_1
# Most rows for which the low-bit kernel wins: it converts each weight once for a few rows, oneDNN
# once for all. SmolLM2-135M's layers on one core with AVX-512, in ms for 1, 8, 16, 32 and 128 rows:
# bfloat16 9, 13, 16, 24, 67; int4 4, 11, 22, 42, 167; int8 8, 14, 26, 48, 182.
FEW_ROWS = {"int4": 8, "int8": 16}


@dataclass(frozen=True)
class FourBit:
    """A weight (out, in) in 4 bits: (value - 8) * scale + zero, group by group of GROUP."""

    values: Tensor  # (out, in) uint8, 0 to 15
    scales: Tensor  # (out, in / GROUP) float32, zeros too
    zeros: Tensor

    @property
    def shape(self):
        return self.values.shape

    def rounded(self, dtype: torch.dtype) -> Tensor:
        """The weight with scales and zeros of that type, as the int4 kernel sees it."""
        scales, zeros = (x.to(dtype).float()[..., None] for x in (self.scales, self.zeros))
        steps = self.values.unflatten(1, (-1, GROUP)).float() - 8
        return (steps * scales + zeros).flatten(1).to(dtype)


def four_bit(weight: Tensor) -> FourBit:
    """The nearest of 16 equal steps from the least to the largest weight of each group."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    least, largest = groups.aminmax(dim=-1, keepdim=True)
    scales = ((largest - least) / 15).clamp(min=1e-12)
    values = ((groups - least) / scales).round().to(torch.uint8)
    return FourBit(values.flatten(1), scales[..., 0], (least + 8 * scales)[..., 0])


def cannot_quantize(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why PyTorch has no low-bit kernel here, or None if it has."""
    if device.type != "cpu":
        return f"low-bit weights run on the CPU only, not on {device.type}"
    if dtype not in (torch.bfloat16, torch.float32):
        return f"low-bit weights need bfloat16 or float32 rows, not {str(dtype)[6:]}"
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        return "low-bit weights need a CPU with AVX2 or AVX-512"
    if not hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu"):
        return f"PyTorch {torch.__version__} has no low-bit kernels for the CPU"
    return None


@dataclass(frozen=True)
class Packed:
    """A weight (out, in) ready for `linear`; `data` is opaque when `blocked` or `quantize`."""

    data: Tensor
    out_features: int
    in_features: int
    nbytes: int  # that one row reads
    blocked: bool = False
    quantize: str | None = None  # "int8" or "int4"
    scales: Tensor | None = None  # int8: (out,); int4: (in / GROUP, out, 2), zeros too
    many: "Packed | None" = None  # int4: the same weight for more than FEW_ROWS


def pack(
    weight: Tensor | FourBit, quantize: str | None = None, dtype: torch.dtype | None = None
) -> Packed:
    """Lay a weight (out, in) out for `linear`: once, at load time.

    oneDNN (Intel's and AMD's CPUs, and Arm through ACL) multiplies a blocked copy; everywhere
    else, and for types it lacks, the weight stays as it is. The copy replaces the original.

    quantize: "int8", a scale a row, or "int4", a scale and a zero for each GROUP of a row: less
    to read for a few rows. A FourBit is int4 already; dtype is then that of the rows. ValueError
    where there is no such kernel, or the weight has no shape for it.
    """
    if quantize or isinstance(weight, FourBit):
        return _pack_low(weight, quantize or "int4", dtype or weight.dtype)
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


def packs(shape: tuple[int, int], quantize: str) -> bool:
    """Whether the kernel takes a weight (out, in): int8 would read past the end of another."""
    return shape[1] % GROUP == 0 and (quantize == "int8" or shape[0] % 16 == 0)


def _pack_low(weight: Tensor | FourBit, quantize: str, dtype: torch.dtype) -> Packed:
    if quantize not in FEW_ROWS:
        raise ValueError(f"quantize {quantize!r} is not int8 or int4")
    device = weight.values.device if isinstance(weight, FourBit) else weight.device
    if reason := cannot_quantize(device, dtype):
        raise ValueError(reason)
    if not packs(weight.shape, quantize):
        raise ValueError(
            f"{quantize} needs in_features in {GROUP}s and, for int4, out_features in 16s,"
            f" not a weight {list(weight.shape)}"
        )
    if quantize == "int8":
        scales = (weight.float().abs().amax(1) / 127).clamp(min=1e-12).to(dtype)
        data = (weight.float() / scales.float()[:, None]).round().clamp(-127, 127).to(torch.int8)
        many = None  # converted when it is needed: a fifth more time for 128 rows, half the memory
    else:
        four = weight if isinstance(weight, FourBit) else four_bit(weight)
        data = torch.ops.aten._convert_weight_to_int4pack_for_cpu(four.values.int(), 1)
        scales = torch.stack((four.scales.T, four.zeros.T), -1).to(dtype).contiguous()
        many = pack(four.rounded(dtype))  # to unpack 4 bits takes as long as to multiply 128 rows
    nbytes = data.nbytes + scales.nbytes
    return Packed(data, *weight.shape, nbytes, False, quantize, scales, many)


def linear(x: Tensor, weight: Packed, bias: Tensor | None = None) -> Tensor:
    """x (T, in) times weight (out, in) transposed, plus bias (out): (T, out).

    Reads out * in weights and does 2 * T * out * in FLOPs: at T = 1 that is one FLOP a byte
    in bfloat16, which no machine is limited by.
    """
    if weight.quantize:
        return _linear_low(x, weight, bias)
    if weight.blocked:
        return torch.ops.mkldnn._linear_pointwise(x, weight.data, bias, "none", [], "")
    return F.linear(x, weight.data, bias)


def _linear_low(x: Tensor, weight: Packed, bias: Tensor | None) -> Tensor:
    """`linear` of a quantised weight: its own kernel for FEW_ROWS, oneDNN's for more."""
    if x.shape[1] != weight.in_features:  # the kernels would read past the row
        raise RuntimeError(f"rows of {x.shape[1]} numbers for a weight of {weight.in_features}")
    few = len(x) <= FEW_ROWS[weight.quantize]
    if not few and weight.many is not None:
        return linear(x, weight.many, bias)
    if not few:
        out = F.linear(x, weight.data.to(x.dtype)).mul_(weight.scales)
    elif weight.quantize == "int8":
        out = torch.ops.aten._weight_int8pack_mm(x.contiguous(), weight.data, weight.scales)
    else:
        out = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x.contiguous(), weight.data, GROUP, weight.scales
        )
    return out if bias is None else out.add_(bias)


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
