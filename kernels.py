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

Invariants    1. an operation's result for a row depends on that row alone, up to rounding
              2. norms and rotations are computed in float32 and returned in x's type
              3. a Packed weight is never written after it is made

Units         bytes, FLOPs (a multiply-add is two), seconds.
Article       "Prefill vs. Decode: Why the Second Token Is a Different Workload"
Try           python kernels.py                  one decode step and one prompt, on three cards
              python kernels.py --rows 16        a batch of 16 decodes instead of one
              python tests/mutations.py kernels.py   change it: known bugs, each with its test
Imports       nothing of ours.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


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
