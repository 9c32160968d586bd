"""The KV cache: keep every token's keys and values, so that each is computed once.

The idea      Attention at position t needs the keys and values of positions 0..t. Without a
              cache, generating n tokens computes the first one n times; with it, each step
              computes one row and reads the rest. The price is memory that grows with every
              token, and with it a growing share of what a step reads (picture below).
              This is the contiguous cache: one buffer a layer, a slot a request, room for the
              longest request in each. It wastes memory, it is easy to believe, and so it is
              the cache that every other one is compared with.
              In newer models most layers keep less: a window, a latent, a state. What each
              keeps and reads follows from the config alone, and so does what a server prints
              about it at its start (below, under "sizing").

The data      a layer's buffers (slots, max_len, G, D), one of keys and one of values
                slot 0   | a b c d e . . . . . . . |   length 5 = what its request has computed
                slot 1   | k l . . . . . . . . . . |   . is garbage: length decides, not content
              a step       tokens     e' l' m'        rows of all its requests, one below another
                           positions  5  2  3
                           segments   slot 0: rows 0..1 at 5;  slot 1: rows 1..3 at 2
              other kinds  one buffer of latents; a buffer more of index keys; of states and of
                           a convolution's last inputs one a slot, whatever the length

Invariants    1. row of position p attends to positions 0..p of its own slot, or the last window
                 of them, and nothing else
              2. a layer writes a step's keys and values before it reads them; a new state takes
                 the old one's place at commit
              3. a slot belongs to at most one request; free slots + held slots == slots
              4. only requests whose last known token is in the step have rows to sample from
              5. a kind of layer that is not known is refused, never counted as another
              6. sizing: blocks of all groups have the same bytes, and only whole ones count

Units         bytes; positions and lengths in tokens. bytes per token: over all layers.
Articles      "The KV Cache, Sized: What the Formula Says and What Your Engine Gives You"
              "When Most Layers Stop Caching: Hybrid, Sliding, and Sparse Attention, Sized"
Try           python kv_cache.py                     bytes and FLOPs against length
              python kv_cache.py --model Qwen3.6-27B   each kind of layer; a config.json too
              python kv_cache.py --compare Qwen3-32B Gemma-3-27b Qwen3.6-27B
              python kv_cache.py --model Qwen3.6-27B --gpu rtx3090 --weights int4 --kv-dtype fp8
              python kv_cache.py --example 27b       262,144 tokens on 24 GB: why, and when not
              python tests/mutations.py kv_cache.py  change it: known bugs, each with its test
Imports       kernels (plain attention).
"""

import argparse
import json
import math
import re
import textwrap
from collections import Counter
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path

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
    chunked   the same of the tokens since the last multiple of `window` (Llama 4)
    latent    one vector of size `dim` that all heads share: it is their key, and its first
              `values` elements are their value (DeepSeek-AI 2405.04434)
    sparse    the same, and an index key of size `index`, by which a row chooses the `top` tokens
              it reads (DeepSeek-AI 2512.02556); index 0: it reads those of the layer before it
    linear    of all tokens together a state (heads, dim, values) in float32, and of the last
              `conv[0]` tokens `conv[1]` channels (Yang et al. 2412.06464)
    kda       the same, gated channel by channel (Kimi Team 2510.26692)
    mamba2    the same, made of pieces of `window` tokens (Dao & Gu 2405.21060)
    shared    nothing: it reads what an earlier layer keeps, all or the last `window` tokens
    none      nothing: it has no attention
    """

    kind: str
    heads: int
    dim: int
    window: int = 0
    values: int = 0  # size of a value; 0: as the key
    index: int = 0
    top: int = 0
    conv: tuple[int, int] = (0, 0)
    state: int = 4  # bytes of a number of its state, where servers that are sized keep it
    groups: int = 1  # of a state's heads: what tensor parallelism must not cut

    @property
    def grows(self) -> bool:
        """Whether it keeps something of every token."""
        return self.kind in ("full", "latent", "sparse")

    @property
    def elements_per_token(self) -> int:
        """Numbers it stores of each token that it keeps; 0: a state, whatever the length."""
        if self.kind in STATES or self.kind in ("shared", "none"):
            return 0
        values = 0 if self.kind in ("latent", "sparse") else self.values or self.dim
        return self.heads * (self.dim + values) + self.index


STATES = ("linear", "kda", "mamba2")
PLAIN = {"llama", "llama4_text", "smollm3", "qwen2", "qwen3", "qwen3_moe", "glm4", "glm4_moe"}
PLAIN |= {"granite", "minimax_m2", "olmo2", "qwen2_5_vl", "qwen2_5_vl_text", "qwen3_vl_text"}
WINDOWED = {  # model_type -> its window, and every how many layers one is full, by default
    "mistral": (4096, 0), "ministral3": (None, 0), "mixtral": (None, 0), "phi3": (None, 0),
    "gpt_oss": (128, 2), "gemma2": (4096, 2), "gemma3_text": (4096, 6), "gemma4_text": (512, 6),
    "exaone4": (4096, 4), "cohere": (None, 0), "cohere2": (4096, 4), "olmo3": (4096, 4),
}  # fmt: skip
HYBRID = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "kimi_linear", "nemotron_h"}
LATENT = {"deepseek_v2", "deepseek_v3", "kimi_k2", "deepseek_v32", "glm_moe_dsa", "kimi_linear"}
INDEXED = ("deepseek_v32", "glm_moe_dsa")
FAMILIES = PLAIN | set(WINDOWED) | HYBRID | LATENT
# field that changes what layers keep -> the model_types where a formula here knows it
ONLY = {"kv_lora_rank": LATENT, "index_topk": INDEXED, "num_kv_shared_layers": ("gemma4_text",)}
ONLY |= dict.fromkeys(("cross_attention_layers", "sparse_attention_config", "compress_ratios"), ())
UNSIZED = {  # model_type -> why no formula here covers it
    "deepseek_v4": "not sized: windows and compressed tokens share a pool no formula here covers",
    "minimax_m3": "not sized: what its block-sparse layers keep of their index is not published",
}
DEFAULTS = {  # fields that configs leave out, as transformers' classes have them
    "gemma3_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
                    "vocab_size": 262_208, "max_position_embeddings": 131_072},
    "nemotron_h": {"head_dim": 128, "mamba_ssm_cache_dtype": "float32"},
    **dict.fromkeys("qwen3 minimax_m2 glm4 llama4_text qwen3_vl_text".split(), {"head_dim": 128}),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), {"head_dim": 256}),
    "gemma2": {"head_dim": 256}, "gemma4_text": {"head_dim": 256}, "gpt_oss": {"head_dim": 64},
}  # fmt: skip


def text(config: dict) -> dict:
    """A config with the defaults of its model_type; of a model that also sees, its text part."""
    inner = config.get("text_config")
    # such families are named so; Qwen2.5-VL's files have its text's fields beside the others
    seeing = f"{config.get('model_type')}_text" in FAMILIES - {"qwen2_5_vl_text"}
    if not isinstance(inner, dict) and (inner is not None or seeing):
        raise ValueError(f"config: text_config is {inner!r}, not an object")
    tied = config.get("tie_word_embeddings")  # what the whole model says comes first
    config = config | (inner or {}) | ({} if tied is None else {"tie_word_embeddings": tied})
    return DEFAULTS.get(config.get("model_type"), {}) | config


def layers(config: dict) -> list[LayerSpec]:
    """One LayerSpec per layer of a checkpoint's config.json.

    ValueError names an unknown model_type or kind of layer, a missing field, or head counts that
    do not divide: no layer is ever counted as something it is not.

    Example: Llama-3.1-8B has 32 layers of 8 heads x 128: 2 * 8 * 128 elements a layer, so
    32 * 2048 * 2 bytes = 128 KiB a token in bfloat16.
    """
    config = text(config)
    family = config.get("model_type")
    if family not in FAMILIES:
        reason = UNSIZED.get(family, f"not one of {' '.join(sorted(FAMILIES))}")
        raise ValueError(f"model_type {family!r} is {reason}")
    if foreign := [name for name in ONLY if config.get(name) and family not in ONLY[name]]:
        raise ValueError(f"{foreign[0]} is not known in {family}: its layers keep something else")
    types = _types(config, positive(config, "num_hidden_layers"))
    specs = [_spec(config, kind, layer) for layer, kind in enumerate(types)]
    first = len(specs) - _whole(config, "num_kv_shared_layers")
    if first < 1:
        raise ValueError(f"num_kv_shared_layers leaves none of {len(specs)} layers to share")
    return specs[:first] + [replace(spec, kind="shared") for spec in specs[first:]]


def _types(config: dict, count: int) -> list[str]:
    """Each layer's kind, by the names of `layer_types`, from the ways in which configs say it."""
    family = config["model_type"]
    others = ["sliding_attention"] * (family in WINDOWED or "use_sliding_window" in config)
    others = ["chunked_attention"] if family == "llama4_text" else others
    if family in HYBRID | LATENT:
        others = ["linear_attention", "mlp", "moe"] if family in HYBRID else ["indexed_attention"]
    listed = config.get("layer_types") or _listed(config, count)
    unknown = {str(kind) for kind in listed} - {"full_attention", *others}
    if unknown or len(listed) != count:
        raise ValueError(f"layer_types of {count} layers: {unknown or len(listed)}")
    return [*listed[:-1], "full_attention"] if family == "gemma4_text" else listed


