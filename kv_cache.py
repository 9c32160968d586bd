"""The KV cache: keep every token's keys and values, so that each is computed once.

The idea      Attention at position t needs the keys and values of positions 0..t. Without a
              cache, generating n tokens computes the first one n times; with it, each step
              computes one row and reads the rest. The price is memory that grows with every
              token, and with it a growing share of what a step reads (picture below).
              This is the contiguous cache: one buffer a layer, a slot a request, room for the
              longest request in each. It wastes memory, it is easy to believe, and so it is
              the cache that every other one is compared with.

The data      a layer's buffer (2, slots, max_len, G, D): keys, values
                slot 0   | a b c d e . . . . . . . |   length 5 = what its request has computed
                slot 1   | k l . . . . . . . . . . |   . is garbage: length decides, not content
              a step       tokens     e' l' m'        rows of all its requests, one below another
                           positions  5  2  3
                           segments   slot 0: rows 0..1 at 5;  slot 1: rows 1..3 at 2

Invariants    1. row of position p attends to positions 0..p of its own slot and nothing else
              2. a layer writes a step's keys and values before it reads them
              3. a slot belongs to at most one request; free slots + held slots == slots
              4. only requests whose last known token is in the step have rows to sample from

Units         bytes; positions and lengths in tokens. bytes per token: over all layers.
Article       "The KV Cache, Sized: What the Formula Says and What Your Engine Gives You"
Try           python kv_cache.py                     bytes and FLOPs against length
              python kv_cache.py --model Qwen3-8B    another model of models.json
              python tests/mutations.py kv_cache.py   change it: known bugs, each with its test
Imports       kernels (plain attention).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

import kernels

# ---------------------------------------------------------------- what each layer stores


@dataclass(frozen=True)
class LayerSpec:
    """What one layer keeps.

    kind      of every token, unless it says otherwise
    full      keys and values of `heads` heads, of size `dim`
    sliding   the same of the last `window` tokens
    latent    one vector of size `dim` that all heads share: it is their key, and its first
              `values` elements are their value (DeepSeek-AI 2405.04434)
    sparse    the same, and an index key of size `index`, by which a row chooses the `top` tokens
              it reads (DeepSeek-AI 2512.02556)
    linear    of all tokens together a state (heads, dim, values) in float32, and of the last
              `conv[0]` tokens `conv[1]` channels (Yang et al. 2412.06464)
    """

    kind: str
    heads: int
    dim: int
    window: int = 0
    values: int = 0  # size of a value; 0: as the key
    index: int = 0
    top: int = 0
    conv: tuple[int, int] = (0, 0)

    @property
    def grows(self) -> bool:
        """Whether it keeps something of every token."""
        return self.kind in ("full", "latent", "sparse")

    @property
    def elements_per_token(self) -> int:
        """Numbers it stores of each token that it keeps; 0: a state, whatever the length."""
        if self.kind == "linear":
            return 0
        values = 0 if self.kind in ("latent", "sparse") else self.values or self.dim
        return self.heads * (self.dim + values) + self.index


DENSE = {"llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "smollm3", "gemma3_text"}
HYBRID = {"qwen3_next", "qwen3_5_text"}
LATENT = {"deepseek_v3", "deepseek_v32"}


GEMMA = {  # transformers' defaults, which the published config of Gemma 3 4B leaves out
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
}
NESTED = {
    "qwen3_5": "qwen3_5_text",
    "gemma3": "gemma3_text",
}  # model_type of a model that also sees -> of its text part


def text(config: dict) -> dict:
    """config.json, or of a model that also sees what it says about text."""
    family = NESTED.get(config.get("model_type"))
    if family is None:
        return config
    if not isinstance(config.get("text_config"), dict):
        raise ValueError(f"config: text_config is {config.get('text_config')!r}, not an object")
    absent = GEMMA if family == "gemma3_text" else {}
    return {**absent, **config, **config["text_config"], "model_type": family}


def layers(config: dict) -> list[LayerSpec]:
    """One LayerSpec per layer of a checkpoint's config.json.

    ValueError names an unknown model_type, a missing field, or head counts that do not divide.

    Example: Llama-3.1-8B has 32 layers of 8 heads x 128: 2 * 8 * 128 elements a layer, so
    32 * 2048 * 2 bytes = 128 KiB a token in bfloat16.
    """
    config = text(config)
    family = config.get("model_type")
    if family not in DENSE | HYBRID | LATENT:
        raise ValueError(
            f"model_type {family!r} is not one of {', '.join(sorted(DENSE | HYBRID | LATENT))}"
        )
    count = positive(config, "num_hidden_layers")
    if family in LATENT:
        return [_latent(config)] * count
    kinds = _kinds(config, count)
    return [_linear(config) if kind == "linear" else _attention(config, kind) for kind in kinds]


def _attention(config: dict, window: int) -> LayerSpec:
    width, queries = positive(config, "hidden_size"), positive(config, "num_attention_heads")
    heads = positive(config, "num_key_value_heads", queries)
    dim = positive(config, "head_dim", width // queries)
    if queries % heads:
        raise ValueError(f"{queries} query heads cannot share {heads} key/value heads evenly")
    if not config.get("head_dim") and width % queries:
        raise ValueError(f"hidden_size {width} is not a multiple of {queries} heads")
    return LayerSpec("sliding" if window else "full", heads, dim, window)


def _latent(config: dict) -> LayerSpec:
    rank = positive(config, "kv_lora_rank")
    dim = rank + positive(config, "qk_rope_head_dim")
    if config["model_type"] == "deepseek_v3":
        return LayerSpec("latent", 1, dim, values=rank)
    index, top = positive(config, "index_head_dim"), positive(config, "index_topk")
    return LayerSpec("sparse", 1, dim, values=rank, index=index, top=top)


def _linear(config: dict) -> LayerSpec:
    keys, heads = (positive(config, f"linear_num_{x}_heads") for x in ("key", "value"))
    dim, values = (positive(config, f"linear_{x}_head_dim") for x in ("key", "value"))
    if heads % keys:
        raise ValueError(f"{heads} value heads cannot share {keys} key heads evenly")
    kernel = positive(config, "linear_conv_kernel_dim")
    channels = 2 * keys * dim + heads * values
    return LayerSpec("linear", heads, dim, values=values, conv=(kernel - 1, channels))


def positive(config: dict, name: str, default: int | None = None) -> int:
    """A field that must be an integer above 0; absent or null is `default`, if there is one."""
    return number(config, name, default, (int,), "an integer")


def number(config: dict, name: str, default=None, kinds=(int, float), what="a number") -> float:
    """The same of a field that may be any number above 0."""
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, kinds) or not value > 0:
        raise ValueError(f"config: {name} is {value!r}, not {what} above 0")
    return value


def flag(config: dict, name: str, default: bool = False) -> bool:
    """A field that must be true or false; absent or null is `default`."""
    value = config.get(name)
    if value not in (None, True, False):
        raise ValueError(f"config: {name} is {value!r}, neither true nor false")
    return default if value is None else bool(value)


def _kinds(config: dict, count: int) -> list[int | str]:
    """Each layer's window in tokens, 0 for none, or "linear", from the ways configs say it."""
    family = config["model_type"]
    slides = family in ("mistral", "gemma3_text")
    window = config.get("sliding_window", 4096 if slides else None) or 0  # as transformers
    if not flag(config, "use_sliding_window", slides):
        window = 0
    if listed := config.get("layer_types"):
        known = {"full_attention": 0}
        known |= {"linear_attention": "linear"} if family in HYBRID else {}
        known |= {"sliding_attention": window} if family not in HYBRID else {}
        unknown = set(listed) - set(known)
        if unknown or len(listed) != count:
            raise ValueError(f"layer_types of {count} layers: {unknown or len(listed)}")
        return [known[kind] for kind in listed]
    if family in HYBRID:
        every = positive(config, "full_attention_interval", 4)
        return ["linear" if (layer + 1) % every else 0 for layer in range(count)]
    if family == "gemma3_text":
        default = positive(config, "_sliding_window_pattern", 6)
        every = positive(config, "sliding_window_pattern", default)
        return [window if (layer + 1) % every else 0 for layer in range(count)]
    first = config.get("max_window_layers", 28) or 0 if "use_sliding_window" in config else 0
    return [window if layer >= first else 0 for layer in range(count)]


