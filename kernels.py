"""Kernels: the few tensor operations a transformer layer is made of.

The idea      A decode step reads every weight once and uses it for one row; a prompt uses the
              same weight for hundreds of rows. So the same operation is limited by memory in
              one case and by arithmetic in the other. Each is a function with one signature
              and two bodies: PyTorch, which is what a CPU runs and what the other is compared
              with, and below it a Triton kernel for GPUs. Weights are laid out once, at load
              time, for the library that multiplies them; or, on a CPU, in 8 or 4 bits, since
              what is limited by memory takes as long as its bytes.

The data      x (T, E)     T rows: prompt chunks and decodes of all requests, one below another
              weight (out, in) as stored;  pack(weight) -> Packed, opaque, made once
              qk (T, H + G, D)   a head's first and second half are the two rope coordinates:
                           | x0 x1 ... x(D/2-1) | y0 y1 ... y(D/2-1) |   pair i is (xi, yi)
              pool (P, S, G, D)  keys (or values) of a layer in blocks of S tokens; a View says
                           where each row goes, and where the context of each request lies
              a state      what a linear layer keeps of a request, however long: it is read at one
                           place of a pool and written, as it is after the step, at another
              a tile       what one program of the attention kernel computes: some rows of one
                           request times the query heads that share one key/value head

Invariants    1. an operation's result for a row depends on that row alone, up to rounding
              2. norms, rotations and softmax are computed in float32, whatever x's type
              3. a Packed weight is never written after it is made
              4. attention reads what a request has written and nothing else: a place in the pool
                 that is not its own may hold anything, NaN included
              5. which kernels a step launches, and how many programs of each, depends on its
                 shapes and never on lengths: a recorded step is right for later ones
              6. a padded row writes nothing, reads nothing and comes out as 0

Units         bytes, FLOPs (a multiply-add is two), seconds.
Article       "Prefill vs. Decode: Why the Second Token Is a Different Workload"
Try           python kernels.py                  one decode step and one prompt, on three cards
              TRITON_INTERPRET=1 python generate.py --demo   the Triton kernels, without a GPU
              python kernels.py --rows 16        a batch of 16 decodes instead of one
              python kernels.py --compile        every kernel for three GPUs, on a machine without
              python tests/mutations.py kernels.py   change it: known bugs, each with its test
Imports       nothing of ours.
"""

import ctypes
import functools
import inspect
import io
import math
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, record_function


# ---------------------------------------------------------------- which body runs

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's own variable: runs on a CPU
try:
    import triton
    import triton.language as tl
except ImportError:  # not on Linux: PyTorch alone
    triton, tl = None, SimpleNamespace(constexpr=int)


def jit(kernel):
    """Make a function a Triton kernel. `requests` differs from step to step: no variants of it."""
    return triton.jit(kernel, do_not_specialize=["requests"]) if triton else kernel


def on_triton(x: Tensor) -> bool:
    """Whether operations on x run in Triton: on a GPU, or anywhere in Triton's interpreter."""
    return triton is not None and (x.is_cuda or INTERPRETED)


def operand(dtype: torch.dtype):
    """The type in which tl.dot multiplies; the interpreter computes with bfloat16's raw bits."""
    name = "float32" if INTERPRETED else str(dtype).removeprefix("torch.")
    return getattr(tl, name, None)  # None: without Triton


def capability(device: torch.device) -> int:
    """80: A100, 90: H100, 100: B200, 120: RTX 50 (NVIDIA's compute capability, times ten)."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    return 10 * major + minor


def power_of_2(n: int) -> int:
    """The smallest one that is not below n."""
    return 1 << (n - 1).bit_length()


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


# ---------------------------------------------------------------- products


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
    weight: "Tensor | FourBit", quantize: str | None = None, dtype: torch.dtype | None = None
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
            or (weight.dtype == torch.bfloat16 and multiplies_bfloat16())
        )
    )
    data = weight.contiguous()
    if blocked:
        data = torch.ops.mkldnn._reorder_linear_weight(data, 1)
    return Packed(data, out_features, in_features, nbytes, blocked)


@functools.cache
def multiplies_bfloat16() -> bool:
    """Whether oneDNN does on this CPU; PyTorch's own products take twenty times as long."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


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


# ---------------------------------------------------------------- a row at a time


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang & Sennrich 2019).

    x (T, E) with weight (E,), or x (T, heads, D) with weight (heads, D).
    Example: x = [3, 4], weight = [1, 1]: mean square 12.5, so [0.8485, 1.1314].
    """
    if on_triton(x):
        return _norm(x, None, weight, eps)[1]
    h = x.float()
    length = torch.linalg.vector_norm(h, dim=-1, keepdim=True)  # one pass, as no mean is
    scale = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (h * scale).mul_(weight).to(x.dtype)


def add_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + delta, all (T, E), and its `rms_norm`: the sum is rounded before it is normed."""
    if on_triton(x):
        return _norm(x, delta, weight, eps)
    total = x + delta
    return total, rms_norm(total, weight, eps)


def _norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float):
    rows, width = x.shape[0], x.shape[-1]
    heads = x.shape[1] if x.dim() == 3 else 1
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if delta is None else torch.empty_like(normed)
    norm_kernel[(rows, heads)](
        x, delta, weight, total, normed, x.stride(0), eps, **norm_config(width, delta is not None)
    )
    return total, normed