def _listed(config: dict, count: int) -> list[str]:
    """The kinds where there is no `layer_types`."""
    family, all_of_them = config["model_type"], range(1, count + 1)
    if family == "nemotron_h":
        names = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
        return [names.get(letter, letter) for letter in config.get("hybrid_override_pattern") or ""]
    if family == "kimi_linear":
        named = config.get("linear_attn_config") or {}
        full, kda = (named.get(x) or [] for x in ("full_attn_layers", "kda_layers"))
        if sorted(full + kda) != list(all_of_them):
            raise ValueError(f"linear_attn_config does not name each of {count} layers once")
        return ["full_attention" if layer in full else "linear_attention" for layer in all_of_them]
    if family == "llama4_text":  # layers that rope turns are chunked: 1 in `no_rope_layers`
        every = positive(config, "no_rope_layer_interval", 4)
        turned = config.get("no_rope_layers") or [layer % every for layer in all_of_them]
        chunks = config.get("attention_chunk_size", 8192)
        return ["chunked_attention" if x and chunks else "full_attention" for x in turned]
    if family in HYBRID:
        every = positive(config, "full_attention_interval", 4)
        return ["linear_attention" if x % every else "full_attention" for x in all_of_them]
    stated = _whole(config, "sliding_window_pattern") or _whole(config, "_sliding_window_pattern")
    # a family without a pattern has none, whatever is stated
    every = WINDOWED.get(family, (0, 0))[1] and (stated or WINDOWED[family][1])
    first = _whole({"max_window_layers": 28} | config, "max_window_layers")
    first = 0 if family in WINDOWED else first
    slides = [x > first and (not every or x % every) for x in all_of_them]
    return ["sliding_attention" if x and _window(config) else "full_attention" for x in slides]


def _window(config: dict) -> int:
    """Tokens a sliding layer sees; 0: all."""
    family = config["model_type"]
    if family not in WINDOWED and not flag(config, "use_sliding_window"):
        return 0
    return _whole({"sliding_window": WINDOWED.get(family, (None,))[0]} | config, "sliding_window")


def _whole(config: dict, name: str) -> int:
    """A field that may be absent, null or 0: 0 then."""
    return positive(config, name) if config.get(name) else 0


def _spec(config: dict, kind: str, layer: int) -> LayerSpec:
    family = config["model_type"]
    if kind in ("mlp", "moe"):
        return LayerSpec("none", 0, 0)
    if kind == "linear_attention":
        return {"kimi_linear": _kda, "nemotron_h": _mamba2}.get(family, _linear)(config)
    if family in LATENT:
        return _latent(config, layer)
    if kind == "chunked_attention":
        return _attention(config, "chunked", positive(config, "attention_chunk_size", 8192))
    window = _window(config) if kind == "sliding_attention" else 0
    return _attention(config, "sliding" if window else "full", window)