def bytes_per_token(specs: list[LayerSpec], element_bytes: int) -> int:
    """Bytes one more token takes, over all layers that grow with the context."""
    return sum(s.elements_per_token for s in specs if s.grows) * element_bytes


def block_bytes(spec: LayerSpec, tokens: int, element_bytes: int) -> int:
    """Bytes in which one layer keeps a block of tokens; of a linear one, its state."""
    parts = shapes(spec, tokens)
    return sum(
        math.prod(shape) * (kind.itemsize if kind else element_bytes) for shape, kind in parts
    )


def stored_bytes(specs: list[LayerSpec], tokens: int, element_bytes: int) -> int:
    """Bytes that a request of so many tokens takes, over all layers."""
    kept = [min(tokens, s.window) if s.window else tokens for s in specs]
    return sum(block_bytes(spec, count, element_bytes) for spec, count in zip(specs, kept))


# ---------------------------------------------------------------- a step's view of the cache


@dataclass(frozen=True)
class Segment:
    """A request's rows in a step: n rows from `row` on, which begin at position `start`."""

    slot: int
    row: int
    n: int
    start: int


def rows(plan) -> tuple[list[int], list[int], list[int], list[Segment]]:
    """Lay a plan [(request, n)] out in rows: tokens, positions, sample rows, segments.

    Of a request it needs slot, tokens, draft, computed, behind and samples. The rows a request
    is sampled from are its last 1 + len(draft), if the step reaches them; the last one
    `samples` times.
    """
    tokens, positions, sample_rows, segments = [], [], [], []
    for request, n in plan:
        start, row = request.computed, len(tokens)
        known = request.tokens[start : start + n]
        tokens += known + request.draft[: n - len(known)]
        positions += range(start, start + n)
        segments.append(Segment(request.slot, row, n, start))
        if n == request.behind:
            first = row + n - 1 - len(request.draft)
            sample_rows += [*range(first, row + n), *[row + n - 1] * (request.samples - 1)]
    return tokens, positions, sample_rows, segments