def norm_config(width: int, added: bool) -> dict:
    block = power_of_2(width)
    return {"E": width, "ADDED": added, "BLOCK": block, "num_warps": min(max(block // 256, 1), 8)}


@jit
def norm_kernel(
    x, delta, weight, total, out, x_stride, eps,
    E: tl.constexpr, ADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    e = tl.arange(0, BLOCK)
    at = (row.to(tl.int64) * heads + head) * E + e
    h = tl.load(x + row.to(tl.int64) * x_stride + head * E + e, mask=e < E, other=0).to(tl.float32)
    if ADDED:
        h += tl.load(delta + at, mask=e < E, other=0).to(tl.float32)
        rounded = h.to(total.dtype.element_ty)
        tl.store(total + at, rounded, mask=e < E)
        h = rounded.to(tl.float32)
    h *= 1 / tl.sqrt(tl.sum(h * h) / E + eps)
    h *= tl.load(weight + head * E + e, mask=e < E, other=0).to(tl.float32)
    tl.store(out + at, h.to(out.dtype.element_ty), mask=e < E)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` of each head of x times silu(gate), all (T, H, D), with one weight (D,) for all
    heads: float32 up to the end. A row of x or gate may lie in a wider one."""
    if on_triton(x):
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        gated_norm_kernel[(x.shape[0],)](
            x,
            gate,
            weight,
            out,
            x.stride(0),
            gate.stride(0),
            eps,
            **gated_norm_config(*x.shape[1:]),
        )
        return out
    return rms_norm(x.float(), weight, eps).mul_(F.silu(gate.float())).to(x.dtype)


def gated_norm_config(heads: int, dim: int) -> dict:
    blocks = {"BLOCK_H": power_of_2(heads), "BLOCK_D": power_of_2(dim)}
    return {"H": heads, "D": dim, **blocks, "num_warps": 8}


@jit
def gated_norm_kernel(
    x, gate, weight, out, x_stride, gate_stride, eps,
    H: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    h, d = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_D)[None, :]
    inside = (h < H) & (d < D)
    y = tl.load(x + row * x_stride + h * D + d, mask=inside, other=0).to(tl.float32)
    z = tl.load(gate + row * gate_stride + h * D + d, mask=inside, other=0).to(tl.float32)
    y *= 1 / tl.sqrt(tl.sum(y * y, 1) / D + eps)[:, None]
    y *= tl.load(weight + d, mask=d < D, other=0).to(tl.float32) * z * tl.sigmoid(z)
    tl.store(out + row * H * D + h * D + d, y.to(out.dtype.element_ty), mask=inside)


def rope_tables(positions: Tensor, inverse_frequencies: Tensor, factor: float) -> Tensor:
    """Cosine and signed sine of every position's angles, once a step: (2, T, 1, D).

    positions (T,); inverse_frequencies (D / 2,) in radians a token. `factor` scales both: it
    is 1 except under YaRN. Float32, in which positions are exact up to 2^24.
    """
    angles = positions[:, None].float() * inverse_frequencies  # (T, D / 2)
    cos, sin = angles.cos() * factor, angles.sin() * factor
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)))[:, :, None]


def rope(x: Tensor, tables: Tensor) -> Tensor:
    """Turn every pair (x[i], x[i + R/2]) of x (T, heads, D) by its angle (Su et al. 2021).

    tables (2, T, 1, R): what follows the first R <= D numbers of a head stays as it is. With
    the sine's sign in the table, the partner of each coordinate is the other half:
    out = x * cos + swap(x) * sin.
    """
    (_, heads, dim), turned = x.shape, tables.shape[-1]
    if on_triton(x):
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        config = rope_config(heads, dim, turned)
        rope_kernel[(x.shape[0],)](x, tables, out, x.stride(0), **config)
        return out
    if turned < dim:
        return torch.cat((rope(x[..., :turned], tables), x[..., turned:]), -1)
    cos, sin = tables
    half = x.shape[-1] // 2
    return (x * cos + x.roll(half, -1) * sin).to(x.dtype)


def rope_config(heads: int, dim: int, turned: int) -> dict:
    blocks = {"BLOCK_H": power_of_2(heads), "BLOCK_D": power_of_2(turned // 2)}
    rest = power_of_2(dim - turned) if turned < dim else 0
    return {"H": heads, "D": dim, "R": turned, **blocks, "BLOCK_REST": rest, "num_warps": 4}


@jit
def rope_kernel(
    x, cos_sin, out, x_stride, H: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    HALF: tl.constexpr = R // 2
    h, d = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_D)[None, :]
    inside = (h < H) & (d < HALF)
    x += row * x_stride + h * D
    out += row * H * D + h * D
    first = tl.load(x + d, mask=inside, other=0).to(tl.float32)
    second = tl.load(x + HALF + d, mask=inside, other=0).to(tl.float32)
    cos_sin += row * R + d  # both halves of a row have the same cosine, and opposite sines
    cos = tl.load(cos_sin, mask=d < HALF, other=0)
    sin = tl.load(cos_sin + tl.num_programs(0) * R + HALF, mask=d < HALF, other=0)
    tl.store(out + d, (first * cos - second * sin).to(out.dtype.element_ty), mask=inside)
    tl.store(out + HALF + d, (second * cos + first * sin).to(out.dtype.element_ty), mask=inside)
    if BLOCK_REST:
        rest = R + tl.arange(0, BLOCK_REST)[None, :]
        inside = (h < H) & (rest < D)
        tl.store(out + rest, tl.load(x + rest, mask=inside), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of gate_up (T, 2 * F): (T, F), the gated MLP of Shazeer 2020."""
    if on_triton(gate_up):
        return _gated(gate_up, gelu=False)
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """The same with the tanh form of gelu (Hendrycks & Gimpel 2016)."""
    if on_triton(gate_up):
        return _gated(gate_up, gelu=True)
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up


def _gated(gate_up: Tensor, gelu: bool) -> Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    grid = rows, ceil_div(width, GATED["BLOCK"])
    gated_kernel[grid](gate_up, out, width, GELU=gelu, **GATED)
    return out


GATED = {"BLOCK": 1024, "num_warps": 4}


@jit
def gated_kernel(gate_up, out, width, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + row * 2 * width + f, mask=f < width, other=0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + f, mask=f < width, other=0).to(tl.float32)
    if GELU:  # tanh(y) = 2 sigmoid(2 y) - 1
        gate *= tl.sigmoid(1.5957691216 * (gate + 0.044715 * gate * gate * gate))
    else:
        gate *= tl.sigmoid(gate)
    if out.dtype.element_ty != tl.float32:  # PyTorch rounds here too
        gate = gate.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + f, (gate * up).to(out.dtype.element_ty), mask=f < width)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias of each row: x (T, D) (Ba et al. 2016)."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def per_head(x: Tensor, weight: Tensor) -> Tensor:
    """Each head's rows times its own matrix: x (T, H, D), weight (H, D, F) -> (T, H, F)."""
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)


# ---------------------------------------------------------------- attention


def attend(
    q: Tensor, keys: Tensor, values: Tensor, causal: bool = True, window: int = 0,
    scale: float | None = None, chosen: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """One request's attention in plain PyTorch: q (n, H, D), keys (N, G, D), values (N, G, Dv).

    The n rows are the last n of the N positions. Query heads that share a key/value head are
    neighbours (Ainslie et al. 2023); for a single row they become the rows of one product,
    so that shared keys are read once.

    window: a row at position p sees p - window + 1 .. p; 0: all before it. scale: of the
    products, 1 / sqrt(D) where it is not given. chosen: (n, N), which of those it reads.
    """
    n, heads, dim = q.shape
    length, shared, _ = keys.shape
    if n == 1 and window and causal:
        keys, values = keys[-window:], values[-window:]
    keys, values = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]  # (1, G, N, D)
    if n == 1 and chosen is None:
        q = q.view(1, shared, heads // shared, dim)
        out = F.scaled_dot_product_attention(q, keys, values, scale=scale)
        return out.view(1, heads, values.shape[-1])
    mask = chosen
    windowed = causal and window and length > window
    if mask is None and causal and (length > n or windowed):
        # a chunk: PyTorch's is_causal would align it to position 0
        mask = torch.ones(n, length, dtype=torch.bool, device=q.device).tril(length - n)
        if windowed:
            mask = mask.triu(length - n - window + 1)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],  # (1, H, n, D)
        keys,
        values,
        attn_mask=mask,
        is_causal=causal and mask is None,
        enable_gqa=heads != shared,
        scale=scale,
    )
    return out[0].transpose(0, 1)


def choose(q: Tensor, keys: Tensor, weights: Tensor, top: int) -> Tensor:
    """Which tokens each row of one request reads, in plain PyTorch (DeepSeek-AI 2512.02556).

    q (n, H, D), keys (N, D), weights (n, H) -> (n, N), at most `top` True in a row. A token's
    score is the sum over heads of weight * relu(q . key); of equal ones the older is read.
    """
    n, length = len(q), len(keys)
    later = torch.ones(n, length, dtype=torch.bool, device=q.device).triu(length - n + 1)
    scores = index_scores(q, keys, weights).masked_fill_(later, -torch.inf)
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    chosen = torch.zeros_like(later).scatter_(1, order[:, :top], True)
    return chosen & ~later


def index_scores(q: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """Scores of `choose`: q (n, H, D), keys (N, D), weights (n, H) -> (n, N), in float32."""
    products = (q.float() @ keys.float().T).relu_()  # (n, H, N)
    return torch.einsum("nhl,nh->nl", products, weights.float())


class Buffer:
    """A tensor allocated once; `fill` writes a list into it and returns that much of it.

    On a GPU the list goes through pinned memory, so that the copy need not be waited for. The
    step before must be done by then: the engine waits for each step's tokens.
    """

    def __init__(self, size: int, device: torch.device, dtype=torch.int64):
        self.tensor = torch.zeros(size, dtype=dtype, device=device)
        self.staged = self.tensor
        if device.type != "cpu":
            self.staged = torch.zeros(size, dtype=dtype, pin_memory=True)
        self.array = self.staged.numpy()

    def fill(self, values: list[int], start: int = 0) -> Tensor:
        end = start + len(values)
        self.array[start:end] = values
        if self.staged is not self.tensor:
            self.tensor[start:end].copy_(self.staged[start:end], non_blocking=True)
        return self.tensor[start:end]


def upload(values: list, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A list as a tensor on a device, without waiting for the device."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    staged = torch.tensor(values, dtype=dtype, pin_memory=True)
    return staged.to(device, non_blocking=True)


def upload_rows(rows: list, device: torch.device) -> Tensor:
    """The same for K arrays of N int32 words: a tensor (K, N), in one copy."""
    pinned = device.type != "cpu"
    staged = torch.empty(len(rows), len(rows[0]), dtype=torch.int32, pin_memory=pinned)
    staged.numpy()[:] = rows
    return staged.to(device, non_blocking=True)


@dataclass(frozen=True)
class Part:
    """Requests that one call computes: one of any number of rows, or several of as many each.

    rows: which rows of q, request by request. places: where the tokens they attend to lie in the
    pool, in the same order; a shorter request is padded with the first token that it sees, which
    the mask hides.
    """

    rows: slice | Tensor
    places: slice | Tensor
    mask: Tensor | None = None  # (b, 1, n, N): 0, or -inf where row n of a request sees nothing


@dataclass(frozen=True)
class View:
    """What a step's rows are to one cache group: made once a step, used by all its layers.

    Triton reads tables and spans, PyTorch the parts; what the other one reads is left out.
    """

    slots: Tensor  # (T,) int64, where each row's key and value go: block * S + offset; -1: nowhere
    rows: int  # that are no padding
    most: int = 1  # rows of the request that has most
    parts: list[Part] = field(default_factory=list)
    spans: Tensor | None = None  # (B, 5) int32: row, rows, first position, length, line of tables
    tables: Tensor | None = None  # (lines, W) int32: block ids


class Layout:
    """Makes the Views of one cache group, in buffers allocated once at the limits.

    budget: rows a step; requests: at once; width: blocks a request can have. window: a row sees
    that many tokens, its own the last of them; 0: all. Blocks before the window of a request's
    first row are not looked at: a table has 0 in their places, or anything.
    """

    def __init__(
        self, budget: int, requests: int, width: int, block_size: int, device, dtype,
        window: int = 0,
    ):  # fmt: skip
        self.block_size, self.dtype, self.window = block_size, dtype, window
        self.slots = Buffer(budget, device)
        self.triton = on_triton(self.slots.tensor)
        if self.triton:
            self.width = 16 * ceil_div(width, 16)  # one variant of the kernel for all widths
            self.spans = Buffer(requests * 5, device, torch.int32)
            self.tables = Buffer(requests * self.width, device, torch.int32)
            self.lines: list[list[int] | None] = [None] * requests  # whose table each one is
            self.known: list[list[int]] = [[] for _ in range(requests)]  # what is in the buffer

    def view(self, tables: list[list[int]], spans, padded: int = 0) -> View:
        """The View of requests with block tables, and spans [(row, n, position)]: n rows from
        `row` on, the first of them at `position`. `padded` rows are added that do nothing."""
        size = self.block_size
        slots = [
            table[position // size] * size + position % size
            for table, (_, n, start) in zip(tables, spans)
            for position in range(start, start + n)
        ]
        rows, most = len(slots), max((n for _, n, _ in spans), default=1)
        filled = self.slots.fill(slots + [-1] * padded)
        if not self.triton:
            lengths = [(row, n, start + n) for row, n, start in spans]
            parts = parts_of(tables, lengths, size, filled.device, self.dtype, self.window)
            return View(filled, rows, most, parts)
        firsts = [first_seen(start, self.window) // size for _, _, start in spans]
        lines = self._lines(tables, firsts)
        flat = [
            x
            for (row, n, start), line in zip(spans, lines)
            for x in (row, n, start, start + n, line)
        ]
        for row in range(rows, rows + padded):
            flat += [row, 1, 0, 0, 0]
        filled_spans = self.spans.fill(flat).view(-1, 5)
        return View(filled, rows, most, [], filled_spans, self.tables.tensor.view(-1, self.width))

    def _lines(self, tables: list[list[int]], firsts: list[int]) -> list[int]:
        """The line of the buffer that holds each table, from its first block that is read. A
        table keeps its line from step to step; what was appended is copied, and all that is
        read where blocks were replaced."""
        at = {id(table): line for line, table in enumerate(self.lines) if table is not None}
        wanted = {id(table) for table in tables}
        free = [line for line, table in enumerate(self.lines) if id(table) not in wanted]
        result = []
        for table, first in zip(tables, firsts):
            line = at.get(id(table))
            if line is None:
                line = free.pop()
                self.lines[line], self.known[line] = table, []
            first = min(first, len(self.known[line]))
            known = self.known[line][first:]
            read = table[first : self.width]  # before a fork one has blocks of all samples
            if known != read:
                same = len(known) if known == read[: len(known)] else 0
                self.tables.fill(read[same:], line * self.width + first + same)
                self.known[line][first + same :] = read[same:]
            result.append(line)
        return result


def first_seen(position: int, window: int) -> int:
    """The first position that a row sees of its request."""
    return max(position - window + 1, 0) if window else 0


def parts_of(
    tables: list[list[int]], spans, block_size: int, device, dtype, window: int = 0
) -> list[Part]:
    """The Parts of requests with block tables, and spans [(row, n, length)]: n rows from `row`
    on, `length` tokens once they are stored. What no row sees is left out.

    Requests of as many rows go together, if these are few, sorted by length: the longest of a
    part has at most half as many blocks again as the shortest, and four more. A part is one copy
    of its keys and values, and one product, whatever the number of its requests; 10 parts hold
    any lengths up to 8,192 in blocks of 16.
    """
    parts, alike = [], {}  # (rows, which chunk if there are many) -> requests
    for table, (row, n, length) in zip(tables, spans):
        first = first_seen(length - n, window)
        skipped = first // block_size
        table = table[skipped : -(-length // block_size)]
        entry = length - skipped * block_size, first - skipped * block_size, row, table
        alike.setdefault((n, row if n > TOGETHER else 0), []).append(entry)
    for (n, _), left in sorted(alike.items(), key=lambda item: item[0][0] == 1):
        left.sort(key=lambda entry: entry[0])
        while left:
            most = 1.5 * len(left[0][-1]) + 4
            count = sum(len(table) <= most for *_, table in left)
            parts.append(_part(left[:count], n, block_size, dtype, device, window))
            left = left[count:]
    return parts


TOGETHER = 32  # most rows of requests that go into one product: guesses, not chunks of prompts


def _places(table: list[int], first: int, length: int, block_size: int, device) -> slice | Tensor:
    """Places of a request's tokens; blocks that follow each other are a slice: no copy."""
    if table == list(range(table[0], table[0] + len(table))):
        return slice(table[0] * block_size + first, table[0] * block_size + length)
    return _all_places(torch.tensor(table, device=device), block_size)[first:length]


def _all_places(blocks: Tensor, block_size: int) -> Tensor:
    """Places of all the tokens of blocks (..., b): (..., b * S)."""
    offsets = torch.arange(block_size, device=blocks.device)
    return (blocks[..., None] * block_size + offsets).flatten(-2)


def _part(
    alike: list[tuple[int, int, int, list[int]]], n: int, block_size: int, dtype, device, window=0
) -> Part:
    """One Part of requests [(length, first, row, table)] of n rows each, the longest last. Their
    first rows see positions first.. of the blocks in its table, their last ones up to length - 1.
    """
    if len(alike) == 1:
        length, first, row, table = alike[0]
        return Part(slice(row, row + n), _places(table, first, length, block_size, device))
    lengths, firsts, rows = torch.tensor([entry[:3] for entry in alike], device=device).T
    blocks = len(alike[-1][-1])
    padded = [table + [0] * (blocks - len(table)) for *_, table in alike]
    places = _all_places(torch.tensor(padded, device=device), block_size)  # (b, N)
    at = torch.arange(places.shape[1], device=device)
    unread = (at >= lengths[:, None]) | (at < firsts[:, None])
    if n == 1:
        return _masked(rows, places, unread, firsts, dtype)
    each = torch.arange(n, device=device)
    own = lengths[:, None] - n + each  # (b, n): each row's place
    hidden = at > own[..., None]
    if window:
        hidden |= at <= own[..., None] - window
    rows = (rows[:, None] + each).flatten()
    return _masked(rows, places, unread, firsts, dtype, hidden)


def _masked(
    rows: Tensor, places: Tensor, unread: Tensor, firsts: Tensor, dtype, hidden=None
) -> Part:
    """A Part of requests of as many rows each, at places (b, N): what is unread (b, N) is neither
    seen nor read. hidden (b, n, N): what each row does not see, if it has several. firsts: a
    place of each request that it sees, by its number."""
    places = torch.where(unread, places.gather(1, firsts[:, None]), places)
    hidden = unread[:, None] if hidden is None else hidden
    mask = torch.zeros(hidden.shape, dtype=dtype, device=places.device)
    mask = mask.masked_fill_(hidden, -torch.inf)
    return Part(rows, places.flatten(), mask[:, None])


def store_kv(k: Tensor, v: Tensor | None, keys: Tensor, values: Tensor | None, view: View):
    """Write a layer's keys and values of this step, k, v (T, G, D), into pools (P, S, G, D).

    Padded rows have slot -1 and write nothing. v and values are None where there are only keys.
    """
    if on_triton(k):
        width = k.shape[1] * k.shape[2]
        v_stride = None if v is None else v.stride(0)
        store_kernel[(k.shape[0],)](
            k, v, keys, values, view.slots, k.stride(0), v_stride, **store_config(width)
        )
        return
    slots = view.slots[: view.rows]
    keys.view(-1, *k.shape[1:])[slots] = k[: view.rows]
    if v is not None:
        values.view(-1, *v.shape[1:])[slots] = v[: view.rows]


def store_config(width: int) -> dict:
    return {"WIDTH": width, "BLOCK": power_of_2(width), "num_warps": 4}


@jit
def store_kernel(
    k, v, keys, values, slots, k_stride, v_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if slot >= 0:
        e = tl.arange(0, BLOCK)
        at, inside = slot * WIDTH + e, e < WIDTH
        tl.store(keys + at, tl.load(k + row * k_stride + e, mask=inside), mask=inside)
        if v is not None:
            tl.store(values + at, tl.load(v + row * v_stride + e, mask=inside), mask=inside)


def attention(
    q: Tensor, keys: Tensor, values: Tensor, view: View, causal: bool = True, window: int = 0,
    scale: float | None = None,
) -> Tensor:  # fmt: skip
    """Attention of mixed rows over a paged cache: q (T, H, D), keys (P, S, G, D), values
    (P, S, G, Dv) -> (T, H, Dv).

    A row at position p of its request sees positions 0..p (Kwon et al. 2023 for the pages), or
    the last `window` of these, for which the view was made; with causal=False every row sees all
    of its request. Padded rows give 0. scale: of the products, 1 / sqrt(D) where it is not given.

    Values shorter than keys are the first part of them, in the same memory: a latent that all
    heads share, with G = 1 (DeepSeek-AI 2405.04434).
    """
    if window and not causal:
        raise ValueError(f"a window of {window} tokens needs causal rows")
    if on_triton(q):
        return _attention(q, keys, values, view, causal, window, scale)
    keys, values = keys.flatten(0, 1), values.flatten(0, 1)  # (P * S, G, D)
    if len(view.parts) == 1 and isinstance(view.parts[0].rows, slice) and view.rows == len(q):
        return _part_attention(q, keys, values, view.parts[0], causal, window, scale)  # alone
    out = q.new_empty(*q.shape[:2], values.shape[-1])
    out[view.rows :] = 0
    for part in view.parts:
        rows = part.rows
        out[rows] = _part_attention(q[rows], keys, values, part, causal, window, scale)
    return out


def _part_attention(
    q: Tensor, keys: Tensor, values: Tensor, part: Part, causal: bool, window: int, scale
) -> Tensor:
    """The same for the rows of one part, in its order: keys, values (P * S, G, D)."""
    heads_first = part.mask is None and _in_products(q)
    k = _taken(keys, part.places, heads_first)  # (N, G, D)
    dim = values.shape[-1]
    if dim < k.shape[-1]:  # PyTorch is fast where both are as long: cut off what is no value
        v = k
    else:
        v = _taken(values, part.places, heads_first)
    if part.mask is None:
        return _attend_tiles(q, k, v, causal, window, scale)[..., :dim]
    heads, (count, _, n, _) = q.shape[1], part.mask.shape
    k, v = (x.unflatten(0, (count, -1)).transpose(1, 2) for x in (k, v))  # (b, G, N, D)
    mask = part.mask if causal else part.mask[:, :, -1:]  # else all see what the last one sees
    if n == 1:
        grouped = q.view(count, k.shape[1], -1, k.shape[-1])
    else:  # (b, G, H / G * n, D): heads that share keys, and their rows, in one product
        grouped = q.view(count, n, k.shape[1], -1, k.shape[-1]).permute(0, 2, 3, 1, 4).flatten(2, 3)
        mask = mask.repeat(1, 1, grouped.shape[2] // mask.shape[2], 1)
    mixed = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale)
    if n > 1:
        mixed = mixed.unflatten(2, (-1, n)).permute(0, 3, 1, 2, 4)
    return mixed.reshape(count * n, heads, -1)[..., :dim]


def _taken(pool: Tensor, places: slice | Tensor, heads_first: bool) -> Tensor:
    """Places of a pool (P * S, G, D) as (N, G, D): copied once, or, where they follow each other,
    not at all. heads_first: (G, N, D) in memory, which is how products read it fastest."""
    if isinstance(places, slice):
        taken = pool[places]
        return taken.transpose(0, 1).contiguous().transpose(0, 1) if heads_first else taken
    if heads_first:
        _, shared, dim = pool.shape
        rows = places * shared + torch.arange(shared)[:, None]  # (G, N)
        taken = pool.flatten(0, 1).index_select(0, rows.flatten())
        return taken.view(shared, -1, dim).transpose(0, 1)
    return pool.flatten(1).index_select(0, places).view(-1, *pool.shape[1:])


def _attention(q: Tensor, keys, values, view: View, causal: bool, window: int, scale) -> Tensor:
    """The same in Triton. A program computes a tile of rows for heads that share keys."""
    T, heads, dim = q.shape
    size, shared, values_dim = values.shape[1:]
    requests = view.spans.shape[0]
    config = attention_config(
        view.most, heads, shared, dim, values_dim, size, q.dtype, causal, window,
        capability(q.device),
    )  # fmt: skip
    *tiles, splits = attention_grid(T, requests, config)
    out = torch.empty(T, heads, values_dim, dtype=q.dtype, device=q.device)
    into, weights = out, None
    if splits > 1:
        into = torch.empty(T, heads, splits, values_dim, dtype=torch.float32, device=q.device)
        weights = torch.empty(T, heads, splits, dtype=torch.float32, device=q.device)
    scale = dim**-0.5 if scale is None else scale
    attention_kernel[(*tiles, splits)](
        q, keys, values, into, weights, view.tables, view.spans, requests,
        scale * LOG2_E, q.stride(0), view.tables.stride(0), SPLITS=splits, **config,
    )  # fmt: skip
    if splits > 1:
        combine_kernel[(T, heads)](into, weights, out, **combine_config(values_dim, splits))
    return out


LOG2_E = 1.4426950408889634  # powers of 2 are what GPUs compute
PROGRAMS = 8 if INTERPRETED else 2 * 132  # two for each processor of an H100


def key_splits(programs: int, block_m: int) -> int:
    """Into how many parts the keys are split, each for a program of its own: few rows do not
    occupy a GPU, however long their contexts. It depends on the shape of the step, never on
    lengths, which a recorded step reads from memory.

    Example: 1 row, 8 key/value heads: 8 programs, so 16 parts; 16 rows: 4; 64 rows: 1.
    """
    if block_m > 16 or programs >= PROGRAMS:
        return 1
    return 4 if 4 * programs >= PROGRAMS else 16


def attention_grid(T: int, requests: int, config: dict) -> tuple[int, int, int]:
    """Tiles of rows, at least as many as there are; of heads; and the splits of their keys."""
    group = config["H"] // config["G"]
    rows = config["BLOCK_M"] // config["HEADS"]
    tiles = requests if config["ONE_ROW"] else T // rows + requests
    heads = config["G"] * ceil_div(group, config["HEADS"])
    return tiles, heads, key_splits(tiles * heads, config["BLOCK_M"])


def attention_config(
    most: int, heads: int, shared: int, dim: int, values: int, size: int, dtype: torch.dtype,
    causal: bool, window: int, arch: int,
) -> dict:  # fmt: skip
    """most: rows of the request that has most of them. values: D of these. arch: see `capability`.

    A tile is as large as the registers hold, 255 a thread. 128 lines by 64 keys of 128 halves
    take 240 where tensor cores read shared memory (90 to 119), and do not fit where they do not.
    """
    group, half = heads // shared, dtype.itemsize == 2
    block_d = max(16, power_of_2(values))
    largest = 32 if not half or values > 256 else 128 if values <= 128 else 64
    lines = power_of_2(group) * (power_of_2(most) if most > 1 else 1)
    block_m = 16 if most == 1 else min(max(16, lines), largest)
    roomy = half and (block_m < 64 or 90 <= arch < 120)
    tile_bytes = 16384 if roomy else 8192  # of keys
    if dim > values:  # which are the values too
        tile_bytes *= 2
    block_n = max(16, min(64, tile_bytes // (block_d * dtype.itemsize)))
    scores, mixed = (8192, 8192) if half else (1024, 4096)  # numbers that 4 warps hold
    wide = block_m * block_n >= scores or block_m * block_d > mixed
    return {
        "H": heads, "G": shared, "D": dim, "VALUES": values, "S": size, "CAUSAL": causal,
        "WINDOW": window, "ONE_ROW": most == 1, "HEADS": min(group, block_m),
        "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_D": block_d,
        "BLOCK_R": max(16, power_of_2(dim - values)) if dim > values else 0,
        "OPERAND": operand(dtype), "num_warps": 8 if wide else 4,
        "num_stages": 3,  # block ids come a round before the keys that they locate
        # Without a limit the compiler sets its own, and spills to fit one more program.
        "maxnreg": 255 if block_m > 16 and block_d <= 64 else None,
    }  # fmt: skip


@jit
def attention_kernel(
    q, keys, values, out, lse, tables, spans, requests, scale, q_stride, table_stride,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, VALUES: tl.constexpr, S: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, ONE_ROW: tl.constexpr, SPLITS: tl.constexpr,
    OPERAND: tl.constexpr, HEADS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(2)
    GROUP: tl.constexpr = H // G
    ROWS: tl.constexpr = BLOCK_M // HEADS
    HEAD_TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    g = tl.program_id(1) // HEAD_TILES
    # Request r has its first tile at row // ROWS + r or later; find the last r for which that
    # is not beyond this tile. Tiles that this counts too many have no rows.
    r = tile
    done = 0  # rows of the request in earlier tiles
    if not ONE_ROW:
        r, beyond = 0, requests
        while beyond - r > 1:
            middle = (r + beyond) // 2
            before = tl.load(spans + middle * 5) // ROWS + middle <= tile
            r = tl.where(before, middle, r)
            beyond = tl.where(before, beyond, middle)
        done = (tile - tl.load(spans + r * 5) // ROWS - r) * ROWS
    row = tl.load(spans + r * 5) + done
    n = tl.load(spans + r * 5 + 1) - done
    position = tl.load(spans + r * 5 + 2) + done
    length = tl.load(spans + r * 5 + 3)
    table = tables + tl.load(spans + r * 5 + 4) * table_stride
    if n > 0:
        # Line m of the tile is row m // HEADS; its query head is one of those that share head g.
        m, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
        i, head = m // HEADS, tl.program_id(1) % HEAD_TILES * HEADS + m % HEADS
        n = min(n, ROWS)
        real = (i < n) & (head < GROUP)
        head += g * GROUP
        lines = real[:, None] & (d < VALUES)[None, :]
        at = (row + i).to(tl.int64) * q_stride + head * D
        x = tl.load(q + at[:, None] + d[None, :], mask=lines, other=0).to(OPERAND)
        if VALUES < D:  # what keys have and values have not
            rest = VALUES + tl.arange(0, BLOCK_R)
            lines_rest = real[:, None] & (rest < D)[None, :]
            x_rest = tl.load(q + at[:, None] + rest[None, :], mask=lines_rest, other=0).to(OPERAND)
        first = 0
        last = min(position + n, length) if CAUSAL else length  # of the keys that a line sees
        if WINDOW:
            first = max(position - WINDOW + 1, 0)
        if SPLITS > 1:
            share = tl.cdiv(tl.cdiv(last - first, SPLITS), BLOCK_N) * BLOCK_N
            first += split * share
            last = min(last, first + share)
        best = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        mixed = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        for start in range(first, last, BLOCK_N):
            key = start + tl.arange(0, BLOCK_N)
            exists = key < last
            block = tl.load(table + key // S, mask=exists, other=0).to(tl.int64)
            place = (block * S + key % S) * (G * D) + g * D
            inside = exists[:, None] & (d < VALUES)[None, :]
            k = tl.load(keys + place[:, None] + d[None, :], mask=inside, other=0).to(OPERAND)
            score = tl.dot(x, tl.trans(k), input_precision="ieee")
            if VALUES < D:
                inside_rest = exists[:, None] & (rest < D)[None, :]
                k_rest = tl.load(keys + place[:, None] + rest[None, :], mask=inside_rest, other=0)
                k_rest = k_rest.to(OPERAND)
                score = tl.dot(x_rest, tl.trans(k_rest), score, input_precision="ieee")
            score *= scale
            seen = exists[None, :]
            if CAUSAL:
                seen &= key[None, :] <= (position + i)[:, None]
            if WINDOW:
                seen &= key[None, :] > (position + i - WINDOW)[:, None]
            score = tl.where(seen, score, float("-inf"))
            higher = tl.maximum(best, tl.max(score, 1))
            finite = tl.where(higher == float("-inf"), 0.0, higher)  # a line may see none here
            weight = tl.exp2(score - finite[:, None])
            shrink = tl.exp2(best - finite)
            best = higher
            total = total * shrink + tl.sum(weight, 1)
            if VALUES < D:
                v = k
            else:
                v = tl.load(values + place[:, None] + d[None, :], mask=inside, other=0).to(OPERAND)
            mixed *= shrink[:, None]
            mixed = tl.dot(weight.to(OPERAND), v, mixed, input_precision="ieee")
        mixed /= tl.where(total == 0, 1.0, total)[:, None]
        line = (row + i).to(tl.int64) * H + head
        if SPLITS > 1:
            line = line * SPLITS + split
            total = tl.where(total == 0, 1.0, total)
            tl.store(lse + line, best + tl.log2(total), mask=real)  # -inf if it saw nothing
        at = line[:, None] * VALUES + d[None, :]
        tl.store(out + at, mixed.to(out.dtype.element_ty), mask=lines)


def combine_config(dim: int, splits: int) -> dict:
    return {"D": dim, "SPLITS": splits, "BLOCK_D": power_of_2(dim), "num_warps": 4}


@jit
def combine_kernel(parts, lse, out, D: tl.constexpr, SPLITS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Each part is the mean of the values it saw; their weights are the sums of exponentials."""
    line = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    s, d = tl.arange(0, SPLITS), tl.arange(0, BLOCK_D)
    weight = tl.load(lse + line * SPLITS + s)
    best = tl.max(weight, 0)
    weight = tl.exp2(weight - tl.where(best == float("-inf"), 0.0, best))
    at = (line * SPLITS + s)[:, None] * D + d[None, :]
    part = tl.load(parts + at, mask=(d < D)[None, :] & (weight > 0)[:, None], other=0)
    total = tl.sum(weight, 0)
    mixed = tl.sum(part * weight[:, None], 0) / tl.where(total == 0, 1.0, total)
    tl.store(out + line * D + d, mixed.to(out.dtype.element_ty), mask=d < D)


TILE = 128  # rows


def _attend_tiles(q: Tensor, k: Tensor, v: Tensor, causal: bool, window=0, scale=None) -> Tensor:
    """`attend` for the rows of one request, TILE at a time: no row meets the keys after its
    tile, which for a whole prompt is nearly half of them, nor those before its window."""
    n, length = len(q), len(k)
    attend_tile = _attend_products if _in_products(q) else attend
    if n <= TILE:
        return attend_tile(q, k, v, causal, window, scale)
    tiles = []
    for row in range(0, n, TILE):
        first = first_seen(length - n + row, window)
        seen = slice(first, min(length - n + row + TILE, length) if causal else length)
        tiles.append(attend_tile(q[row : row + TILE], k[seen], v[seen], causal, window, scale))
    return torch.cat(tiles)


def _in_products(q: Tensor) -> bool:
    low = q.dtype == torch.bfloat16 and q.device.type == "cpu" and multiplies_bfloat16()
    return low and len(q) >= TILE // 2


def _attend_products(q: Tensor, k: Tensor, v: Tensor, causal: bool, window=0, scale=None) -> Tensor:
    """`attend` for many bfloat16 rows, in products that oneDNN multiplies five times as fast as
    PyTorch's attention does. A product is rounded to bfloat16; a second one, from which the
    first is subtracted before rounding, is what the rounding took, and both are the score."""
    n, heads, dim = q.shape
    length, shared, _ = k.shape
    keys, values = k.permute(1, 2, 0), v.transpose(0, 1)  # (G, D, N), (G, N, D)
    q = q.view(n, shared, -1, dim).permute(1, 2, 0, 3).reshape(shared, -1, dim)  # (G, H / G * n, D)
    product = torch.bmm(q, keys)
    rest = torch.baddbmm(product, q, keys, beta=-1)
    scores = product.float().add_(rest).mul_(dim**-0.5 if scale is None else scale)
    by_row = scores.view(shared, -1, n, length)
    if causal:
        later = torch.ones(n, n, dtype=torch.bool).triu(1)
        by_row[..., length - n :].masked_fill_(later, -torch.inf)
    if window:
        gone = torch.ones(n, length, dtype=torch.bool).tril(length - n - window)
        by_row.masked_fill_(gone, -torch.inf)
    mixed = torch.bmm(scores.softmax(-1).to(q.dtype), values)
    return mixed.view(shared, -1, n, mixed.shape[-1]).permute(2, 0, 1, 3).reshape(n, heads, -1)


# ---------------------------------------------------------------- sparse attention


def sparse_attention(
    q: Tensor, keys: Tensor, values: Tensor, view: View, index_q: Tensor, index_keys: Tensor,
    index_weights: Tensor, top: int, scale: float | None = None,
) -> Tensor:  # fmt: skip
    """`attention` in which each row reads the `top` tokens that an index chooses among those it
    sees, see `choose` (DeepSeek-AI 2512.02556).

    index_q (T, Hi, Di), index_keys (P, S, Di), index_weights (T, Hi). Every index key is read,
    but of keys and values only what is chosen.
    """
    if on_triton(q):
        return _sparse(q, keys, values, view, index_q, index_keys, index_weights, top, scale)
    keys, values, index_keys = (x.flatten(0, 1) for x in (keys, values, index_keys))
    out = q.new_zeros(*q.shape[:2], values.shape[-1])
    for whole in view.parts:
        for part in _chosen_parts(whole, index_q, index_keys, index_weights, top, q.dtype):
            rows = part.rows
            out[rows] = _part_attention(q[rows], keys, values, part, True, 0, scale)
    return out


CHOOSING = 16  # rows that together read what they have chosen


def _chosen_parts(whole: Part, q: Tensor, keys: Tensor, weights: Tensor, top: int, dtype):
    """A part as parts of few rows, each with the places that they have chosen."""
    rows = torch.arange(len(q), device=q.device)[whole.rows]
    keys = _taken(keys, whole.places, False).float()
    places = whole.places
    if isinstance(places, slice):
        places = torch.arange(places.start, places.stop, device=q.device)
    count, n = (1, len(rows)) if whole.mask is None else (len(whole.mask), whole.mask.shape[2])
    keys = keys.view(count, 1, -1, keys.shape[-1]).expand(-1, n, -1, -1).flatten(0, 1)
    places = places.view(count, 1, -1).expand(-1, n, -1).flatten(0, 1)  # (rows, N)
    length = places.shape[1]
    if length <= top:
        yield whole
        return
    for i in range(0, len(rows), CHOOSING):
        tile = rows[i : i + CHOOSING]
        each = zip(q[tile], keys[i:], weights[tile])
        scores = torch.cat([index_scores(x[None], k, w[None]) for x, k, w in each])
        if whole.mask is None:
            later = torch.ones_like(scores, dtype=torch.bool).triu(length - len(rows) + i + 1)
            scores.masked_fill_(later, -torch.inf)
        else:
            scores += whole.mask.flatten(0, 2)[i : i + CHOOSING]
        best = best_of(scores, top)
        hidden = scores.gather(1, best) == -torch.inf
        yield _masked(
            tile, places[i : i + CHOOSING].gather(1, best), hidden, torch.zeros_like(tile), dtype
        )


def best_of(scores: Tensor, top: int) -> Tensor:
    """Where the `top` highest of scores (n, N) in float32 are, the highest first, of equal ones
    the older: (n, top). Their bits after the sign are integers of the same order."""
    bits = scores.view(torch.int32).long()
    size = bits & 0x7FFFFFFF
    order = torch.where(bits < 0, -size, size) << 32  # -0.0 is 0
    order -= torch.arange(scores.shape[1], device=scores.device)
    return order.topk(min(top, scores.shape[1])).indices


def _sparse(
    q, keys, values, view: View, index_q, index_keys, index_weights, top: int, scale
) -> Tensor:  # fmt: skip
    """The same in Triton: every row is a request of its own, whose table is the places that it
    has chosen, as blocks of one token."""
    T, size = len(q), keys.shape[1]
    row = torch.arange(T, dtype=torch.int32, device=q.device)
    request = torch.searchsorted(view.spans[:, 0].contiguous(), row, right=True) - 1
    first, _, position, length, line = view.spans[request].T.contiguous()
    seen = torch.minimum(position + row - first + 1, length)
    width = view.tables.shape[1] * size
    chosen = []
    config = index_config(*index_q.shape[1:], size, q.dtype)
    weights = index_weights.contiguous()
    step = max(1, SCORES // width)
    for i in range(0, T, step):
        rows = slice(i, min(i + step, T))
        count = rows.stop - i
        scores = torch.empty(count, width, dtype=torch.float32, device=q.device)
        index_kernel[(count, ceil_div(width, config["BLOCK_N"]))](
            index_q[rows], index_keys, weights[rows], scores, view.tables, line[rows], seen[rows],
            index_q.stride(0), view.tables.stride(0), width, **config,
        )  # fmt: skip
        best = best_of(scores, top)
        block = view.tables[line[rows]].gather(1, best // size)
        chosen.append((block * size + best % size).int())
    places = torch.cat(chosen)  # (T, top)
    one, length = torch.ones_like(row), seen.clamp(max=top)
    spans = torch.stack((row, one, position, length, row), 1)
    alone = View(view.slots, T, 1, [], spans, places)
    keys, values = (x.flatten(0, 1)[:, None] for x in (keys, values))  # (P * S, 1, 1, D)
    return _attention(q, keys, values, alone, False, 0, scale)


SCORES = 2**23  # numbers that are ordered at once


def index_config(heads: int, dim: int, size: int, dtype: torch.dtype) -> dict:
    block_m = min(max(16, power_of_2(heads)), 64 if dtype.itemsize == 2 else 16)
    return {
        "H": heads, "D": dim, "S": size, "OPERAND": operand(dtype), "BLOCK_M": block_m,
        "BLOCK_N": 64 if dtype.itemsize == 2 else 32, "BLOCK_D": max(16, power_of_2(dim)),
        "num_warps": 4, "num_stages": 1,  # with more, float32 spills
    }  # fmt: skip


@jit
def index_kernel(
    q, keys, index_weights, scores, tables, lines, lengths, q_stride, table_stride, width,
    H: tl.constexpr, D: tl.constexpr, S: tl.constexpr, OPERAND: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Scores of a row and some keys: -inf of those that it does not see."""
    row = tl.program_id(0).to(tl.int64)
    first, length = tl.program_id(1) * BLOCK_N, tl.load(lengths + row)
    key, d = first + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    exists = key < length
    table = tables + tl.load(lines + row) * table_stride
    block = tl.load(table + key // S, mask=exists, other=0).to(tl.int64)
    place = (block * S + key % S) * D
    inside = exists[:, None] & (d < D)[None, :]
    k = tl.load(keys + place[:, None] + d[None, :], mask=inside, other=0).to(OPERAND)
    score = tl.where(exists, 0.0, float("-inf"))
    for start in range(0, tl.where(first < length, H, 0), BLOCK_M):  # none where it sees none
        h = start + tl.arange(0, BLOCK_M)
        at = row * q_stride + h[:, None] * D + d[None, :]
        x = tl.load(q + at, mask=(h < H)[:, None] & (d < D)[None, :], other=0).to(OPERAND)
        weight = tl.load(index_weights + row * H + h, mask=h < H, other=0)
        product = tl.dot(x, tl.trans(k), input_precision="ieee")
        score += tl.sum(tl.maximum(product, 0.0) * weight[:, None], 0)
    tl.store(scores + row * width + key, score, mask=key < width)


# ---------------------------------------------------------------- linear attention


def convolve(x: Tensor, weight: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """A short causal convolution of each channel, then silu, in plain PyTorch, of one request.

    x (n, C), weight (C, K), before (K - 1, C): the inputs before x. Gives (n, C), and the last
    K - 1 inputs. The last weight is for a row's own input.
    """
    inputs = torch.cat((before, x))
    out = F.conv1d(inputs.T[None].float(), weight[:, None].float(), groups=len(weight))
    return F.silu(out[0].T).to(x.dtype), inputs[len(x) :]


def delta_rule(q, k, v, g, beta, state: Tensor) -> tuple[Tensor, Tensor]:
    """The gated delta rule (Yang et al. 2412.06464), a token at a time, of one request.

    q, k (n, Hk, dk), v (n, H, dv), g (n, H) the logarithm of the decay, beta (n, H), state
    (H, dk, dv) in float32 -> (n, H, dv) and the state after the last row. A state is a matrix
    from keys to values: it fades, then what it answers to k moves by beta towards v.
    q and k are made unit vectors here; heads of v that share one of k are neighbours.
    """
    heads, dk = v.shape[1], k.shape[-1]
    q, k = (unit(x).repeat_interleave(heads // x.shape[1], 1) for x in (q, k))
    rows = []
    for q_t, k_t, v_t, g_t, beta_t in zip(q * dk**-0.5, k, v.float(), g.float(), beta.float()):
        state = state * g_t.exp()[:, None, None]
        error = v_t - torch.einsum("hkv,hk->hv", state, k_t)
        state = state + torch.einsum("hk,hv->hkv", k_t, beta_t[:, None] * error)
        rows.append(torch.einsum("hkv,hk->hv", state, q_t))
    return torch.stack(rows).to(v.dtype), state


def unit(x: Tensor) -> Tensor:
    """x / sqrt(sum(x^2) + 1e-6) over the last dimension, in float32."""
    x = x.float()
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


@dataclass(frozen=True)
class StatePart:
    """Requests with the same number of rows, which one call computes."""

    rows: Tensor  # (b, n) int64: of x
    read: Tensor  # (b,) int64: ids of states
    write: Tensor


@dataclass(frozen=True)
class StateView:
    """What a step's rows are to the states of linear layers: `View`, where each request has a
    state instead of tokens. A state is read as it was before the step, and written elsewhere."""

    rows: int  # that are no padding
    most: int = 1  # rows of the request that has most
    parts: list[StatePart] = field(default_factory=list)  # for PyTorch
    spans: Tensor | None = None  # (B, 4) int32, for Triton: row, rows, state read, state written


class StateLayout:
    """Makes StateViews, in buffers allocated once at the limits. requests: at once."""

    def __init__(self, requests: int, device: torch.device):
        self.spans = Buffer(requests * 4, device, torch.int32)
        self.triton = on_triton(self.spans.tensor)

    def view(self, tables: list[list[int]], spans, padded: int = 0) -> StateView:
        """The StateView of requests with tables [read, write], two ids of states, and spans
        [(row, n, position)]. State 0 is the one before any token, and nobody writes it.
        `padded` rows are added that do nothing."""
        rows, most = sum(n for _, n, _ in spans), max((n for _, n, _ in spans), default=1)
        lines = [(row, n, *table) for (row, n, _), table in zip(spans, tables)]
        assert all(read != write > 0 for _, _, read, write in lines), f"states {tables}"
        if self.triton:
            lines += [(row, 1, 0, -1) for row in range(rows, rows + padded)]
            flat = [x for line in lines for x in line]
            return StateView(rows, most, [], self.spans.fill(flat).view(-1, 4))
        alike: dict[int, list[tuple[int, int, int]]] = {}  # rows -> requests
        for row, n, read, write in lines:
            alike.setdefault(n, []).append((row, read, write))
        parts, device = [], self.spans.tensor.device
        for n, found in alike.items():
            row, read, write = torch.tensor(found, device=device).unbind(1)
            parts.append(StatePart(row[:, None] + torch.arange(n, device=device), read, write))
        return StateView(rows, most, parts)


def conv(x: Tensor, weight: Tensor, pool: Tensor, view: StateView) -> Tensor:
    """`convolve` of each request of a step: x (T, C), weight (C, K) -> (T, C). A state of the
    pool (N, K - 1, C) is a request's last inputs. Padded rows give 0. x may be columns of a
    wider tensor."""
    if on_triton(x):
        return _conv(x, weight, pool, view)
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    taps = weight.float().T.contiguous()  # the oldest input first
    for part in view.parts:
        inputs = torch.cat((pool[part.read], x[part.rows]), 1)  # (b, K - 1 + n, C)
        n = part.rows.shape[1]
        wide = inputs.float()
        total = sum(wide[:, j : j + n] * tap for j, tap in enumerate(taps))
        out[part.rows] = F.silu(total).to(x.dtype)
        pool[part.write] = inputs[:, n:]
    return out


def _conv(x: Tensor, weight: Tensor, pool: Tensor, view: StateView) -> Tensor:
    (T, C), requests = x.shape, view.spans.shape[0]
    out = torch.empty(T, C, dtype=x.dtype, device=x.device)
    config = conv_config(weight.shape[1], view.most)
    conv_kernel[(T, ceil_div(C, config["BLOCK"]))](
        x, weight, pool, out, view.spans, requests, C, x.stride(0), **config
    )
    return out


def conv_config(inputs: int, most: int) -> dict:
    return {"K": inputs, "ONE_ROW": most == 1, "BLOCK": 512, "num_warps": 4}


@jit
def conv_kernel(
    x, weight, pool, out, spans, requests, width, x_stride,
    K: tl.constexpr, ONE_ROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    r = row
    if not ONE_ROW:  # the last request that does not begin after this row
        r, beyond = 0, requests
        while beyond - r > 1:
            middle = (r + beyond) // 2
            before = tl.load(spans + middle * 4) <= row
            r = tl.where(before, middle, r)
            beyond = tl.where(before, beyond, middle)
    i = row - tl.load(spans + r * 4)  # this row is number i of n
    n = tl.load(spans + r * 4 + 1)
    read = tl.load(spans + r * 4 + 2).to(tl.int64)
    write = tl.load(spans + r * 4 + 3).to(tl.int64)
    x += row.to(tl.int64) * x_stride + c
    inside = c < tl.where(write >= 0, width, 0)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(K):
        if i + j >= K - 1:
            given = tl.load(x + (j + 1 - K) * x_stride, mask=inside, other=0)
        else:
            given = tl.load(pool + (read * (K - 1) + i + j) * width + c, mask=inside, other=0)
        if j > 0 and i == n - 1:  # the last row's inputs but its first are the new state
            tl.store(pool + (write * (K - 1) + j - 1) * width + c, given, mask=inside)
        tap = tl.load(weight + c * K + j, mask=c < width, other=0)
        total += given.to(tl.float32) * tap.to(tl.float32)
    total *= tl.sigmoid(total)
    tl.store(out + row.to(tl.int64) * width + c, total.to(out.dtype.element_ty), mask=c < width)


CHUNK = 64  # rows that the PyTorch body computes at once


def recur(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, pool: Tensor, view: StateView
) -> Tensor:
    """`delta_rule` of each request of a step: q, k (T, HK, DK), v (T, H, DV), g, beta (T, H)
    float32 -> (T, H, DV). A state of the pool (N, H, DK, DV), float32, is a request's matrices.
    Padded rows give 0. A row of q, k and v may lie in a wider one.

    A decode reads and writes a state, and multiplies and adds thrice with each number of it. A
    prompt's rows go through in chunks (Yang et al. 2406.06484), so that these are products.
    """
    if on_triton(v):
        return _recur(q, k, v, g, beta, pool, view)
    out = torch.zeros(v.shape, dtype=v.dtype, device=v.device)
    for part in view.parts:
        state = pool[part.read]
        for rows in part.rows.split(CHUNK, 1):
            given = (x[rows].transpose(1, 2).float() for x in (q, k, v, g, beta))
            mixed, state = _delta_chunk(*given, state)
            out[rows] = mixed.transpose(1, 2).to(v.dtype)
        pool[part.write] = state
    return out


def _delta_chunk(q, k, v, g, beta, state: Tensor) -> tuple[Tensor, Tensor]:
    """The gated delta rule for n rows of b requests at once: q, k (b, HK, n, DK), v (b, H, n, DV),
    g, beta (b, H, n), state (b, H, DK, DV) -> (b, H, n, DV) and the state after the last row.

    Row t adds k[t] u[t] to the state. With fades[t, s], the decays after s up to t, and fade[t],
    those of the state before, u[t] = beta[t] (v[t] - fade[t] k[t] state
    - sum over s < t of fades[t, s] (k[t] . k[s]) u[s]): triangular, solved from its first row on.
    """
    n, shared = k.shape[2], k.shape[1]
    q, k = unit(q)[:, :, None] * k.shape[-1] ** -0.5, unit(k)[:, :, None]  # (b, HK, 1, n, DK)
    v, total, beta, state = (x.unflatten(1, (shared, -1)) for x in (v, g, beta, state))
    total = total.double().cumsum(-1)  # in which a small decay outlives large ones before it
    between = (total[..., None] - total[..., None, :]).float()
    later = torch.ones(n, n, dtype=torch.bool, device=k.device).triu(1)
    fades = between.masked_fill_(later, -torch.inf).exp_()  # (b, HK, H / HK, n, n)
    fade, beta = total.exp().float()[..., None], beta[..., None]
    by_key, by_query = (torch.cat((k, q), -2) @ state).chunk(2, -2)  # one pass over the state
    u = beta * (v - fade * by_key)
    if n > 1:
        system = beta * fades * (k @ k.mT)  # its diagonal is taken for 1
        u = torch.linalg.solve_triangular(system, u, upper=False, unitriangular=True)
    out = fade * by_query + fades * (q @ k.mT) @ u
    k, faded = fades[..., -1, :, None] * k, fade[..., -1:, :] * state
    faded.flatten(0, 2).baddbmm_(k.mT.flatten(0, 2), u.flatten(0, 2))
    return out.flatten(1, 2), faded.flatten(1, 2)


def _recur(q, k, v, g, beta, pool: Tensor, view: StateView) -> Tensor:
    (T, heads, dv), (shared, dk) = v.shape, k.shape[1:]
    config = recur_config(view.most, shared, heads, dk, dv, v.dtype)
    out = torch.empty(T, heads, dv, dtype=v.dtype, device=v.device)
    recur_kernel[(view.spans.shape[0], heads, ceil_div(dv, config["BLOCK_V"]))](
        q, k, v, g.contiguous(), beta.contiguous(), pool, out, view.spans,
        q.stride(0), k.stride(0), v.stride(0), **config,
    )  # fmt: skip
    return out


FEW = 8  # rows that go one by one: a chunk of fewer is mostly padding


def recur_config(most: int, shared: int, heads: int, dk: int, dv: int, dtype: torch.dtype) -> dict:
    """16 rows in half precision and 32 columns of a state are what the registers hold. Products
    with float32 are in TF32, Triton's default: all bits of q and k, 11 of a state. A result is
    then off by up to 0.0018 of itself, as bfloat16's rounding alone is, after 64 rows and after
    8,192, and with keys that are all alike. Rows in float32 go one by one, in float32.
    (No GPU has run this yet.)"""
    chunked = most > FEW and (dtype.itemsize == 2 or INTERPRETED)
    return {
        "HK": shared, "H": heads, "DK": dk, "DV": dv, "CHUNK": 16 if chunked else 0, "FEW": FEW,
        "OPERAND": operand(dtype), "BLOCK_K": max(16, power_of_2(dk)),
        "BLOCK_V": max(16, min(32, power_of_2(dv))), "num_warps": 4,
    }  # fmt: skip


@jit
def recur_kernel(
    q, k, v, g, beta, pool, out, spans, q_stride, k_stride, v_stride,
    HK: tl.constexpr, H: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    CHUNK: tl.constexpr, FEW: tl.constexpr, OPERAND: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    r, h = tl.program_id(0), tl.program_id(1)
    a, b = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    row = tl.load(spans + r * 4).to(tl.int64)
    n = tl.load(spans + r * 4 + 1)
    read = tl.load(spans + r * 4 + 2).to(tl.int64)
    write = tl.load(spans + r * 4 + 3).to(tl.int64)
    q += row * q_stride + h // (H // HK) * DK
    k += row * k_stride + h // (H // HK) * DK
    v += row * v_stride + h * DV
    g += row * H + h
    beta += row * H + h
    out += (row * H + h) * DV
    if write < 0:  # padding
        tl.store(out + b, tl.zeros((BLOCK_V,), out.dtype.element_ty), mask=b < DV)
    else:
        at = h * (DK * DV) + a[:, None] * DV + b[None, :]
        inside = (a < DK)[:, None] & (b < DV)[None, :]
        state = tl.load(pool + read * (H * DK * DV) + at, mask=inside, other=0)
        done = 0
        if CHUNK:  # as in _delta_chunk; rows beyond n are 0 and change nothing
            i = tl.arange(0, CHUNK)
            t, s = i[:, None], i[None, :]
            while n - done >= FEW:
                j = done + i
                exists = j < n
                total = tl.cumsum(tl.load(g + j * H, mask=exists, other=0).to(tl.float64), 0)
                end = tl.sum(tl.where(i == CHUNK - 1, total, 0.0), 0)
                between = (total[:, None] - total[None, :]).to(tl.float32)
                fade = tl.exp(total.to(tl.float32))
                rate = tl.load(beta + j * H, mask=exists, other=0)
                inner = exists[:, None] & (a < DK)[None, :]
                y = tl.load(k + (j * k_stride)[:, None] + a[None, :], mask=inner, other=0)
                wide = y.to(tl.float32)
                y_unit = 1 / tl.sqrt(tl.sum(wide * wide, 1) + 1e-6)
                by_state = tl.dot(wide, state)
                y = y.to(OPERAND)
                fades = tl.exp(tl.where(s <= t, between, float("-inf"))) * y_unit[None, :]
                system = tl.dot(y, tl.trans(y)) * fades
                system *= (rate * y_unit)[:, None]
                # Inverted, with ones on the diagonal, from blocks of 1, 2, 4 and 8: two inverses
                # and the block B below them make one, in which B is -inverse B inverse.
                inverse = tl.where(s == t, 1.0, 0.0)
                for level in tl.static_range(4):
                    pair = ((s >> level) + 1 == (t >> level)) & ((t >> level) % 2 == 1)
                    below = tl.where(pair, system, 0.0)
                    if level > 0:
                        below = tl.dot(inverse, below)
                        below = tl.dot(below, inverse)
                    inverse -= below
                outer = exists[:, None] & (b < DV)[None, :]
                u = tl.load(v + (j * v_stride)[:, None] + b[None, :], mask=outer, other=0)
                u = (u.to(tl.float32) - by_state * (fade * y_unit)[:, None]) * rate[:, None]
                u = tl.dot(inverse, u)
                x = tl.load(q + (j * q_stride)[:, None] + a[None, :], mask=inner, other=0)
                wide = x.to(tl.float32)
                x_unit = DK**-0.5 / tl.sqrt(tl.sum(wide * wide, 1) + 1e-6)
                mixed = tl.dot(wide, state) * fade[:, None]
                scores = tl.dot(x.to(OPERAND), tl.trans(y)) * fades
                mixed = tl.dot(scores, u, mixed) * x_unit[:, None]
                places = out + (j * (H * DV))[:, None] + b[None, :]
                tl.store(places, mixed.to(out.dtype.element_ty), mask=outer)
                u *= (y_unit * tl.exp((end - total).to(tl.float32)))[:, None]
                state *= tl.exp(end.to(tl.float32))
                # On its side: warps, which share columns of u, would not share rows of the state.
                y = y.to(tl.float32)
                state += tl.trans(tl.dot(tl.trans(u), y))
                done += CHUNK
        for j in range(done, n):
            x = tl.load(q + j * q_stride + a, mask=a < DK, other=0).to(tl.float32)
            y = tl.load(k + j * k_stride + a, mask=a < DK, other=0).to(tl.float32)
            x *= DK**-0.5 / tl.sqrt(tl.sum(x * x, 0) + 1e-6)
            y *= 1 / tl.sqrt(tl.sum(y * y, 0) + 1e-6)
            state *= tl.exp(tl.load(g + j * H))
            u = tl.load(v + j * v_stride + b, mask=b < DV, other=0).to(tl.float32)
            u = (u - tl.sum(state * y[:, None], 0)) * tl.load(beta + j * H)
            state += y[:, None] * u[None, :]
            mixed = tl.sum(state * x[:, None], 0)
            tl.store(out + j * (H * DV) + b, mixed.to(out.dtype.element_ty), mask=b < DV)
        tl.store(pool + write * (H * DK * DV) + at, state, mask=inside)


# ---------------------------------------------------------------- experts


def experts(x: Tensor, chosen: Tensor, weights: Tensor, gate_up, down) -> Tensor:
    """Each row through the experts chosen for it, their results weighted and added: (T, E).

    x (T, E); chosen, weights (T, K): experts of a row and their shares. gate_up (X, 2 F, E) and
    down (X, E, F), one Packed for each expert where Triton does not run (Shazeer 2017).
    """
    if on_triton(x):
        return _experts(x, chosen, weights, gate_up, down)
    out = torch.zeros_like(x)
    for expert in chosen.unique().tolist():
        rows, place = (chosen == expert).nonzero(as_tuple=True)
        inner = silu_mul(linear(x[rows], gate_up[expert]))
        out.index_add_(0, rows, linear(inner, down[expert]) * weights[rows, place, None])
    return out


def _experts(x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The same in Triton: (row, choice) pairs sorted by expert, in tiles of one expert each.

    Every shape depends on T alone, as a captured graph needs it: there are as many tiles as the
    worst case has, and those that are too many are empty.
    """
    (T, K), X = chosen.shape, len(gate_up)
    pairs = T * K
    block = experts_block(pairs, X)
    flat = chosen.flatten()
    order = flat.argsort(stable=True)  # pair = row * K + choice
    sizes = (flat[:, None] == torch.arange(X, device=x.device)).sum(0)
    counts = (sizes + (block - 1)) // block
    ends, tile_ends = sizes.cumsum(0), counts.cumsum(0)
    tile = torch.arange(min(pairs, pairs // block + X), device=x.device)
    expert = torch.searchsorted(tile_ends, tile, right=True).clamp(max=X - 1)
    first = (ends - sizes - (tile_ends - counts) * block)[expert] + tile * block
    tiles = torch.stack((expert, first, ends[expert]), 1).int()
    inner = silu_mul(_grouped(x, gate_up, order, tiles, K, None, block))  # (T * K, F)
    shares = weights.flatten().contiguous()
    return _grouped(inner, down, order, tiles, 1, shares, block).view(T, K, -1).sum(1)


def _grouped(x: Tensor, weight: Tensor, order: Tensor, tiles: Tensor, uses: int, shares, block):
    """Row pair // uses of x times its expert's weight (X, out, in), for all pairs: (pairs, out)."""
    width = weight.shape[1]
    out = torch.empty(len(order), width, dtype=x.dtype, device=x.device)
    config = experts_config(weight.shape[2], width, uses, shares is not None, block, x.dtype)
    experts_kernel[(len(tiles), ceil_div(width, config["BLOCK_N"]))](
        x, weight, shares, out, order, tiles, **config
    )
    return out


def experts_block(pairs: int, experts: int) -> int:
    """Rows of a tile: few where the mean expert has few."""
    return 16 if pairs <= 16 * experts else 64


def experts_config(
    inner: int, width: int, uses: int, shared: bool, block: int, dtype: torch.dtype
) -> dict:
    """Tiles are what fits the registers."""
    block_n, block_k = (64, 64) if dtype.itemsize == 2 else (64, 32) if block == 16 else (32, 16)
    return {
        "IN": inner, "OUT": width, "USES": uses, "SHARES": shared, "BLOCK_M": block,
        "BLOCK_N": block_n, "BLOCK_K": block_k, "OPERAND": operand(dtype),
        "num_warps": 4, "num_stages": 3,
    }  # fmt: skip


@jit
def experts_kernel(
    x, weight, shares, out, order, tiles,
    IN: tl.constexpr, OUT: tl.constexpr, USES: tl.constexpr, SHARES: tl.constexpr,
    OPERAND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile = tiles + tl.program_id(0) * 3
    expert, first, last = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    if first < last:
        m = first + tl.arange(0, BLOCK_M)
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        pair = tl.load(order + m, mask=m < last, other=0)
        lines = x + (pair // USES * IN)[:, None]  # x itself keeps its type in a branch
        columns = weight + expert * OUT * IN + n[:, None] * IN
        product = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, IN, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)[None, :]
            a = tl.load(lines + k, mask=(m < last)[:, None] & (k < IN), other=0)
            b = tl.load(columns + k, mask=(n < OUT)[:, None] & (k < IN), other=0)
            product = tl.dot(
                a.to(OPERAND), tl.trans(b.to(OPERAND)), product, input_precision="ieee"
            )
        if SHARES:
            product *= tl.load(shares + pair, mask=m < last, other=0).to(tl.float32)[:, None]
        inside = (m < last)[:, None] & (n < OUT)[None, :]
        at = out + pair[:, None] * OUT + n[None, :]
        tl.store(at, product.to(out.dtype.element_ty), mask=inside)


# ---------------------------------------------------------------- sampling


def allow(scores: Tensor, words: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """scores (R, V) in float32, with -inf wherever a grammar forbids an id.

    words (K, W) int32: bit i of word w allows id 32 * w + i, V ids rounded up to whole words; its
    row k is for row rows[k] of scores, and rows ascend. Rows that are not named have no grammar
    and stay as they are. NaN and infinity become no number that could be drawn. Also what that
    took, (K, 2) float32: the probability of all that was forbidden, and 1 where the likeliest id
    was among it, else 0.

    Example: scores ln [.5 .3 .2] and bits 0b110: -inf, ln .3, ln .2; took .5 and 1.
    """
    assert words.shape[1] == ceil_div(scores.shape[1], 32), f"{words.shape} for {scores.shape}"
    if not on_triton(scores):
        return _allow(scores, words, rows)
    out = torch.empty(scores.shape, dtype=torch.float32, device=scores.device).copy_(scores)
    took = torch.empty(len(rows), 2, dtype=torch.float32, device=scores.device)
    allow_kernel[(len(rows),)](out, words, rows, took, scores.shape[1], **ALLOW)
    return out, took


def _allow(scores: Tensor, words: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    scores, every = scores.float(), len(rows) == len(scores)
    before = scores if every else scores[rows]
    # A byte is eight ids: to look them up is faster than to shift bits and to choose by them.
    eights = words.view(torch.uint8).int()
    forbidden, bans = (
        F.embedding(eights, table).flatten(1)[:, : scores.shape[1]] for table in (FORBIDDEN, BANS)
    )
    after = before + bans
    mass = torch.linalg.vecdot(before.softmax(-1), forbidden)
    took = torch.stack((mass, (after.amax(-1) < before.amax(-1)).float()), 1)
    return after if every else scores.index_copy(0, rows, after), took


FORBIDDEN = 1.0 - (torch.arange(256)[:, None] >> torch.arange(8) & 1)  # of a byte's eight ids
BANS = torch.where(FORBIDDEN > 0, -torch.inf, 0.0)
ALLOW = {"BLOCK": 2048, "num_warps": 8}


@jit
def allow_kernel(out, words, rows, took, V, BLOCK: tl.constexpr):
    k = tl.program_id(0).to(tl.int64)
    out += tl.load(rows + k) * V
    words += k * ((V + 31) // 32)
    best, left = float("-inf"), float("-inf")  # the largest score, and the largest allowed one
    for start in range(0, V, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(out + i, mask=i < V, other=float("-inf"))
        allowed = (tl.load(words + i // 32, mask=i < V, other=0) >> i % 32) & 1
        best = tl.maximum(best, tl.max(x, 0))
        left = tl.maximum(left, tl.max(tl.where(allowed == 1, x, float("-inf")), 0))
    total, forbidden = tl.zeros((), tl.float32), tl.zeros((), tl.float32)
    for start in range(0, V, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(out + i, mask=i < V, other=float("-inf"))
        allowed = (tl.load(words + i // 32, mask=i < V, other=0) >> i % 32) & 1
        share = tl.exp(x - best)
        total += tl.sum(share, 0)
        forbidden += tl.sum(tl.where(allowed == 1, 0.0, share), 0)
        tl.store(out + i, x + float("-inf"), mask=(i < V) & (allowed == 0))  # NaN: as it is
    tl.store(took + k * 2, forbidden / total)
    tl.store(took + k * 2 + 1, (left < best).to(tl.float32))


def draw(scaled: Tensor, columns: Tensor, keys: Tensor, top_k: Tensor, first: Tensor) -> Tensor:
    """The Triton body of `sample._draw`: the winner among the kept ids of each row, (R,) int64.

    scaled (R, V) float32, 0 for the best id, which is `first` (R, 1). columns (R, 4) float32: the
    noise floor, the log of what probabilities are shares of, top-p, and the log of min-p. keys
    (R, 1, 2) int32 make the noise; top_k (R, 1) int64. A program searches its row for the
    winner, and if top-k, top-p or min-p leave it out, for the winner of what ranks before it:
    nothing is sorted, and nothing read back.
    """
    R, V = scaled.shape
    ids = torch.empty(R, dtype=torch.int64, device=scaled.device)
    draw_kernel[(R,)](scaled, columns, keys, top_k, first, ids, V, **DRAW)
    return ids


DRAW = {"BLOCK": 2048, "num_warps": 16}


@jit
def draw_kernel(scaled, columns, keys, top_k, first, ids, V, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    scaled += row * V
    floor, total = tl.load(columns + row * 4), tl.load(columns + row * 4 + 1)
    top_p, least = tl.load(columns + row * 4 + 2), tl.load(columns + row * 4 + 3)
    best, most = tl.load(first + row), tl.load(top_k + row)
    key, odd_key = tl.load(keys + row * 2), tl.load(keys + row * 2 + 1) | 1
    winner = tl.zeros((), tl.int64)
    value = tl.zeros((), tl.float32) - 100  # ids that rank before (value, winner) are in question
    searching = True
    while searching:
        limit, limit_id, winner = value, winner, best
        record = tl.zeros((), tl.float64) - 1e9
        for start in range(0, V, BLOCK):
            i = start + tl.arange(0, BLOCK)
            x = tl.load(scaled + i, mask=i < V, other=-60)
            bits = mix32(mix32(i) * odd_key + key)
            # As in sample._contenders: what cannot win needs no logarithm.
            able = bits.to(tl.float32) * -(2.0**-32) + (0.5 - 2.0**-20) <= tl.exp(x - floor)
            able &= (i < V) & ((x > limit) | ((x == limit) & (i < limit_id)))
            if tl.max(able.to(tl.int32), 0) > 0:
                uniform = ((bits.to(tl.float64) + 2147483648.0) * 2 + 1) / 8589934592.0
                noisy = tl.where(able, x.to(tl.float64) - tl.log(-tl.log(uniform)), -1e9)
                top = tl.max(noisy, 0)
                if top > record:
                    winner = tl.min(tl.where(noisy == top, i, V), 0).to(tl.int64)
                    record = top
        value = tl.load(scaled + winner)
        mass, count = tl.zeros((), tl.float32), tl.zeros((), tl.int64)
        for start in range(0, V, BLOCK):
            i = start + tl.arange(0, BLOCK)
            x = tl.load(scaled + i, mask=i < V, other=-60)
            before = (i < V) & ((x > value) | ((x == value) & (i < winner)))
            mass += tl.sum(tl.where(before, tl.exp(x - total), 0.0), 0)
            count += tl.sum(before.to(tl.int64), 0)
        kept = ((mass < top_p) | (top_p >= 1)) & (count < most) & (value >= least)
        searching = (kept | (winner == best)) == 0
    tl.store(ids + row, winner)


@jit
def mix32(x):
    """sample._mix32."""
    x ^= x >> 16 & 0xFFFF
    x *= 0x7FEB352D
    x ^= x >> 15 & 0x1FFFF
    x *= -0x7B935975
    return x ^ (x >> 16 & 0xFFFF)


# ---------------------------------------------------------------- graphs


RECORDED = 512  # rows of the largest recording: a larger step computes longer than it launches


def graph_sizes(most: int) -> tuple[int, ...]:
    """Rows of the decode steps that are recorded: 1, 2, 4, 8, then by 8, from 64 on by 16.

    Example: 40: 1, 2, 4, 8, 16, 24, 32, 40. 0: none.
    """
    most = min(most, RECORDED)
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, most, 16)]
    return tuple(size for size in steps if size < most) + (most,) * (most > 0)


class Graphs:
    """A callable of a step that replays a recording of itself where it has one.

    A decode step of few rows spends its time launching kernels. Padded to one of `sizes`, its
    shapes and buffers are always the same, so a GPU can record the launches once and replay them
    as one (CUDA graphs). Elsewhere a replay is a call.
    """

    def __init__(self, run, device: torch.device, sizes: tuple[int, ...] = ()):
        self.run, self.device, self.sizes = run, device, sizes
        self.recorded: dict[int, tuple] = {}
        self.stream = None  # on which steps are recorded: one, and of this device

    def __call__(self, step) -> list[Tensor]:
        """What `run(step)` returns, tensors with a line for each row; those of a replay are
        overwritten by the next one."""
        if step.padded not in self.recorded:
            return self.run(step)
        graph, results = self.recorded[step.padded]
        graph.replay()
        return results

    def record(self, cache):
        """Record a step of each size over a cache, the largest first: the others share its
        memory, and leave their results in its. Only of Triton's kernels: PyTorch's bodies read
        lengths and tables on the CPU. (No GPU has run this yet.)"""
        self.recorded.clear()
        if self.device.type != "cuda" or triton is None or INTERPRETED:
            return
        pool = torch.cuda.graph_pool_handle()
        self.stream = self.stream or torch.cuda.Stream(self.device)
        shared: list[Tensor] = []  # (rows, ...); logits may be 150 MB
        for size in reversed(self.sizes):
            step = cache.prepare([], size)
            self.run(step)  # compiles and allocates what the first call does
            torch.cuda.synchronize(self.device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(
                graph, pool=pool, stream=self.stream, capture_error_mode="thread_local"
            ):
                results = self.run(step)
                shared = shared or results
                if shared is not results:
                    for i, whole in enumerate(shared):
                        whole[:size].copy_(results[i])
                del results  # their memory is the next recording's
            self.recorded[size] = graph, [whole[:size] for whole in shared]


# ---------------------------------------------------------------- fewer bits, on a CPU

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


# ---------------------------------------------------------------- a CPU's memory


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


def use_huge_pages():
    """Move what this process holds in memory to pages of 2 MiB, on Linux 6.1 or newer.

    A core that streams weights meets a new page of 4 KiB every 100 ns and looks up its address;
    on large pages a decode step's linear layers take a sixth less. One to three seconds a GiB,
    once, in pieces, so that Ctrl-C is heard.
    """
    MADV_COLLAPSE, large, piece = 25, 2**21, 2**28  # mman-common.h
    try:
        madvise = ctypes.CDLL(None).madvise
        with open("/proc/self/maps") as file:
            lines = [line.split() for line in file]
    except (AttributeError, OSError, TypeError):
        return  # not Linux
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for place, access, _, _, _, *name in lines:
        begin, end = (int(x, 16) for x in place.split("-"))
        begin, end = -(-begin // large) * large, end // large * large
        if access == "rw-p" and name in ([], ["[heap]"]):
            for start in range(begin, end, piece):  # what cannot be moved stays
                madvise(start, min(piece, end - start), MADV_COLLAPSE)


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
    if weight.many is not None and len(x) > FEW_ROWS[weight.quantize]:
        weight = weight.many
    return weight.nbytes + x.nbytes + result.nbytes, 2.0 * result.numel() * x.shape[-1]


def _per_head_cost(result, spans, x, weight) -> tuple[int, float]:
    return x.nbytes + weight.nbytes + result.nbytes, 2.0 * x.shape[-1] * result.numel()


def _attention_cost(
    result, spans, q, keys, values, view, causal=True, window=0, scale=None
) -> tuple[int, float]:
    """What a row of a request sees is read once; its row at position p meets p + 1 of it."""
    stored = sum(start + n - first_seen(start, window) for start, n in spans)
    pairs = _pairs(spans, window) if causal else sum(n * (start + n) for start, n in spans)
    nbytes = stored * _token_bytes(keys, values) + q.nbytes + result.nbytes
    return nbytes, 2.0 * (q.numel() + result.numel()) / len(q) * pairs


def _pairs(spans, window: int) -> int:
    """How many tokens all rows see together: a row at position p the last `window` of p + 1."""

    def below(positions: int) -> int:
        return positions * (positions + 1) // 2

    pairs = sum(below(start + n) - below(start) for start, n in spans)
    if window:  # without those before it
        ends = [(max(start + n - window, 0), max(start - window, 0)) for start, n in spans]
        pairs -= sum(below(end) - below(begin) for end, begin in ends)
    return pairs


def _token_bytes(keys, values) -> int:
    """Of a layer's keys and values of a token; shorter values are a part of the keys."""
    own = values[0, 0].numel() if values.shape[-1] == keys.shape[-1] else 0
    return (keys[0, 0].numel() + own) * keys.element_size()


def _sparse_cost(
    result, spans, q, keys, values, view, index_q, index_keys, index_weights, top, scale=None
) -> tuple[int, float]:
    """Index keys are read once, and what a row has chosen by that row."""
    stored = sum(start + n for start, n in spans) * index_keys[0, 0].nbytes
    pairs = _pairs(spans, top)
    nbytes = stored + pairs * _token_bytes(keys, values)
    nbytes += q.nbytes + index_q.nbytes + index_weights.nbytes + result.nbytes
    flops = 2.0 * index_q[0].numel() * _pairs(spans, 0)
    return nbytes, flops + 2.0 * (q.numel() + result.numel()) / len(q) * pairs


def _store_cost(result, spans, k, v, *rest) -> tuple[int, float]:
    return 2 * (k.nbytes + (0 if v is None else v.nbytes)), 0.0


def _experts_cost(result, spans, x, chosen, weights, gate_up, down) -> tuple[int, float]:
    """Each expert that is chosen at all is read once."""
    each = gate_up[0].nbytes + down[0].nbytes
    inner = down[0].in_features if isinstance(down[0], Packed) else down.shape[2]
    flops = 6.0 * chosen.numel() * inner * x.shape[1]  # gate, up and down
    return len(chosen.unique()) * each + x.nbytes + result.nbytes, flops


def _plain_cost(result, spans, *given, **options) -> tuple[int, float]:
    """Of all others: tensors and weights in and out once, 4 FLOPs an element of the largest."""
    values = [x for x in (*given, *options.values(), result) if isinstance(x, Tensor | Packed)]
    elements = max((x.numel() for x in values if isinstance(x, Tensor)), default=0)
    return sum(x.nbytes for x in values), 4.0 * elements


def _conv_cost(result, spans, x, weight, pool, view) -> tuple[int, float]:
    """A request's state is read and another written."""
    states = 2 * len(spans) * pool[0].nbytes
    return states + x.nbytes + weight.nbytes + result.nbytes, x.numel() * (
        2.0 * weight.shape[1] + 4
    )


def _recur_cost(result, spans, q, k, v, g, beta, pool, view) -> tuple[int, float]:
    """A row fades a state, and multiplies and adds with it for its key, its query and its value.
    In chunks it is as many, and those of the rows with each other, which do not count."""
    moved = sum(x.nbytes for x in (q, k, v, g, beta, result))
    return 2 * len(spans) * pool[0].nbytes + moved, 7.0 * len(v) * pool[0].numel()


COSTS = {  # operation -> (bytes, FLOPs) of its result, the step's spans, and its arguments
    "linear": _linear_cost,
    "per_head": _per_head_cost,
    "attention": _attention_cost,
    "sparse_attention": _sparse_cost,
    "store_kv": _store_cost,
    "experts": _experts_cost,
    "conv": _conv_cost,
    "recur": _recur_cost,
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
    types = inspect.get_annotations(value)
    return next(iter(types.values()), None) is Tensor and types.get("return") is not bool


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
                with _range(label) if self.ranges else nullcontext():
                    began = time.perf_counter()
                    result = function(*given, **options)
                    seconds = time.perf_counter() - began
            finally:
                self.inside = False
            nbytes, flops = cost(result, self.spans, *given, **options)
            self.calls.append(Call(label, nbytes, flops, seconds))
            return result

        return run


@contextmanager
def _range(label: str):
    """A range of torch.profiler. A kernel's time on a GPU goes to the innermost operation around
    its launch; PyTorch's kernels have one, a Triton kernel only what is opened here."""
    with record_function(label), torch._C._profiler._RecordFunctionFast("launches"):
        yield


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
    labels = {0: f"{rate / 1e9:,.0f}", rows - 1: f"{bottom / 1e9:,.3g}"}
    return [
        "  GFLOP/s",
        *(f"{labels.get(i, ''):>9} |{''.join(line).rstrip()}" for i, line in enumerate(grid)),
        f"{'':>9} +{'-' * columns}",
        f"{'':>11}{''.join(scale).rstrip()}  FLOP/byte",
        f"{'':>11}P: prefill, D: decode. / memory is the limit, - arithmetic is",
    ]


# ---------------------------------------------------------------- the experiment

PEAKS = {  # published: dense bfloat16 FLOP/s, memory bytes/s
    "A100 80GB": (312e12, 2.039e12),
    "H100 SXM": (989e12, 3.35e12),
    "B200": (2.25e15, 8e12),
}


def step_costs(rows: int, sequences: int, stored: int, attended: float) -> list[tuple]:
    """(launch, how many in a step, bytes, FLOPs of each) of Llama-3.1-8B in bfloat16.

    rows: tokens computed, of that many sequences; stored: tokens in each one's cache; attended:
    how many of them a row attends to, on average. What one launch reads twice counts once, and
    norms' weights not at all.
    """
    s, layers, V = SHAPES["Llama-3.1-8B"], 32, 128256
    shape = rows // sequences, s.H, s.G, s.D, s.D, 16, torch.bfloat16, True, 0, 90
    *_, splits = attention_grid(rows, sequences, attention_config(*shape))
    shared, mixed = s.G * s.D, s.H * s.D  # numbers a row has of keys, and of queries
    cache, output = 4 * sequences * stored * shared, 2 * rows * mixed  # bytes
    parts = rows * s.H * splits * (s.D + 1) * 4 if splits > 1 else output  # of float32

    def product(width, out, rows=rows):
        return 2 * (width * out + rows * (width + out)), 2 * rows * width * out

    table = [
        ("norm", 1, 4 * rows * s.E, 4 * rows * s.E),
        ("q, k, v", layers, *product(s.E, mixed + 2 * shared)),
        ("rope", layers, rows * (4 * (mixed + shared) + 4 * s.D), 3 * rows * (mixed + shared)),
        ("store", layers, 8 * rows * shared, 0),
        ("attention", layers, output + cache + parts, 4 * rows * attended * mixed),
        ("combine", layers, parts + output, 2 * rows * splits * mixed),
        ("out", layers, *product(mixed, s.E)),
        ("add, norm", 2 * layers, 8 * rows * s.E, 5 * rows * s.E),
        ("gate, up", layers, *product(s.E, 2 * s.F)),
        ("silu", layers, 6 * rows * s.F, 5 * rows * s.F),
        ("down", layers, *product(s.F, s.E)),
        ("logits", 1, *product(s.E, V, sequences)),
    ]
    return [line for line in table if splits > 1 or line[0] != "combine"]


def cost_line(name: str, count: int, nbytes, flops, times: list[float], digits: int) -> str:
    sizes = f"{nbytes / 1e6:>11,.{digits}f}{flops / 1e9:>11,.{digits}f}{flops / nbytes:>11,.1f}"
    return f"  {name:<10}{count:>10}{sizes}" + "".join(
        f"{time:>15,.{min(digits, 2)}f}" for time in times
    )


def picture(rows: int, context: int) -> str:
    lines = []
    decode = f"decode: {rows} request{'s' * (rows > 1)} x 1 token, {context} in context"
    prefill = f"prefill: 1 request x {context} tokens"
    for title, n, table in (
        (decode, rows, step_costs(rows, rows, context, context)),
        (prefill, context, step_costs(context, 1, context, context / 2)),
    ):
        head = f"{'launches':>10}{'MB':>11}{'GFLOP':>11}{'FLOP/byte':>11}"
        lines += [title, f"  {'':<10}{head}" + "".join(f"{name + ' us':>15}" for name in PEAKS)]
        totals = [0.0] * len(PEAKS)
        for name, count, nbytes, flops in table:
            times = [max(nbytes / speed, flops / peak) * 1e6 for peak, speed in PEAKS.values()]
            totals = [total + count * time for total, time in zip(totals, times)]
            lines.append(cost_line(name, count, nbytes, flops, times, digits=3))
        count = sum(count for _, count, _, _ in table)
        nbytes = sum(count * nbytes for _, count, nbytes, _ in table)
        flops = sum(count * flops for _, count, _, flops in table)
        lines.append(cost_line("a step", count, nbytes, flops, totals, digits=0))
        best = "".join(f"{n / total * 1e6:>15,.0f}" for total in totals)
        lines += [f"  {'tokens/s at best':<53}{best}", ""]
    own = ", ".join(f"{name} {peak / speed:.0f}" for name, (peak, speed) in PEAKS.items())
    lines += [
        "Llama-3.1-8B, bfloat16; a line is one launch at the limits of each card. Both passes read",
        "the same weights, but the prompt uses each of them for all its rows. A card is limited by",
        f"memory below its own FLOP/byte: {own}.",
    ]
    return "\n".join(lines)


# ---------------------------------------------------------------- ahead of time, without a GPU

ELEMENTS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
ARGUMENTS = {  # types of the kernels' arguments; a pointer to the model's type where none is named
    "scale": "fp32", "eps": "fp32", "requests": "i32", "width": "i32", "V": "i32",
    "x_stride": "i32", "gate_stride": "i32", "q_stride": "i32", "k_stride": "i32", "v_stride": "i32",
    "table_stride": "i32", "tables": "*i32", "spans": "*i32", "tiles": "*i32", "slots": "*i64",
    "order": "*i64", "ids": "*i64", "first": "*i64", "top_k": "*i64", "lse": "*fp32",
    "g": "*fp32", "beta": "*fp32", "lines": "*i32", "lengths": "*i32",
    "index_weights": "*fp32", "scores": "*fp32", "words": "*i32", "rows": "*i64", "took": "*fp32",
    "parts": "*fp32", "cos_sin": "*fp32", "scaled": "*fp32", "columns": "*fp32",
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """What the kernels see of a model. F: of an expert, where there are experts. D: of a key,
    and of a value unless `values` says otherwise."""

    H: int
    G: int
    D: int
    E: int
    F: int
    X: int = 0  # experts
    K: int = 0  # experts of a row
    window: int = 0
    values: int = 0
    index: tuple[int, int] = (0, 0)  # heads and size of an index query


SHAPES = {
    "SmolLM2-135M": Shape(9, 3, 64, 576, 1536),
    "Qwen3-0.6B": Shape(16, 8, 128, 1024, 3072),
    "Qwen3-8B": Shape(32, 8, 128, 4096, 12288),
    "Llama-3.1-8B": Shape(32, 8, 128, 4096, 14336),
    "Qwen3-30B-A3B": Shape(32, 4, 128, 2048, 768, 128, 8),
}
OTHER_SHAPES = {  # groups of 7, 5, 1 and 8 heads, padded heads, and large ones
    "Qwen2.5-0.5B": Shape(14, 2, 64, 896, 4864),
    "Qwen2.5-14B": Shape(40, 8, 128, 5120, 13824),
    "Phi-3-mini": Shape(32, 32, 96, 3072, 8192),
    "Gemma-2B": Shape(8, 1, 256, 2048, 16384),
}
KINDS = {  # layers with windows, and with latents that an index chooses
    "Gemma-3-1B": Shape(4, 1, 256, 1152, 6912, window=512),
    "Mistral-7B": Shape(32, 8, 128, 4096, 14336, window=4096),
    "DeepSeek-V3.2": Shape(128, 1, 576, 7168, 2048, values=512, index=(64, 128)),
}


@dataclass(frozen=True)
class Hybrid:
    """What the kernels see of a model with linear attention. Its attention turns a part, R of D,
    of a head; there are HK heads of keys, of DK numbers, and H of values, of DV."""

    heads: int  # of q and k together
    D: int
    R: int
    HK: int
    H: int
    DK: int
    DV: int
    K: int  # inputs of a convolution


HYBRIDS = {
    "Qwen3-Next-80B-A3B": Hybrid(18, 256, 64, 16, 32, 128, 128, 4),
    "Qwen3.5-27B": Hybrid(28, 256, 64, 16, 48, 128, 128, 4),
}


@dataclass(frozen=True)
class Launch:
    """A kernel as launches of one shape compile it. types: of arguments that have another one
    than ARGUMENTS says; of one that is None, "constexpr"."""

    name: str
    kernel: object
    dtype: torch.dtype
    config: dict
    types: dict[str, str] = field(default_factory=dict)


def launches(arch: int) -> list[Launch]:
    """All that is compiled ahead of time: SHAPES and KINDS in bfloat16 with what steps of 1, 8,
    64 and 512 rows launch, OTHER_SHAPES in every type, and all kernels in every type. Block
    sizes, splits and causal go round among the latter."""
    table = [draw_launch(), allow_launch()]
    for shape in SHAPES.values():
        table += row_launches(shape, torch.bfloat16)
        for rows in (1, 8, 64, 512):
            for most in (1, rows):
                table += step_launches(shape, torch.bfloat16, rows, most, arch)
            table += expert_launches(shape, torch.bfloat16, rows)
    for shape in KINDS.values():
        table += store_launches(shape, torch.bfloat16)
        for rows in (1, 8, 64, 512):
            for most in (1, rows):
                table += step_launches(shape, torch.bfloat16, rows, most, arch)
    latent = KINDS["DeepSeek-V3.2"]
    for dtype in ELEMENTS:
        for size in (16, 64):
            table.append(index_launch(latent, dtype, size))
            for most in (1, 512):
                table += attention_launches(latent, dtype, most, size, True, 1, arch)
    for dtype in ELEMENTS:
        table += row_launches(SHAPES["Qwen3-30B-A3B"], dtype)
        for rows in (1, 512):
            table += expert_launches(SHAPES["Qwen3-30B-A3B"], dtype, rows)
        for hybrid in HYBRIDS.values():
            table += hybrid_launches(hybrid, dtype)
    turn = 0
    for shape in OTHER_SHAPES.values():
        for dtype in ELEMENTS:
            for most in (1, 5, 512):
                size = (8, 16, 256)[(turn + turn // 3 + turn // 9) % 3]
                splits, causal = 2 ** (turn % 5), turn % 4 > 0
                table += attention_launches(shape, dtype, most, size, causal, splits, arch)
                turn += 1
    return list({str(replace(launch, name="")): launch for launch in table}.values())


def draw_launch() -> Launch:
    return Launch("draw", draw_kernel, torch.float32, DRAW, {"keys": "*i32"})


def allow_launch() -> Launch:
    return Launch("allow", allow_kernel, torch.float32, ALLOW, {"out": "*fp32"})


def row_launches(s: Shape, dtype: torch.dtype) -> list[Launch]:
    """What does not depend on the number of rows."""
    missing, heads = {"delta": "constexpr"}, s.H + s.G
    return [
        Launch(f"norm {s.E}", norm_kernel, dtype, norm_config(s.E, False), missing),
        Launch(f"norm {s.D}", norm_kernel, dtype, norm_config(s.D, False), missing),
        Launch(f"add, norm {s.E}", norm_kernel, dtype, norm_config(s.E, True)),
        Launch(f"rope {heads} x {s.D}", rope_kernel, dtype, rope_config(heads, s.D, s.D)),
        *store_launches(s, dtype),
        Launch("silu", gated_kernel, dtype, {"GELU": False, **GATED}),
        Launch("gelu", gated_kernel, dtype, {"GELU": True, **GATED}),
    ]


def hybrid_launches(s: Hybrid, dtype: torch.dtype) -> list[Launch]:
    rope, norm = rope_config(s.heads, s.D, s.R), gated_norm_config(s.H, s.DV)
    wide, missing = {"weight": "*fp32"}, {"delta": "constexpr"}
    return [
        Launch(f"rope {s.heads} x {s.R} of {s.D}", rope_kernel, dtype, rope),
        Launch(f"norm {s.D}, float32", norm_kernel, dtype, norm_config(s.D, False), wide | missing),
        Launch(f"gated norm {s.H} x {s.DV}", gated_norm_kernel, dtype, norm),
        Launch(f"gated norm {s.H} x {s.DV}, float32", gated_norm_kernel, dtype, norm, wide),
        *(step for most in (1, 512) for step in state_launches(s, dtype, most)),
    ]


def store_launches(s: Shape, dtype: torch.dtype) -> list[Launch]:
    if not s.values:
        return [Launch(f"store {s.G} x {s.D}", store_kernel, dtype, store_config(s.G * s.D))]
    none = dict.fromkeys(("v", "values", "v_stride"), "constexpr")
    return [
        Launch(f"store {width}, no values", store_kernel, dtype, store_config(width), none)
        for width in (s.D, s.index[1])
    ]


def state_launches(s: Hybrid, dtype: torch.dtype, most: int) -> list[Launch]:
    """Linear attention in a step of `most` rows of each request."""
    config, states = recur_config(most, s.HK, s.H, s.DK, s.DV, dtype), {"pool": "*fp32"}
    name = f"recur {s.H} x {s.DK} x {s.DV}" + ", in chunks" * (config["CHUNK"] > 0)
    conv = f"conv {s.K}" + ", one row" * (most == 1)
    return [
        Launch(conv, conv_kernel, dtype, conv_config(s.K, most)),
        Launch(name, recur_kernel, dtype, config, states),
    ]


def step_launches(s: Shape, dtype, rows: int, most: int, arch: int) -> list[Launch]:
    """Attention in a step of that many rows, `most` of each request."""
    config = attention_config(
        most, s.H, s.G, s.D, s.values or s.D, 16, dtype, True, s.window, arch
    )  # fmt: skip
    *_, splits = attention_grid(rows, rows // most, config)
    found = attention_launches(s, dtype, most, 16, True, splits, arch)
    if s.index[0]:  # each row by itself, over single tokens
        config = attention_config(1, s.H, s.G, s.D, s.values, 1, dtype, False, 0, arch)
        *_, splits = attention_grid(rows, rows, config)
        found += attention_launches(s, dtype, 1, 1, False, splits, arch)
    return found


def attention_launches(
    s: Shape, dtype, most: int, size: int, causal: bool, splits: int, arch: int
) -> list[Launch]:
    values = s.values or s.D
    config = attention_config(most, s.H, s.G, s.D, values, size, dtype, causal, s.window, arch)
    config["SPLITS"] = splits
    tile = f"{config['BLOCK_M']} x {config['BLOCK_N']} x {s.D}"
    name = f"attention {tile}, S {size}, splits {splits}" + ", causal" * causal
    name += f", window {s.window}" * (s.window > 0)
    if splits == 1:
        return [Launch(name, attention_kernel, dtype, config, {"lse": "constexpr"})]
    combine = combine_config(values, splits)
    return [
        Launch(name, attention_kernel, dtype, config, {"out": "*fp32"}),
        Launch(f"combine {splits} x {values}", combine_kernel, dtype, combine),
    ]


def index_launch(s: Shape, dtype, size: int) -> Launch:
    heads, dim = s.index
    name = f"index {heads} x {dim}, S {size}"
    return Launch(name, index_kernel, dtype, index_config(heads, dim, size, dtype))


def expert_launches(s: Shape, dtype: torch.dtype, rows: int) -> list[Launch]:
    if not s.X:
        return []
    block = experts_block(rows * s.K, s.X)
    up = experts_config(s.E, 2 * s.F, s.K, False, block, dtype)
    down = experts_config(s.F, s.E, 1, True, block, dtype)
    return [
        Launch(f"experts {block} rows, up", experts_kernel, dtype, up, {"shares": "constexpr"}),
        Launch(f"experts {block} rows, down", experts_kernel, dtype, down),
    ]


@dataclass(frozen=True)
class Card:
    """NVIDIA's compute capabilities, from the CUDA programming guide. All have 65,536 registers,
    64 warps and 32 programs a processor; a program's shared memory is 1 KiB more than it asks."""

    name: str
    shared_kib: int  # of a program at most
    processor_kib: int
    instruction: str  # that multiplies large tiles


ARCHS = {
    80: Card("A100", 163, 164, "mma"),
    90: Card("H100", 227, 228, "wgmma"),
    100: Card("B200", 227, 228, "tcgen05"),
}
INSTRUCTIONS = {"tcgen05": "tcgen05.mma", "wgmma": "wgmma.mma_async", "mma": "mma.sync"}


@dataclass(frozen=True)
class Compiled:
    """What one launch became on one architecture."""

    registers: int  # a thread
    spills: int  # bytes, stored and loaded
    shared_kib: float  # a program
    programs: int  # at once on a processor
    instruction: str  # of its products; "fma": none but the ordinary one
    wide: int  # copies of 16 bytes from memory to shared memory that a thread's code has
    narrow: int  # of less, but for block ids, which are 4


OPTIONS = "num_warps", "num_stages", "maxnreg"


def argument(launch: Launch, name: str) -> str:
    """The type of an argument, in Triton's words; "constexpr": it is None or a constant."""
    if name in launch.config:
        return "constexpr"
    return launch.types.get(name) or ARGUMENTS.get(name) or "*" + ELEMENTS[launch.dtype]


def compiled(launch: Launch, arch: int) -> Compiled:
    """Compile as a launch on that architecture would, pointers and strides divisible by 16."""
    constants = dict(launch.config)
    options = {o: constants.pop(o) for o in OPTIONS if o in constants}
    signature, divisible = {}, {}
    for i, name in enumerate(launch.kernel.arg_names):
        kind = argument(launch, name)
        if kind == "constexpr":
            constants.setdefault(name, None)
        elif kind[0] == "*" or name.endswith("stride") or name == "width":
            divisible[(i,)] = [["tt.divisibility", 16]]
        signature[name] = kind
    source = triton.compiler.ASTSource(launch.kernel, signature, constants, divisible)
    target = triton.backends.compiler.GPUTarget("cuda", arch, 32)
    os.environ.update(TRITON_DUMP_PTXAS_LOG="1", TRITON_ALWAYS_COMPILE="1")
    with redirect_stdout(io.StringIO()) as log:
        result = triton.compile(source, target=target, options=options)
    return inspected(result, log.getvalue(), arch)


def inspected(result, log: str, arch: int) -> Compiled:
    """Read the assembler's log and the code."""
    registers = int(re.search(r"Used (\d+) registers", log)[1])
    spills = sum(map(int, re.findall(r"(\d+) bytes spill", log)))
    code, shared_kib = result.asm["ptx"], result.metadata.shared / 1024
    warps = result.metadata.num_warps
    fits = [
        # Warps get their registers 256 at a time, in four partitions of a processor.
        65536 // (256 * ceil_div(registers, 8)) // 4 * 4 // warps,
        int(ARCHS[arch].processor_kib / (shared_kib + 1)),
        64 // warps,
        32,
    ]
    if result.metadata.tmem_size:  # columns of tensor memory, which has 512
        fits.append(512 // result.metadata.tmem_size)
    instruction = next((i for i, text in INSTRUCTIONS.items() if text in code), "fma")
    sizes = [int(n, 0) for n in re.findall(r"cp\.async\.c[ag]\.[^;]*\], (0x\w+)", code)]
    narrow = sum(n not in (4, 16) for n in sizes)
    return Compiled(registers, spills, shared_kib, min(fits), instruction, sizes.count(16), narrow)


def broken(launch: Launch, arch: int, found: Compiled) -> list[str]:
    """What is wrong with it: the rules that hold for every launch of the list."""
    card, config, wrong = ARCHS[arch], launch.config, []
    if found.spills:
        wrong.append(f"{found.spills} bytes of registers spill to memory")
    if found.shared_kib > card.shared_kib:
        wrong.append(f"{found.shared_kib:.0f} of {card.shared_kib} KiB shared memory")
    if "OPERAND" in config and launch.dtype.itemsize == 2:
        wanted = card.instruction if config.get("BLOCK_M", 0) >= 64 else "mma"
        wanted = "fma" if config.get("CHUNK") == 0 else wanted  # rows one by one
        if found.instruction != wanted:
            wrong.append(f"{found.instruction} instead of {wanted}")
    if launch.kernel is attention_kernel:
        # Twice, before the loop and in it, a thread copies its share of keys and values.
        copied = found.wide * 16 * 32 * config["num_warps"]
        latent = config["BLOCK_R"] > 0  # a key is its value too
        width = config["BLOCK_R"] + config["BLOCK_D"] * (1 if latent else 2)
        if copied < 2 * config["BLOCK_N"] * width * launch.dtype.itemsize or found.narrow:
            wrong.append("keys or values are read in less than 16 bytes")
        least = 2 if latent else 3
        if config["ONE_ROW"] and found.programs < least:
            wrong.append(f"{found.programs} programs a processor, of decode tiles, not {least}")
    return wrong


def compile_all(archs: list[int]) -> str | None:
    """Compile the list, a line each as they come. None, or in one sentence what went wrong."""
    if triton is None:
        return "--compile needs Triton, which is not installed here"
    if INTERPRETED:
        return "--compile cannot run in Triton's interpreter: unset TRITON_INTERPRET"
    wrong = []
    for arch in archs:
        title = f"sm_{arch} ({ARCHS[arch].name})"
        print(f"{title:<60}registers  spills  shared KiB  programs  product", flush=True)
        for launch in launches(arch):
            name, found = f"{ELEMENTS[launch.dtype]} {launch.name}", compiled(launch, arch)
            wrong += [f"sm_{arch} {name}: {what}" for what in broken(launch, arch, found)]
            print(
                f"{name:<60}{found.registers:>9}{found.spills:>8}{found.shared_kib:>12.1f}"
                f"{found.programs:>10}  {found.instruction}",
                flush=True,
            )
    return f"{len(wrong)} rules are broken: " + "; ".join(wrong) if wrong else None


if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser(description="One step's bytes and FLOPs on three cards.")
    parser.add_argument("--rows", type=int, help="requests decoding (default 1)")
    parser.add_argument("--context", type=int, help="tokens in each (default 2048)")
    parser.add_argument("--compile", action="store_true", help="every kernel, without a GPU")
    parser.add_argument("--arch", help="for which GPUs (default 80,90,100)")
    args = parser.parse_args()
    if args.compile:
        if args.rows is not None or args.context is not None:
            parser.error("--rows and --context belong to the picture, and not to --compile")
        archs = (args.arch or "80,90,100").split(",")
        for arch in archs:
            if arch not in map(str, ARCHS):
                parser.error(f"--arch {arch} is none of 80, 90 and 100")
        sys.exit(compile_all(list(map(int, archs))))
    if args.arch is not None:
        parser.error(f"--arch {args.arch} goes with --compile")
    rows = 1 if args.rows is None else args.rows
    context = 2048 if args.context is None else args.context
    if rows < 1 or context < 2:
        parser.error(f"--rows {rows} must be at least 1, --context {context} at least 2")
    print(picture(rows, context))
