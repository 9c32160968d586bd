"""model.py: every family against the reference's stored logits, both file formats, the door.

The golden folders (tests/golden, written by tests/golden/make.py) hold random checkpoints whose
norm weights are away from 1 and biases away from 0, so that a forgotten one shows.
"""

import functools
import json
import math
import random
import re
import shutil
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
]  # fmt: skip
# llama.cpp has no place for a list of rope-less layers, for dense layers among sparse ones, for
# routing weights that are not normalised, or for an activation: it knows the published models only
NOT_GGUF = ("smollm3_listed", "qwen3_moe_mixed", "llama_gelu")
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
CONTROL, NORMAL = 3, 1


def interleaved(weight, heads):
    """A head's rows from halves (x0 x1 .. y0 y1 ..) to pairs (x0 y0 x1 y1 ..), weight or bias."""
    rows = weight.shape[0] // heads
    pairs = [half * (rows // 2) + pair for pair in range(rows // 2) for half in range(2)]
    return weight[[head * rows + row for head in range(heads) for row in pairs]]


def gguf_tensors(config, tensors):
    """Under GGUF names; q and k rows of arch llama and smollm3 interleaved; experts stacked."""
    out, experts = {}, {}
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
        out[f"blk.{layer}.{PARTS[part]}.{kind}"] = tensor
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


def without_attention_factor(config):
    """YaRN as a GGUF file carries it: with the default attention factor."""
    config = json.loads(json.dumps(config))
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
    config = json.loads(json.dumps(config))
    base, scaling = rope_of(config)
    dtype = config.pop("torch_dtype", None) or config.pop("dtype", None)
    for key in ("rope_theta", "rope_scaling", "rope_parameters"):
        config.pop(key, None)
    if version == 4:
        scaling.pop("rope_theta", None)
        return {**config, "rope_theta": base, "rope_scaling": scaling or None, "torch_dtype": dtype}
    rope = {**(scaling or {"rope_type": "default"}), "rope_theta": base}
    return {**config, "rope_parameters": rope, "dtype": dtype}


@pytest.mark.parametrize("family", FAMILIES)
def test_both_styles_of_config_mean_the_same(family, tmp_path):
    config, prompt = config_of(family), ids_of(family)[0]
    for version in (4, 5):
        styled = in_style(config, version)
        net = model.Model(
            model.Config.from_hf(styled), tensors_of(family), device="cpu", dtype=torch.float32
        )
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


# ---------------------------------------------------------------- the same model from GGUF


@pytest.mark.parametrize("family", GGUF_FAMILIES)
def test_gguf_is_the_same_model(family, tmp_path):
    config, tensors, prompt = (
        without_attention_factor(config_of(family)),
        tensors_of(family),
        ids_of(family)[0],
    )
    checkpoint = model.load(str(write_gguf(tmp_path / "m.gguf", config, tensors)))
    net = model.Model(checkpoint.config, checkpoint.tensors, device="cpu", dtype=torch.float32)
    logits = forward(net, cache_for(config), (0, prompt, 0))
    plain = model.Model(model.Config.from_hf(config), tensors, device="cpu", dtype=torch.float32)
    assert distance(logits, forward(plain, cache_for(config), (0, prompt, 0))) <= 1e-5


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


@pytest.mark.parametrize("family", ["llama3", "smollm3", "qwen3_moe_mixed"])
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
        assert distance(torch.cat(parts), forward(net, cache_for(config), (0, ids, 0))) <= 1e-5


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


@pytest.mark.parametrize("family", ["llama3", "qwen2", "qwen3_moe"])
def test_bfloat16_is_near(family):
    config, prompt = config_of(family), ids_of(family)[0]
    net = build(GOLDEN / family, dtype=torch.bfloat16)
    logits = forward(net, cache_for(config, dtype=torch.bfloat16), (0, prompt, 0)).float()
    error = (logits - expected(family)["prefill_logits"]).square().mean().sqrt()
    assert float(error) < 0.1, "root mean square, of logits of about 1"


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
    for entry in json.loads(model.MODELS.read_text()):
        if entry["config"]["model_type"] not in model.RUN:  # sized, not run
            expect_refused(lambda: model.dummy(entry["name"]))
            continue
        checkpoint = model.dummy(entry["name"].lower())
        assert checkpoint.name == entry["name"] and checkpoint.tensors.nbytes > 4e8
    assert model.dummy(None).name == "SmolLM2-135M-Instruct"


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