class Step:
    """What the model sees of the cache in one forward pass.

    tokens, positions: (T,) int64. sample_rows: rows whose logits are wanted, (R,) int64; a
    request whose prompt will be sampled several times has its last row in there as often.
    """

    def __init__(self, cache: "ContiguousCache", tokens, positions, sample_rows, segments):
        self.cache = cache
        self.tokens = tokens
        self.positions = positions
        self.sample_rows = sample_rows
        self.segments = segments
        self.padded = None  # rows, in a cache that pads decode steps
        self.after: list[tuple[Tensor, int, Tensor]] = []  # (buffer, slot, new state)

    def store(self, layer: int, k: Tensor, v: Tensor | None):
        """Write a layer's keys and values of this step's rows: k, v (T, G, D)."""
        self._write(layer, (k,) if v is None else (k, v))

    def _write(self, layer: int, given: tuple[Tensor, ...]):
        for buffer, x in zip(self.cache.buffers[layer], given):
            for s in self.segments:
                buffer[s.slot, s.start : s.start + s.n] = x[s.row : s.row + s.n]

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, causal: bool = True,
        scale: float | None = None, index: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """Store k, v (T, G, D), then attend with q (T, H, D): (T, H, Dv).

        Row i of a segment is at position start + i and sees positions 0..start + i, or the last
        `window` of these; with causal=False every row sees all of its request. A latent layer
        has no v. index, of a sparse one: its queries (T, Hi, Di), keys (T, Di) and head weights
        (T, Hi), see `kernels.choose`.
        """
        spec = self.cache.specs[layer]
        self._write(layer, tuple(x for x in (k, v, index and index[1]) if x is not None))
        outputs = []
        for s in self.segments:
            held = [buffer[s.slot, : s.start + s.n] for buffer in self.cache.buffers[layer]]
            keys, rows, chosen = held[0], slice(s.row, s.row + s.n), None
            values = keys[..., : spec.values] if v is None else held[1]
            if index is not None:
                chosen = kernels.choose(index[0][rows], held[-1], index[2][rows], spec.top)
            outputs.append(
                kernels.attend(q[rows], keys, values, causal, spec.window, scale, chosen)
            )
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def conv(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        """A linear layer's short convolution and silu: x (T, C), weight (C, K) -> (T, C)."""
        outputs = []
        for s in self.segments:
            before = self.cache.buffers[layer][0][s.slot]
            before = before if s.start else torch.zeros_like(before)
            out, after = kernels.convolve(x[s.row : s.row + s.n], weight, before)
            outputs.append(out)
            self.after.append((self.cache.buffers[layer][0], s.slot, after))
        return torch.cat(outputs)

    def recur(self, layer: int, q, k, v, g, beta) -> Tensor:
        """A linear layer's gated delta rule over its state, see `kernels.delta_rule`."""
        outputs = []
        for s in self.segments:
            rows = slice(s.row, s.row + s.n)
            state = self.cache.buffers[layer][1][s.slot]
            state = state if s.start else torch.zeros_like(state)
            given = (x[rows] for x in (q, k, v, g, beta))
            out, state = kernels.delta_rule(*given, state)
            outputs.append(out)
            self.after.append((self.cache.buffers[layer][1], s.slot, state))
        return torch.cat(outputs)


class ContiguousCache:
    """Room for `slots` requests of `max_len` tokens: a few buffers a layer, see `shapes`.

    Tensors only: who holds which slot is for `Slots` to know. On a CPU untouched pages cost
    nothing until they are written.
    """

    def __init__(self, specs, slots: int, max_len: int, device="cpu", dtype=torch.float32):
        self.specs, self.max_len, self.slots = list(specs), max_len, slots
        self.device = torch.device(device)
        self.buffers = [
            [
                torch.empty(slots, *shape, dtype=kind or dtype, device=device)
                for shape, kind in shapes(spec, max_len)
            ]
            for spec in specs
        ]
        self.nbytes = sum(b.numel() * b.element_size() for layer in self.buffers for b in layer)

    def prepare(self, plan) -> Step:
        """Lay a plan [(request, n)] out in rows."""
        tokens, positions, sample_rows, segments = rows(plan)
        for s in segments:
            end = s.start + s.n
            assert end <= self.max_len, f"{end} tokens in a slot of {self.max_len}"
        lists = (tokens, positions, sample_rows)
        tensors = [torch.tensor(x, dtype=torch.int64).to(self.device) for x in lists]
        self.step = Step(self, *tensors, segments)
        return self.step

    def copy(self, parent, child, length: int):
        """Give the child's slot what its parent's first `length` tokens left: a fork."""
        self.commit(self.step, None)  # a fork comes in the middle of a step
        for spec, buffers in zip(self.specs, self.buffers):
            for buffer in buffers:
                if spec.kind == "linear":
                    buffer[child.slot] = buffer[parent.slot]
                else:
                    buffer[child.slot, :length] = buffer[parent.slot, :length]

    def commit(self, step: Step, kept):
        """Put the new states in the place of the old ones. Rejected keys lie beyond `computed`,
        and length decides."""
        for buffer, slot, after in step.after:
            buffer[slot] = after


def shapes(spec: LayerSpec, tokens: int) -> list[tuple[tuple[int, ...], torch.dtype | None]]:
    """The tensors in which a layer keeps `tokens` tokens; a type other than the cache's own."""
    if spec.kind == "linear":
        return [(spec.conv, None), ((spec.heads, spec.dim, spec.values), torch.float32)]
    keys = (tokens, spec.heads, spec.dim)
    if spec.kind == "latent":
        return [(keys, None)]
    if spec.kind == "sparse":
        return [(keys, None), ((tokens, spec.index), None)]
    if spec.kind in ("full", "sliding"):
        return [(keys, None), ((tokens, spec.heads, spec.values or spec.dim), None)]
    raise ValueError(f"layers of the kind {spec.kind!r} are sized, but no cache here holds them")


class Slots:
    """The manager of a contiguous cache: integers only. A slot is held or it is free."""

    def __init__(self, slots: int):
        self.total = slots
        self.free = list(range(slots))[::-1]

    def door(self, request):
        """Every request has room: its slot is as long as any may be."""

    def match(self, tokens: list[int], salt: str | None) -> tuple[list[list[int]], int]:
        """A contiguous cache reuses nothing: no tables, 0 tokens computed."""
        return [], 0

    def limit(self, request, n: int) -> int:
        return n

    def grow(self, request, n: int, ahead: int = 0) -> bool:
        """Make sure the request has room for n more tokens: its slot has room for all."""
        if request.slot is None:
            if not self.free:
                return False
            request.slot = self.free.pop()
        return True

    def fork(self, parent, child):
        grown = self.grow(child, 0)
        assert grown, f"no free slot for sample {child.index} of request {child.id}"

    def commit(self, request):
        """Nothing is registered: a contiguous cache shares no tokens."""

    def forget(self, request):
        """Nothing to forget."""

    def release(self, request):
        """Give the request's slot back, if it has one."""
        if request.slot is not None:
            self.free.append(request.slot)
            request.slot = None

    def repair(self, running):
        """After an interruption between two lines: what no running request names is free."""
        held = {request.slot for request in running}
        self.free = [slot for slot in range(self.total)[::-1] if slot not in held]

    @property
    def held(self) -> int:
        return self.total - len(self.free)

    def check(self, running):
        """Invariant 3: every slot is free, or named by one running request."""
        held = [request.slot for request in running if request.slot is not None]
        assert sorted([*self.free, *held]) == list(range(self.total)), "3: a slot was lost"


# ---------------------------------------------------------------- the experiment


def parameters(config: dict, specs: list[LayerSpec]) -> int:
    """Weights a token is multiplied with: projections, one MLP (or its experts), logits."""
    width, queries = config["hidden_size"], config["num_attention_heads"]
    mlp = config["intermediate_size"]
    if config.get("num_experts"):
        mlp = config["moe_intermediate_size"] * config["num_experts_per_tok"]
    layer = width * specs[0].dim * (2 * queries + 2 * specs[0].heads) + 3 * width * mlp
    return len(specs) * layer + width * config["vocab_size"]


def picture(name: str, config: dict) -> str:
    specs = layers(config)
    per_token = bytes_per_token(specs, 2)
    count = parameters(config, specs)
    scores = 4 * len(specs) * config["num_attention_heads"] * specs[0].dim  # FLOPs a pair
    s = specs[0]
    lines = [
        f"{name}: {len(specs)} layers x 2 x {s.heads} heads x {s.dim} x 2 bytes"
        f" = {per_token:,} bytes a token in bfloat16",
        "",
        f"{'tokens':>8}  {'cache':>10}  {'step reads':>11}  {'of it cache':<31}"
        f"{'TFLOP: with':>12}  {'without':>9}",
    ]
    length = 128
    while length <= config["max_position_embeddings"]:
        stored = length * per_token
        read = stored + 2 * count
        share = stored / read
        once = length * (2 * count + scores * length / 2)  # each token computed once
        again = length**2 * count + scores * length**3 / 6  # step t computes t tokens
        bar = "#" * round(24 * share)
        lines.append(
            f"{length:>8,}  {stored / 2**20:>6,.1f} MiB  {read / 2**20:>7,.0f} MiB"
            f"  {bar:<24} {share:>5.0%}  {once / 1e12:>11,.3f}  {again / 1e12:>9,.1f}"
        )
        length *= 2
    lines.append("")
    lines.append(f"A step reads the weights ({count / 1e6:,.0f}M x 2 bytes) and the cache once.")
    lines.append("TFLOP to generate that many: with a cache, and without one, when each step")
    lines.append("computes all tokens again.")
    return "\n".join(lines)


def _main():
    import argparse
    import json
    from pathlib import Path

    models = {}
    for line in (Path(__file__).parent / "models.json").read_text().splitlines():
        if line.startswith("{"):
            entry = json.loads(line.rstrip(","))
            models[entry["name"].lower()] = entry["name"], entry["config"]
    parser = argparse.ArgumentParser(description="What a token costs in memory.")
    parser.add_argument(
        "--model",
        default="SmolLM2-135M-Instruct",
        help="name in models.json (default: the engine's)",
    )
    args = parser.parse_args()
    if args.model.lower() not in models:
        names = ", ".join(sorted(name for name, _ in models.values()))
        parser.error(f"--model {args.model} is not one of: {names}")
    try:
        print(picture(*models[args.model.lower()]))
    except ValueError as error:
        parser.exit(1, f"{args.model}: {error}\n")


if __name__ == "__main__":
    _main()