def _attention(config: dict, kind: str, window: int) -> LayerSpec:
    width, queries = positive(config, "hidden_size"), positive(config, "num_attention_heads")
    heads = positive(config, "num_key_value_heads", queries)
    given = config.get("attention_head_dim") or config.get("head_dim")  # the first: Nemotron-H
    dim = positive({"head_dim": given}, "head_dim", width // queries)
    if config["model_type"] == "gemma4_text" and kind == "full":
        dim = positive(config, "global_head_dim", 512)
        if flag(config, "attention_k_eq_v"):  # one projection; keys are turned, so two are kept
            heads = positive(config, "num_global_key_value_heads", heads)
    if queries % heads:
        raise ValueError(f"{queries} query heads cannot share {heads} key/value heads evenly")
    if not given and width % queries:
        raise ValueError(f"hidden_size {width} is not a multiple of {queries} heads")
    return LayerSpec(kind, heads, dim, window)


def _latent(config: dict, layer: int) -> LayerSpec:
    rank = positive(config, "kv_lora_rank")
    dim = rank + positive(config, "qk_rope_head_dim")
    if config["model_type"] not in INDEXED:
        return LayerSpec("latent", 1, dim, values=rank)
    index, top = positive(config, "index_head_dim"), positive(config, "index_topk")
    owner = (config.get("indexer_types") or ["full"] * (layer + 1))[layer]
    if owner not in ("full", "shared"):
        raise ValueError(f"indexer_types has {owner!r} for layer {layer}, not full or shared")
    return LayerSpec("sparse", 1, dim, values=rank, index=index * (owner == "full"), top=top)


def _linear(config: dict) -> LayerSpec:
    keys, heads = (positive(config, f"linear_num_{x}_heads") for x in ("key", "value"))
    dim, values = (positive(config, f"linear_{x}_head_dim") for x in ("key", "value"))
    if heads % keys:
        raise ValueError(f"{heads} value heads cannot share {keys} key heads evenly")
    conv = (positive(config, "linear_conv_kernel_dim") - 1, 2 * keys * dim + heads * values)
    state = number_bytes(config.get("mamba_ssm_dtype"))
    return LayerSpec("linear", heads, dim, values=values, conv=conv, state=state, groups=keys)


def _kda(config: dict) -> LayerSpec:
    named = config.get("linear_attn_config") or {}
    heads, dim = positive(named, "num_heads"), positive(named, "head_dim")
    conv = (positive(named, "short_conv_kernel_size") - 1, 3 * heads * dim)
    return LayerSpec("kda", heads, dim, values=dim, conv=conv, groups=heads)


def _mamba2(config: dict) -> LayerSpec:
    heads, dim = positive(config, "mamba_num_heads"), positive(config, "mamba_head_dim")
    groups, size = positive(config, "n_groups"), positive(config, "ssm_state_size")
    conv = (positive(config, "conv_kernel") - 1, heads * dim + 2 * groups * size)
    state, chunk = number_bytes(config["mamba_ssm_cache_dtype"]), positive(config, "chunk_size")
    return LayerSpec("mamba2", heads, dim, chunk, size, conv=conv, state=state, groups=groups)


def number_bytes(name: str | None) -> int:
    """Bytes of a number of a state: 4 if the config says float32, else the model's own 2."""
    if name not in (None, "float32", "bfloat16", "float16"):
        raise ValueError(f"state dtype {name!r} is not float32, bfloat16 or float16")
    return 4 if name == "float32" else 2


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


def bytes_per_token(specs: list[LayerSpec], element_bytes: int) -> int:
    """Bytes one more token takes, over all layers that grow with the context."""
    return sum(s.elements_per_token for s in specs if s.grows) * element_bytes


def block_bytes(spec: LayerSpec, tokens: int, element_bytes: int) -> int:
    """Bytes in which one layer keeps a block of tokens here; of a linear one, its state."""
    parts = [(math.prod(shape), kind) for shape, kind in shapes(spec, tokens)]
    return sum(count * (kind.itemsize if kind else element_bytes) for count, kind in parts)


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
        self.after: list[tuple] = []  # (buffer, segment, its new state, that after fewer rows)

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
            out = kernels.attend(q[rows], keys, values, causal, spec.window, scale, chosen)
            outputs.append(out)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def conv(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        """A linear layer's short convolution and silu: x (T, C), weight (C, K) -> (T, C)."""
        outputs = []
        for s in self.segments:
            before = self.cache.buffers[layer][0][s.slot]
            before = before if s.start else torch.zeros_like(before)

            def run(n: int, s=s, before=before):
                return kernels.convolve(x[s.row : s.row + n], weight, before)

            outputs.append(self._state(layer, 0, s, run))
        return torch.cat(outputs)

    def recur(self, layer: int, q, k, v, g, beta) -> Tensor:
        """A linear layer's gated delta rule over its state, see `kernels.delta_rule`."""
        outputs = []
        for s in self.segments:
            state = self.cache.buffers[layer][1][s.slot]
            state = state if s.start else torch.zeros_like(state)

            def run(n: int, s=s, state=state):
                given = (x[s.row : s.row + n] for x in (q, k, v, g, beta))
                return kernels.delta_rule(*given, state)

            outputs.append(self._state(layer, 1, s, run))
        return torch.cat(outputs)

    def _state(self, layer: int, part: int, s: Segment, run) -> Tensor:
        """What `run` gives of all rows of a segment. Their state waits for `commit`, which, if
        only some stay, runs these again from the old one."""
        out, after = run(s.n)
        self.after.append((self.cache.buffers[layer][part], s, after, run))
        return out


class ContiguousCache:
    """Room for `slots` requests of `max_len` tokens: a few buffers a layer, see `shapes`.

    Tensors only: who holds which slot is for `Slots` to know. On a CPU untouched pages cost
    nothing until they are written.
    """

    def __init__(self, specs, slots: int, max_len: int, device="cpu", dtype=torch.float32):
        self.specs, self.max_len, self.slots = list(specs), max_len, slots
        self.device = torch.device(device)

        def room(shape, kind):
            return torch.empty(slots, *shape, dtype=kind or dtype, device=device)

        self.buffers = [[room(*part) for part in shapes(spec, max_len)] for spec in specs]
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
        """Give the child's slot what its parent's first `length` tokens left: a fork, in the
        middle of a step. Of others it is not known yet how many rows stay."""
        for buffer, segment, after, _ in self.step.after:
            if segment.slot == parent.slot:
                buffer[segment.slot] = after
        for spec, buffers in zip(self.specs, self.buffers):
            for buffer in buffers:
                part = ... if spec.kind == "linear" else slice(length)
                buffer[child.slot][part] = buffer[parent.slot][part]

    def commit(self, step: Step, stay: list[int] | None):
        """Put the new states in the place of the old ones: those after the rows that stay of each
        request of the plan (None: all). Rejected keys lie beyond `computed`, and length decides.
        """
        stays = dict(zip(step.segments, stay or []))
        for buffer, segment, after, run in step.after:
            n = stays.get(segment, segment.n)
            buffer[segment.slot] = after if n == segment.n else run(n)[1]


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


# ---------------------------------------------------------------- sizing, from a config alone

FORMATS = {  # cache format -> bytes a number, bytes beside a vector, numbers packed together
    **dict.fromkeys(("auto", "bf16", "bfloat16", "fp16", "float16", "f16"), (2, 0, 1)),
    **dict.fromkeys(("fp32", "float32", "f32"), (4, 0, 1)),
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla"), (1, 0, 1)),
    **dict.fromkeys(("int8_per_token_head", "fp8_per_token_head"), (1, 4, 1)),
    "int4_per_token_head": (1 / 2, 4, 2), "nvfp4": (1 / 2 + 1 / 16, 0, 16),
    "q8_0": (34 / 32, 0, 32), "q5_1": (24 / 32, 0, 32), "q5_0": (22 / 32, 0, 32),
    "q4_1": (20 / 32, 0, 32), "q4_0": (18 / 32, 0, 32), "iq4_nl": (18 / 32, 0, 32),
}  # fmt: skip


def eight_bits(numbers: int) -> int:
    """Bytes of numbers in fp8, with a float32 scale of every 128 (DeepSeek-AI 2512.02556)."""
    return numbers + 4 * (numbers // 128)


def row_bytes(spec: LayerSpec, dtype: str = "auto") -> int:
    """Bytes of one token in a layer: its keys and values, or its latent and its index key.

    8-bit latents of a sparse layer are vLLM's fp8_ds_mla: the value part in 8 bits with a float32
    scale of every 128, the turned part in 16 bits. ValueError if the format does not fit.

    Example: 512 + 64 latent dimensions: 512 + 4 * 4 + 64 * 2 = 656 bytes.
    """
    if dtype not in FORMATS:
        raise ValueError(f"cache format {dtype!r} is not one of {', '.join(FORMATS)}")
    if spec.kind in STATES or spec.kind == "none":
        return 0
    number, beside, together = FORMATS[dtype]
    latent = spec.kind in ("latent", "sparse")
    if (beside or together == 16) if latent else dtype == "fp8_ds_mla":
        raise ValueError(f"cache format {dtype!r} does not fit layers of the kind {spec.kind!r}")
    sizes = (spec.dim,) if latent else (spec.dim, spec.values or spec.dim)
    if any(size % together for size in sizes):
        raise ValueError(f"cache format {dtype!r} takes {together} numbers at a time, not {sizes}")
    if dtype == "fp8_ds_mla" or (spec.kind == "sparse" and number == 1):
        return eight_bits(spec.values) + 2 * (spec.dim - spec.values) + eight_bits(spec.index)
    return spec.heads * sum(int(number * size) + beside for size in sizes) + eight_bits(spec.index)


def state_bytes(spec: LayerSpec, number: int = 0, drafts: int = 0) -> int:
    """Bytes of a layer's state, of `number` bytes each (0: the config's), and its convolution."""
    kept, channels = spec.conv
    state = spec.heads * spec.dim * spec.values * (number or spec.state)
    return state + (kept + drafts) * channels * 2 if spec.kind in STATES else 0


def stored_bytes(spec: LayerSpec, tokens: int, dtype: str = "auto", number: int = 0) -> int:
    """What a layer keeps of a request of so many tokens."""
    kept = 0 if spec.kind == "shared" else min(tokens, spec.window or tokens)
    return state_bytes(spec, number) + kept * row_bytes(spec, dtype)


def read_bytes(spec: LayerSpec, tokens: int, dtype: str = "auto", number: int = 0) -> int:
    """What a layer moves of the cache to decode one token after so many.

    A state is read and written. A sparse layer reads every index key and `top` latents. A chunk
    that has begun anew is half full on average.
    """
    keys = eight_bits(spec.index)
    half = spec.kind == "chunked" and tokens > spec.window
    seen = spec.window // 2 if half else min(tokens, spec.window or tokens, spec.top or tokens)
    rows = tokens * keys + seen * (row_bytes(spec, dtype) - keys)
    return 2 * state_bytes(spec, number) + rows


def shard(spec: LayerSpec, tp: int) -> LayerSpec:
    """One GPU's part of a layer among `tp`: heads divide, and when one is left it is repeated.

    So a latent, the one head that all queries share, is whole on each GPU.
    """
    parts = spec.groups if spec.kind in STATES else spec.heads
    if parts % tp and (spec.kind in STATES or tp % parts):
        raise ValueError(f"{parts} heads of {spec.kind} layers do not divide over {tp} GPUs")
    heads = max(min(spec.heads, 1), spec.heads // tp)
    return replace(spec, heads=heads, conv=(spec.conv[0], spec.conv[1] // tp))


@dataclass(frozen=True)
class Plan:
    """What vLLM makes of a cache, per GPU: all groups take blocks of equal bytes from one pool."""

    block: int  # tokens, the smallest of all groups
    groups: tuple[tuple[str, int, int, int], ...]  # kind, layers, tokens a block, blocks a request
    block_bytes: int
    blocks: int
    request: int  # blocks that a request of the longest allowed length takes
    concurrency: float
    tokens: int  # as the line "GPU KV cache size" has them


def plan(
    specs: list[LayerSpec], memory: int, length: int, dtype: str = "auto",
    version: tuple[int, ...] = (0, 28), batched: int = 8192, block: int = 0, number: int = 0,
    drafts: int = 0, prefix: bool = True, stages: int = 1, context: int = 1, hybrid: bool = True,
) -> Plan:  # fmt: skip
    """Blocks, capacity and concurrency that vLLM prints for `memory` bytes of cache a GPU.

    specs: one GPU's layers (`shard`), all pipeline stages. length: max_model_len. batched:
    max_num_batched_tokens. drafts: tokens proposed a step. prefix: prefix caching. context:
    GPUs of decode context parallelism. hybrid: the manager that frees what left a window.
    """
    all_kept = [] if hybrid and version >= (0, 9) else ["sliding", "chunked"]
    all_kept += ["chunked"] * ((0, 10, 1) <= version < (0, 13))  # freeing them was slower
    specs = [replace(s, kind="full", window=0) if s.kind in all_kept else s for s in specs]
    places = [i for i, s in enumerate(specs) if s.kind not in ("shared", "none")]
    kinds = Counter(specs[i] for i in places)
    row = {s: row_bytes(s, dtype) for s in kinds if s.kind not in STATES}
    if len(row) < len(kinds) and (version < (0, 10) or not row):
        raise ValueError("states have no page before vLLM 0.10, nor in a model without attention")
    step = 64 if any(s.kind in ("latent", "sparse") for s in kinds) else 16
    block, every = block or step, prefix and not drafts and (0, 16) <= version < (0, 27)
    every = every and any(s.kind == "mamba2" for s in kinds)  # block ends in a state
    for s in kinds.keys() - row.keys():  # a page of attention grows until a state fits
        unit = math.lcm(step, s.window) if every else step
        least = -(-state_bytes(s, number, drafts) // min(row.values()))  # tokens
        block = block if block >= least else unit * -(-least // unit)
    page = block * max(row.values())
    alike = len({s.grows or (s.kind, s.window) for s in kinds}) == 1
    if not alike and any(page % width for width in row.values()):
        raise ValueError(f"vLLM has no common page of {sorted(set(row.values()))} bytes a token")
    groups = [places] if alike else _groups(specs, kinds, version)
    flight = batched * (1 if version < (0, 26) else 2 if stages == 1 else stages)
    states = -(-length // block) if every else 1 + drafts + (prefix and version >= (0, 14))

    each, extra = divmod(len(specs), stages)  # layers left over go to stages before the last
    depth = [each + (stages - 1 - extra <= i < stages - 1) for i in range(stages)]
    ends = pairwise(accumulate(depth, initial=0))
    held = [[[specs[i] for i in at if a <= i < b] for at in groups] for a, b in ends]
    here = [block * sum(row[s] for s in x[0]) if alike else page * max(map(len, x)) for x in held]
    block_bytes = max(here)
    heads = [specs[at[0]] for at in groups]
    sizes = [page // row[s] if s in row and not alike else block for s in heads]
    needs = [_needs(s, n, length, flight, states, context) for s, n in zip(heads, sizes)]
    blocks = max(0, memory // block_bytes)
    concurrency = blocks / sum(needs) if version >= (0, 9) else blocks * block / length
    printed = blocks // len(groups) * min(sizes) * context  # until 0.20.0
    tokens = int(concurrency * length) if version > (0, 20, 0) else printed
    shown = tuple(zip([s.kind for s in heads], map(len, groups), sizes, needs))
    return Plan(min(sizes), shown, block_bytes, blocks, sum(needs), concurrency, tokens)


def _needs(s: LayerSpec, block: int, length: int, flight: int, states: int, context: int) -> int:
    """Blocks that a request of `length` tokens takes of one group, with `flight` in a step."""
    if s.kind in STATES:
        return states
    if s.kind == "sliding":  # the oldest block may hold one token of the window
        return -(-min(s.window - 1 + flight, length) // block) + 1
    seen = s.window + flight if s.kind == "chunked" else -(-length // context)
    return -(-min(seen, length) // block)


def _groups(specs: list[LayerSpec], kinds: Counter, version: tuple[int, ...]) -> list[list[int]]:
    """Layers of a hybrid in groups as large as its rarest kind, or its most frequent one."""
    least, most = min(kinds.values()), max(kinds.values())
    slack = 1.5 if version >= (0, 18) else 1.25 if version >= (0, 12) else 1
    size, groups = most if most < slack * least else least, []
    for spec, count in kinds.items():
        cuts, same = -(-count // size), [i for i, s in enumerate(specs) if s == spec]
        groups += [same[i::cuts] for i in range(cuts)]
    return groups


# ---------------------------------------------------------------- the experiment

GPUS = {  # name -> GiB as CUDA reports them, which is less than on the box
    "t4": 14.56, "l4": 22.03, "rtx3090": 23.56, "rtx4090": 23.52, "rtx5090": 31.36,
    "a100-40gb": 39.39, "a100": 79.14, "l40s": 44.4, "h100": 79.19, "rtxpro6000": 94.97,
    "gb10": 119.68, "h200": 139.81, "b200": 178.35,
}  # fmt: skip
BYTES = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 1e3, "mb": 1e6, "gb": 1e9}
LLAMA = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")  # llama.cpp's formats, not vLLM's
BITS = {"bf16": 16, "fp8": 8, "int4": 4.5}  # of a weight; int4: with a 16-bit scale of every 32


def parameters(config: dict) -> int:
    """Weights of a language model.

    Matrices only: no norms, biases, vision or draft layers, under 3% together. ValueError names a
    field that is missing: a config for sizing a cache need not have them all.
    """
    config = text(config)
    specs, width = layers(config), positive(config, "hidden_size")
    tied = flag(config, "tie_word_embeddings", config["model_type"].startswith("gemma"))
    ends = width * positive(config, "vocab_size") * (1 if tied else 2)
    mixers = sum(_mixer(config, spec, width) for spec in specs)
    return ends + mixers + sum(_mlp(config, layer, width) for layer in range(len(specs)))


def _mixer(config: dict, spec: LayerSpec, width: int) -> int:
    """Weights of a layer's attention, or of what it has instead."""
    if spec.kind == "none":
        return 0
    inner = spec.heads * spec.dim  # of a state's values; of keys else
    if spec.kind == "mamba2":
        return width * (3 * inner + 2 * spec.groups * spec.values + spec.heads)
    if spec.kind == "kda":  # two gates of low rank, and one number a head
        return width * (4 * inner + spec.heads) + 2 * spec.dim * (width + inner)
    if spec.kind == "linear":
        values = spec.heads * spec.values
        return width * (2 * spec.groups * spec.dim + 3 * values + 2 * spec.heads)
    queries = positive(config, "num_attention_heads")
    if spec.kind in ("latent", "sparse"):
        rank, rope = spec.values, spec.dim - spec.values
        nope, value = positive(config, "qk_nope_head_dim"), positive(config, "v_head_dim")
        low = config.get("q_lora_rank") or 0
        asked = low * (width + queries * (nope + rope)) if low else width * queries * (nope + rope)
        heads = positive(config, "index_n_heads") if spec.index else 0
        index = heads * (low * spec.index + width) + width * spec.index
        kept = width * spec.dim + rank * queries * (nope + value)
        return asked + index + kept + queries * value * width
    gate = flag(config, "attn_output_gate", config["model_type"] == "qwen3_next")
    keys = 1 if spec.kind == "full" and config.get("attention_k_eq_v") else 2
    return width * (spec.dim * queries * (3 if gate else 2) + keys * inner)


def _mlp(config: dict, layer: int, width: int) -> int:
    """Weights of a layer's MLP, or of all its experts."""
    family, matrices, dense = config["model_type"], 3, "intermediate_size"
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    experts = next((config[name] for name in names if config.get(name)), 0)
    if family == "nemotron_h":
        matrices = 2
        kind = _types(config, positive(config, "num_hidden_layers"))[layer]
        if kind not in ("mlp", "moe"):
            return 0
        experts *= kind == "moe"
    elif (layer + 1) % positive(config, "interleave_moe_layer_step", 1):
        experts, dense = 0, "intermediate_size_mlp"
    elif layer < (config.get("first_k_dense_replace") or 0):
        experts = 0
    if not experts:
        return matrices * width * positive(config, dense)
    inner = positive(config, "moe_intermediate_size", config.get("intermediate_size"))
    always = (config.get("n_shared_experts") or 0) * inner  # beside the experts
    if family in ("llama4_text", "gemma4_text"):
        always = positive(config, "intermediate_size")
    if family in ("qwen3_next", "qwen3_5_moe_text"):
        always = positive(config, "shared_expert_intermediate_size", inner)
    return matrices * width * (experts * inner + always) + width * experts


def budget(gpu: int, util: float, weights: int, seqs: int, vocab: int, version, gpus: int) -> dict:
    """What a server leaves of a GPU for the cache, line by line: name -> (bytes, why).

    The peak of activations is on dense models the sampler's warm-up: copies of the logits of
    max_num_seqs requests, 37.5 bytes each before vLLM 0.17, 14 since. It is a floor: experts,
    images and long chunks take up to 0.6 GiB more. Graphs are in the budget since 0.20.
    """
    each, gib = 14 if version >= (0, 17) else 37.5, 2**30
    logits = f"{each:g} B x {seqs:,} requests x {vocab:,} logits"
    lines = {
        "allowed": (int(gpu * util), f"{util:g} (--util) of {gpu / gib:.2f} GiB"),
        "weights": (-weights, ""),
        "activations": (-int(each * seqs * vocab + 0.18 * gib), f"about: {logits} + 0.18 GiB"),
        "outside torch": (-int((0.25 if gpus == 1 else 2.1) * gib), "about: CUDA, NCCL"),
    }
    if version >= (0, 20):
        lines["graphs"] = (-gib // 2, "about: recorded decode steps")
    return lines


def longest(fits, most: int = 2**40) -> int:
    """The largest length for which fits(length), which is true up to some length; 0: none."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def keeps(spec: LayerSpec) -> str:
    """What a layer keeps, in words and numbers."""
    heads = f"{spec.heads} head{'s' * (spec.heads > 1)} x "
    if spec.kind == "none" or spec.kind == "shared":
        return "nothing" if spec.kind == "none" else "nothing, reads what an earlier layer keeps"
    if spec.kind in STATES:
        inputs = f"{spec.conv[0]} inputs of {spec.conv[1]:,}"
        return f"{spec.heads} states of {spec.dim} x {spec.values}, and {inputs}"
    if spec.kind == "latent":
        return f"{spec.dim} of every token"
    if spec.kind == "sparse":
        index = f" + {spec.index}" if spec.index else ""
        return f"{spec.dim}{index} of every token, reads {spec.top:,} of them"
    which = {"full": "every token", "sliding": f"the last {spec.window:,} tokens"}
    part = which.get(spec.kind, f"a chunk of {spec.window:,} tokens")
    return f"{heads}2 x {spec.dim} of {part}"


def size(name: str, config: dict, a) -> dict:
    """Everything that is shown of a model, as JSON has it. a: the command line's values."""
    inner = text(config)
    if _whole(inner, "num_hidden_layers") > 10_000:
        raise ValueError(f"config: num_hidden_layers is {inner['num_hidden_layers']}, over 10,000")
    long = "model_max_length" if "model_max_length" in inner else "max_position_embeddings"
    positions = _whole(inner, long)
    if not (context := a.context or a.max_model_len or positions):
        raise ValueError("the config has no max_position_embeddings: give --context")
    if _whole(inner, "num_attention_heads") % a.tp:
        raise ValueError(f"--tp {a.tp} does not divide {inner['num_attention_heads']} query heads")
    number = number_bytes(a.state_dtype) if a.state_dtype else 0
    specs = [shard(spec, a.tp) for spec in layers(config)]

    def total(tokens, of=stored_bytes):
        return sum(of(spec, tokens, a.kv_dtype, number) for spec in specs)

    if not total(context):
        raise ValueError("no layer of this config keeps anything")
    if total(context) >= 2**80:
        raise ValueError("a number of this config is too large")
    rows = []
    for spec, count in Counter(specs).items():
        parts = {
            "bytes_per_token": row_bytes(spec, a.kv_dtype) if spec.grows else 0,
            "state_bytes": state_bytes(spec, number),
            "stored_bytes": stored_bytes(spec, context, a.kv_dtype, number),
            "read_bytes_per_token": read_bytes(spec, context, a.kv_dtype, number),
        }
        one = {"kind": spec.kind, "layers": count, "keeps": keeps(spec)}
        rows.append(one | {part: count * value for part, value in parts.items()})
    here = {"full", "sliding", "latent", "sparse", "linear"} >= {spec.kind for spec in specs}
    kept = [block_bytes(s, min(context, s.window or context), 2) for s in specs] if here else []
    lengths = [n for n in (context >> i for i in range(20)) if n >= min(context, 128)]
    return {
        "model": name, "positions": positions, "context": context, "kv_dtype": a.kv_dtype,
        "tp": a.tp, "kinds": rows,
        **{part: sum(row[part] for row in rows) for part in parts},
        "engine_bytes": sum(kept) if here and FORMATS[a.kv_dtype] == FORMATS["bf16"] else None,
        "by_context": [
            {"tokens": n, "stored_bytes": total(n), "read_bytes_per_token": total(n, read_bytes)}
            for n in lengths[10::-1]
        ],
        **_capacity(inner, specs, total, context, number, a),
    }  # fmt: skip


def _memory(config: dict, a, version: tuple[int, ...]) -> tuple[dict, int, int]:
    """The budget's lines, bytes of cache a GPU, and max_num_batched_tokens."""
    if not a.gpu:
        return {}, a.kv_memory, a.max_num_batched_tokens or 8192
    name, gpu = a.gpu
    large = gpu >= 70 * 2**30 and name != "a100"
    util = a.util or (0.92 if version >= (0, 20) else 0.9)
    gpus, why = a.tp * (a.pp or 1), "as given (--weights)"
    weights = a.weights
    if not isinstance(weights, int):
        try:
            bits, count = BITS[a.weights or "bf16"], parameters(config)
        except ValueError as error:
            raise ValueError(f"{error}: give the weights' size, --weights 15GiB")
        weights = count * bits / 8
        why = f"about: {count / 1e9:.2f} billion of {bits:g} bits (--weights)"
    seqs = a.max_num_seqs or (1024 if large else 256)
    vocab = positive(config, "vocab_size")
    lines = budget(gpu, util, int(weights / gpus), seqs, vocab, version, a.tp)
    lines["weights"] = (lines["weights"][0], why + (f" / {gpus} GPUs" if gpus > 1 else ""))
    batched = 2048 if not large else 16384 if version >= (0, 32) and gpu > 160 * 2**30 else 8192
    return lines, sum(size for size, _ in lines.values()), a.max_num_batched_tokens or batched


def _capacity(config: dict, specs: list[LayerSpec], total, context: int, number: int, a) -> dict:
    """What a GPU holds, by its bytes and in vLLM's blocks; None without --gpu or --kv-memory."""
    keys = (
        "budget", "kv_memory_bytes", "longest_context", "requests_at_context", "vllm_version",
        "max_model_len", "max_num_batched_tokens", "num_spec", "draft_layers", "prefix_cache",
        "block_size", "block_bytes", "num_blocks", "groups", "blocks_per_request", "kv_tokens",
        "max_concurrency", "longest_max_model_len",
    )  # fmt: skip
    if not a.gpu and not a.kv_memory:
        return dict.fromkeys(keys)
    version, stages, ranks = a.vllm_version or (0, 28), a.pp or 1, a.dcp or 1
    if stages > len(specs):
        raise ValueError(f"--pp {stages} is more than {len(specs)} layers")
    if a.tp % ranks:
        raise ValueError(f"--dcp {ranks} does not divide --tp {a.tp}")
    heads = max((s.heads for s in layers(config) if s.grows), default=1)
    if ranks > 1 and a.tp // heads < ranks:  # vLLM divides the tokens among copies of a head
        raise ValueError(
            f"--dcp {ranks}: {a.tp} GPUs hold less than {ranks} copies of {heads} heads"
        )
    lines, memory, batched = _memory(config, a, version)
    drafts, length = a.num_spec or 0, a.max_model_len or context
    drafters = draft_layers(config) if drafts else 0
    specs = specs + [draft_layer(specs)] * drafters

    def planned(tokens):
        return plan(
            specs, memory, tokens, a.kv_dtype, version, batched, a.block_size or 0, number,
            drafts, not a.no_prefix_cache, stages, ranks, not a.no_hybrid_manager,
        )  # fmt: skip

    by_bytes = (
        {name: {"bytes": size, "why": why} for name, (size, why) in lines.items()}, memory,
        longest(lambda n: total(n) <= memory * stages * ranks),
        max(0, memory * stages * ranks) / total(context),
    )  # fmt: skip
    if a.kv_dtype in LLAMA:  # has no blocks: it allocates a context of the given length
        return dict.fromkeys(keys) | dict(zip(keys, by_bytes))
    made = planned(length)
    most = _whole(config, "max_position_embeddings") or _whole(config, "model_max_length")
    groups = [dict(zip(("kind", "layers", "block_size", "blocks"), group)) for group in made.groups]
    in_blocks = (
        ".".join(map(str, version)), length, batched, drafts, drafters, not a.no_prefix_cache,
        made.block, made.block_bytes, made.blocks, groups, made.request, made.tokens,
        made.concurrency, longest(lambda n: planned(n).concurrency >= 1, most or 2**24),
    )  # fmt: skip
    return dict(zip(keys, by_bytes + in_blocks))


def draft_layers(config: dict) -> int:
    """Layers of the checkpoint's own drafter; a head of its own kind (EAGLE) has one too."""
    names = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
    return next((text(config)[x] for x in names if text(config).get(x)), 1)


def draft_layer(specs: list[LayerSpec]) -> LayerSpec:
    """The drafter's layers keep what the model's largest attention keeps."""
    return max((s for s in specs if s.kind not in STATES), key=lambda s: (s.grows, row_bytes(s)))


def human(count: float) -> str:
    """Bytes for people."""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(count) >= unit:
            return f"{count / unit:,.{2 if unit >= 2**30 else 1}f} {name}"
    return f"{count:,.0f} B"


def on(r: dict) -> str:
    """Where a cache lies, and in what format."""
    gpus = "one GPU" if r["tp"] == 1 else f"each of {r['tp']} GPUs"
    return f"{gpus}, cache in {'bfloat16 (auto)' if r['kv_dtype'] == 'auto' else r['kv_dtype']}"


def report(r: dict) -> str:
    """A model's sizes: what its layers keep, what that makes of a length, what a GPU holds."""
    at = f"at {r['context']:,} tokens"
    count = sum(row["layers"] for row in r["kinds"])
    lines = [
        f"{r['model'][:40]}: what {count} layers keep of a request on {on(r)}",
        "",
        f"{'kind':<8} {'layers':>6}  {'each keeps':<46} {'B/token':>8} {'stored':>11}"
        f" {'read/token':>11}",
    ]
    total = {"kind": "all", "layers": count, "keeps": f"{at:>46}"}
    for row in [*r["kinds"], {**r, **total}]:
        lines.append(
            f"{row['kind']:<8} {row['layers']:>6}  {row['keeps']:<46} {row['bytes_per_token']:>8,}"
            f" {human(row['stored_bytes']):>11} {human(row['read_bytes_per_token']):>11}"
        )
    if r["engine_bytes"] not in (None, r["stored_bytes"]):
        note = "as this engine keeps it: states in float32, index keys in 16 bits"
        lines.append(f"{note:<72} {human(r['engine_bytes']):>11}")
    if r["state_bytes"]:
        lines.append("read/token: a state is read and written, so it counts twice")
    for length in sorted({r["context"], r["max_model_len"] or 0}):
        if 0 < r["positions"] < length:
            lines.append(
                f"note: {length:,} tokens are more than the model's {r['positions']:,} positions"
            )
    lines += ["", f"{'tokens':>13}  {'stored':>11} {'':<24} {'read to decode one token'}"]
    most = max(x["stored_bytes"] for x in r["by_context"])
    most = max(most, *(x["read_bytes_per_token"] for x in r["by_context"])) or 1
    for x in r["by_context"]:
        stored, read = x["stored_bytes"], x["read_bytes_per_token"]
        bars = ["#" * round(24 * n / most) for n in (stored, read)]
        line = f"{x['tokens']:>13,}  {human(stored):>11} {bars[0]:<24}"
        lines.append(f"{line} {human(read):>11} {bars[1]}".rstrip())
    if r["kv_memory_bytes"] is not None:
        lines += ["", *_capacity_lines(r)]
    return "\n".join(lines)


def _capacity_lines(r: dict) -> list[str]:
    """The budget of a GPU, and what vLLM prints for what it leaves."""
    memory, length, most = r["kv_memory_bytes"], r["max_model_len"], r["longest_context"]
    lines = [f"{k:<14}{human(x['bytes']):>12}  {x['why']}" for k, x in r["budget"].items()]
    lines.append(f"{'= cache':<14}{human(memory):>12}  on {'the' if r['tp'] == 1 else 'each'} GPU")
    if memory <= 0:
        return [*lines, "Nothing is left for a cache: fewer bits a weight, or more GPUs."]
    one = {0: "of no length", 2**40: "of any length"}.get(most, f"of {most:,} tokens")
    lines.append(
        f"{'by bytes alone':<14}{r['requests_at_context']:>12,.2f}  requests of"
        f" {r['context']:,} tokens, or one {one}"
    )
    if r["block_size"] is None:
        return lines
    drafts = f", {r['num_spec']:,} drafts" if r["num_spec"] else ""
    caching = "on" if r["prefix_cache"] else "off"
    lines += [
        "",
        f"vLLM {r['vllm_version']}, --max-model-len {length}, {r['max_num_batched_tokens']:,}"
        f" tokens a step, prefix caching {caching}{drafts}:",
    ]
    alike = Counter((g["kind"], g["block_size"], g["blocks"]) for g in r["groups"])
    size = max(g["layers"] for g in r["groups"])
    for key, count in alike.items():
        kind, block, blocks = key
        same = [
            g["layers"] for g in r["groups"] if (g["kind"], g["block_size"], g["blocks"]) == key
        ]
        padding = count * size - sum(same)
        padded = f" ({padding} of them padding)" if padding else ""
        lines.append(
            f"  {count} group{'s' * (count > 1)} of {size} {kind} layers{padded}: blocks of"
            f" {block:,} tokens, {blocks:,} a request"
        )
    pool = f"  {r['num_blocks']:,} blocks of {human(r['block_bytes'])}"
    lines.append(f"{pool}, of which a request takes {r['blocks_per_request']:,}")
    if r["vllm_version"].startswith(("0.6", "0.7")):
        lines.append(f"  # GPU blocks: {r['num_blocks']}")
    else:
        lines.append(f"  GPU KV cache size: {r['kv_tokens']:,} tokens")
    lines.append(
        f"  Maximum concurrency for {length:,} tokens per request: {r['max_concurrency']:.2f}x"
    )
    if r["max_concurrency"] < 1:
        needed = r["blocks_per_request"] * r["block_bytes"]
        fits = r["longest_max_model_len"]
        fits = f"--max-model-len {fits} fits" if fits else "no length fits"
        lines.append(
            f"  and refuses to start: {human(needed)} needed, {human(memory)} there; {fits}"
        )
    return lines


def comparison(results: list[dict]) -> str:
    """Models side by side."""
    context, most = results[0]["context"], max(r["stored_bytes"] for r in results)
    lines = [
        f"A request of {context:,} tokens on {on(results[0])}",
        "",
        f"{'':<24} {'layers that cache':<26} {'B/token':>8} {'the rest':>10} {'stored':>11}"
        f" {'read/token':>11}",
    ]
    for r in results:
        kinds = ", ".join(f"{x['layers']} {x['kind']}" for x in r["kinds"] if x["kind"] != "none")
        rest = r["stored_bytes"] - context * r["bytes_per_token"]
        lines.append(
            f"{r['model'][:24]:<24} {kinds:<26} {r['bytes_per_token']:>8,} {human(rest):>10}"
            f" {human(r['stored_bytes']):>11} {human(r['read_bytes_per_token']):>11}"
        )
    lines.append("stored = tokens x B/token + the rest: windows and states, which stop growing")
    lengths = [x["tokens"] for x in results[0]["by_context"]][::2]
    lines += ["", f"{'stored, by tokens':<24} " + "".join(f"{n:>12,}" for n in lengths)]
    for r in results:
        cells = "".join(f"{human(x['stored_bytes']):>12}" for x in r["by_context"][::2])
        lines.append(f"{r['model'][:24]:<24} {cells}")
    lines += ["", f"stored at {context:,} tokens"]
    for r in results:
        lines.append(f"{r['model'][:24]:<24} {'#' * max(1, round(60 * r['stored_bytes'] / most))}")
    for r in results:
        if 0 < r["positions"] < context:
            lines.append(f"note: {r['model'][:60]} has {r['positions']:,} positions only")
    return "\n".join(lines)


def example(models: dict) -> str:
    """Why a 27B hybrid holds 262,144 tokens on a 24 GB GPU, and when it does not."""
    config, gib, length = models["qwen3.6-27b"][1], 2**30, 262_144
    specs, count = layers(config), parameters(config)
    full = next(spec for spec in specs if spec.grows)
    states = sum(state_bytes(spec) for spec in specs)
    lines = [
        f"Qwen3.6-27B, {length:,} tokens, an RTX 3090: {GPUS['rtx3090']} GiB are visible",
        "",
        f"{'if all 64 layers kept tokens: 64 x (2 x 4 heads x 256 x 2 bytes) a token':<82}"
        f"{human(len(specs) * stored_bytes(full, length)):>13}",
        f"{f'16 of them do, and 48 keep a state: 16 x 4,096 bytes a token + {human(states)}':<82}"
        f"{human(sum(stored_bytes(s, length) for s in specs)):>13}",
        "",
        f"{'':<22} {'':>8} {'stored,':>10}{'tokens':>10}   {'blocks of one request':<21}"
        f" {'with prefix caching':>19}",
        f"{'cache format':<22} {'B/token':>8} {'in all':>10}{'a block':>10}",
    ]
    formats = {"bf16": "bf16", "fp8": "fp8", "q8_0": "q8_0", "q4_0": "q4_0"}
    formats["int4_per_token_head"] = "int4"
    totals = {}
    for name in formats:
        token = sum(row_bytes(s, name) for s in specs if s.grows)
        totals[name] = sum(stored_bytes(s, length, name) for s in specs)
        line = f"{name:<22} {token:>8,} {human(totals[name]):>10}"
        if not name.startswith("q"):  # llama.cpp's: no blocks
            made = [plan(specs, 0, length, name, prefix=prefix) for prefix in (False, True)]
            sizes = [f"{p.request} = {human(p.request * p.block_bytes)}" for p in made]
            line += f"{made[0].block:>10,}   {sizes[0]:<21} {sizes[1]:>19}"
        lines.append(line)
    room = 0.972 * GPUS["rtx3090"] * gib - 1.09 * gib - 0.5 * gib
    lines += [
        "",
        "0.972 of the GPU, less 1.09 GiB of activations and about 0.5 GiB of graphs and the like,",
        f"leaves {human(room)} for {count / 1e9:.1f} billion weights and the cache; thousands of"
        " tokens that fit:",
        "",
        f"{'weights':<15} {'size':>10} {'left':>11}"
        + "".join(f"{x:>10}" for x in formats.values()),
    ]
    for name, bits in (("bf16", 16), ("fp8", 8), ("int4, 4.5 bits", 4.5), ("3.5 bits", 3.5)):
        left, answers = room - count * bits / 8, ""
        for x in formats:
            most = longest(lambda n: sum(stored_bytes(s, n, x) for s in specs) <= left) // 1000
            answers += f"{f'{most}k' if most else '-':>8} {'+' if left >= totals[x] else ' '}"
        lines.append(
            f"{name:<15} {human(count * bits / 8):>10} {human(left):>11}{answers}".rstrip()
        )
    lines += [
        "",
        f"+ holds {length:,}. In order: a quarter of the layers keep tokens (4x), 24 query heads",
        "share 4 heads of keys (6x), weights in 4 bits (4x), and then the cache in 4 bits (4x).",
        "By bytes: a server's blocks, drafts and images take theirs (fp8: about 195k measured).",
    ]
    return "\n".join(lines)


def picture(name: str, config: dict) -> str:
    """A dense model's cache, what a step reads, and the FLOPs that the cache saves."""
    specs = layers(config)
    per_token = bytes_per_token(specs, 2)
    count = parameters(config)  # tied: the embedding is the matrix of the logits
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


# ---------------------------------------------------------------- command line


def whole(text: str) -> int:
    """A flag's whole number above 0, `262,144` and `262_144` too."""
    digits = text.replace(",", "").replace("_", "")
    if not digits.isascii() or not digits.isdigit() or not 0 < int(digits[:20]) <= 10**9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 10^9")
    return int(digits)


def memory_size(text: str) -> int:
    """Bytes of `24GiB`, `24GB`, `512MiB` or `1000000000`; less than 1 MiB lacks its unit."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?i?b?)", text.strip().lower())
    if not match or match[2] not in BYTES or not 2**20 <= float(match[1]) * BYTES[match[2]] < 2**60:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 24GiB, 24GB or 512MiB")
    return int(float(match[1]) * BYTES[match[2]])


def gpu_size(text: str) -> tuple[str, int]:
    asked = re.sub(r"[ _-]", "", text.lower()).removesuffix("80gb")
    for name, gib in GPUS.items():
        if name.replace("-", "") in (asked, f"rtx{asked}"):
            return name, int(gib * 2**30)
    try:
        return "", memory_size(text)
    except argparse.ArgumentTypeError:
        names = ", ".join(GPUS)
        raise argparse.ArgumentTypeError(
            f"{text[:20]!r} is neither a size such as 24GiB nor one of\n{names}"
        )


def weight_size(text: str) -> str | int:
    return text.lower() if text.lower() in BITS else memory_size(text)


def share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share above 0, at most 1")
    return value


def vllm_version(text: str) -> tuple[int, ...]:
    match = re.fullmatch(r"v?(0)\.(\d{1,3})(?:\.(\d{1,3}))?", text)
    if not match or int(match[2]) < 6:
        raise argparse.ArgumentTypeError(f"{text!r} is no version from 0.6 on, such as 0.28")
    return tuple(int(part) for part in match.groups() if part)


def _models() -> dict[str, tuple[str, dict]]:
    """models.json: lower-case name -> (name, config)."""
    entries = json.loads((Path(__file__).parent / "models.json").read_text("utf-8"))
    return {entry["name"].lower(): (entry["name"], entry["config"]) for entry in entries}


def _find(name: str, models: dict, parser: argparse.ArgumentParser) -> tuple[str, dict]:
    """A model of models.json, or a config.json, or the folder that holds one."""
    if name.lower() in models:
        return models[name.lower()]
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if path.suffix != ".json":
        names = ", ".join(sorted(known for known, _ in models.values()))
        message = f"--model {name} is no config.json, and not one of: {names}"
        parser.error(textwrap.fill(message, 78, break_on_hyphens=False, break_long_words=False))
    try:
        config = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError):
        raise ValueError(f"{path} is not JSON")
    if not isinstance(config, dict):
        raise ValueError(f"{path} is not a JSON object")
    return path.resolve().parent.name if path.name == "config.json" else path.stem, config


def _sized(name: str, config: dict, a) -> dict:
    """`size`, whose every complaint is a ValueError of one sentence that names the model."""
    try:
        return size(name, config, a)
    except ValueError as error:
        raise ValueError(f"{name}: {error}")
    except (TypeError, KeyError, AttributeError, IndexError) as error:  # a field of another shape
        raise ValueError(f"{name}: the config is malformed: {error!r}")


NEEDS = {  # flag -> flags of which it needs one
    **dict.fromkeys(("util", "weights", "max_num_seqs"), ("gpu",)),
    **dict.fromkeys(
        ("vllm_version", "max_model_len", "max_num_batched_tokens", "block_size", "num_spec",
         "no_prefix_cache", "no_hybrid_manager", "pp", "dcp"), ("gpu", "kv_memory"),
    ),
}  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="What a token costs in memory, and in reading.")
    add = parser.add_argument
    add("--model", help="name in models.json, config.json, or a folder with one")
    add(
        "--compare", nargs="+", metavar="MODEL", help="side by side, at 131,072 tokens or --context"
    )
    add(
        "--example", type=str.lower, choices=["27b"],
        help="262,144 tokens of a 27B hybrid on 24 GB: why, and when",
    )  # fmt: skip
    tokens = {"type": whole, "metavar": "TOKENS"}
    add("--context", **tokens, help="of a request (default: the model's positions)")
    add("--kv-dtype", type=str.lower, metavar="FORMAT", help=f"of the cache: {', '.join(FORMATS)}")
    add("--state-dtype", choices=["float32", "bfloat16", "float16"], help="default: the config's")
    add("--tp", type=whole, metavar="N", help="GPUs that share each layer (tensor parallel)")
    add("--gpu", type=gpu_size, metavar="SIZE|NAME", help=f"24GiB, or {', '.join(GPUS)}")
    add(
        "--util",
        type=share,
        metavar="SHARE",
        help="share of the GPU a server may take (0.92; 0.9 before vLLM 0.20)",
    )
    add("--weights", type=weight_size, metavar="FORMAT|SIZE",
        help="bf16 (default), fp8, int4, or a size of all of them such as 15GiB")  # fmt: skip
    add(
        "--max-num-seqs",
        type=whole,
        metavar="N",
        help="requests at once (1,024 from 70 GiB on, else 256)",
    )
    add("--kv-memory", type=memory_size, metavar="SIZE",
        help="of the cache on each GPU, such as 5GiB, instead of --gpu's budget")  # fmt: skip
    add("--vllm-version", type=vllm_version, metavar="0.N", help="whose rules (default 0.28)")
    add("--max-model-len", **tokens, help="longest request (default: --context)")
    add(
        "--max-num-batched-tokens",
        **tokens,
        help="a step (8,192 from 70 GiB on, else 2,048)",
    )
    add("--block-size", **tokens, help="a block (16, latents 64)")
    add(
        "--num-spec",
        type=whole,
        metavar="N",
        help="draft tokens a step, by a draft layer with its own cache",
    )
    add("--no-prefix-cache", action="store_true", help="prefix caching off")
    add("--no-hybrid-manager", action="store_true", help="windows are kept whole")
    add("--pp", type=whole, metavar="N", help="pipeline stages")
    add(
        "--dcp", type=whole, metavar="N", help="of --tp's GPUs, those that share a request's tokens"
    )
    add("--json", action="store_true", help="one JSON object")
    return parser


def _main(argv: list[str] | None = None):
    parser = _parser()
    args = parser.parse_args(argv)
    given = {name for name, value in vars(args).items() if value not in (None, False)}
    flag_of = {name: "--" + name.replace("_", "-") for name in vars(args)}
    for name in sorted(given & NEEDS.keys()):
        if not given & set(NEEDS[name]):
            parser.error(f"{flag_of[name]} needs {' or '.join(flag_of[x] for x in NEEDS[name])}")
    vllms = {name for name in given if NEEDS.get(name) == ("gpu", "kv_memory")}
    if args.kv_dtype in LLAMA and vllms:
        parser.error(f"--kv-dtype {args.kv_dtype} is llama.cpp's, {flag_of[min(vllms)]} is vLLM's")
    if {"gpu", "kv_memory"} <= given:
        parser.error("--kv-memory takes the place of --gpu's budget: give one of them")
    if (args.kv_dtype or "auto") not in FORMATS:
        message = f"--kv-dtype {args.kv_dtype} is not one of {', '.join(FORMATS)}"
        parser.error(textwrap.fill(message, 78))
    beside = {
        "compare": {"model", "context", "kv_dtype", "state_dtype", "tp", "json"},
        "example": set(),
    }
    for name in given & beside.keys():
        if other := given - beside[name] - {name}:
            parser.error(f"{flag_of[name]} does not go with {flag_of[min(other)]}")
    models, default = _models(), "SmolLM2-135M-Instruct"
    args.kv_dtype, args.tp = args.kv_dtype or "auto", args.tp or 1
    names = [default if args.model is None else args.model]
    if args.compare:
        args.context = args.context or 131_072
        names = (names if args.model is not None else []) + args.compare
    try:
        if args.example:
            return print(example(models))
        if not given:
            return print(picture(*models[default.lower()]))
        results = [_sized(*_find(name, models, parser), args) for name in names]
    except (ValueError, OSError) as error:
        parser.exit(1, f"{error}\n")
    if args.json:
        print(json.dumps({"models": results} if args.compare else results[0], indent=1))
    else:
        print(comparison(results) if args.compare else report(results[0]))


if __name__ == "__main__":
    import os
    import sys

    try:
        _main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
