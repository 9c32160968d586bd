"""Golden data: for each model family a tiny random checkpoint and what the reference makes of it.

The idea      A formula that is wrong everywhere agrees with itself. So each family has a
              checkpoint of two to five layers, and the reference implementation (Hugging Face
              transformers, needed by this file only) says what its logits are. The weights are
              drawn so that nothing can hide: norm weights away from 1, biases away from 0,
              attention far from uniform, positions beyond the original maximum wherever rope
              is scaled.

The data      one folder a family, in the form a published checkpoint has:
              config.json                  as transformers 4 or 5 writes it: both styles occur
              generation_config.json       where the family has one
              model.safetensors            float32, published names; or shards and their index
              expected.safetensors
                prompt          (P,)       int64
                prefill_logits  (P, V)     float32, every position of the prompt
                greedy          (N,)       the reference's own continuation
                decode_logits   (N, V)     row i: after prompt + greedy[: i + 1]
                metadata "about"           versions, seed, smallest lead of the best logit

Invariants    1. the reference reads the very folder that is stored, and reports no missing and
                 no unexpected tensor
              2. along the greedy path the best logit leads by more than MIN_GAP
              3. the same forward in float64 differs by less than MAX_DRIFT: the stored numbers
                 are the formula's, not the machine's
              4. the path has at least MIN_DISTINCT different tokens
              A seed that violates 2, 3 or 4 is skipped; the same versions write the same bytes.

Try           python tests/golden/make.py                     rewrite every family
              python tests/golden/make.py qwen3 llama_yarn    only these
              python tests/golden/make.py --fresh 7 OUT       other sizes, from seed 7, into OUT
              python tests/golden/make.py --check OUT         Octavo against transformers there
Imports       transformers; with --check also Octavo (model, kv_cache).
"""

import argparse
import json
import math
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from zlib import crc32

import torch
from safetensors.torch import load_file, save_file

HERE = Path(__file__).resolve().parent
PROMPT_TOKENS = 72
DECODE_TOKENS = 16
MIN_GAP = 2e-3  # best logit minus second best, along the greedy path
MAX_DRIFT = 2e-5  # |float32 - float64| over all stored logits
MIN_DISTINCT = 6  # different tokens on the greedy path
CHECK_TOLERANCE = 1e-4  # |Octavo - transformers|

LLAMA3_EOS = [94, 95]


# ---------------------------------------------------------------- the families


def families():
    """name -> {"config": dict, "generation": dict or None, "shards": how many files}."""
    llama = dict(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        hidden_act="silu",
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        rope_scaling=None,
        attention_bias=False,
        mlp_bias=False,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=True,
        torch_dtype="float32",
        transformers_version="4.46.0",
    )
    qwen = dict(
        architectures=["Qwen2ForCausalLM"],
        model_type="qwen2",
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        hidden_act="silu",
        max_position_embeddings=128,
        max_window_layers=3,
        rms_norm_eps=1e-6,
        rope_theta=1000000.0,
        use_sliding_window=False,
        sliding_window=128,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        torch_dtype="bfloat16",
        transformers_version="4.43.1",
    )
    qwen3 = {
        **qwen,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 16,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rope_scaling": None,
        "sliding_window": None,
        "transformers_version": "4.51.0",
    }
    moe = {
        **qwen3,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "head_dim": 12,
        "num_hidden_layers": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    }

    table = {}

    def add(name, config, generation=None, shards=1):
        table[name] = {"config": config, "generation": generation, "shards": shards}

    # rope and bias fields absent, as in the oldest files; every head has its own key and value
    first = {
        key: value
        for key, value in llama.items()
        if key not in ("rope_theta", "rope_scaling", "attention_bias", "mlp_bias")
    }
    add("llama2", {**first, "num_key_value_heads": 4, "torch_dtype": "float16"})

    add(
        "llama3",
        {
            **llama,
            "head_dim": 16,
            "rope_theta": 5000.0,
            "max_position_embeddings": 256,
            "eos_token_id": LLAMA3_EOS,
            "torch_dtype": "bfloat16",
            "rope_scaling": {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
                "rope_type": "llama3",
            },
        },
        generation={
            "bos_token_id": 1,
            "do_sample": True,
            "eos_token_id": LLAMA3_EOS,
            "temperature": 0.6,
            "top_p": 0.9,
            "transformers_version": "4.46.0",
        },
    )

    fifth = {
        key: value
        for key, value in llama.items()
        if key not in ("rope_theta", "rope_scaling", "torch_dtype")
    }
    fifth.update(dtype="float32", transformers_version="5.0.0")
    add(
        "llama_linear",
        {
            **fifth,
            "num_hidden_layers": 2,
            "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 2000.0},
        },
    )

    # the ramp runs from pair 1 to pair 4 of 8; the attention factor is not the default 1.1386
    add(
        "llama_yarn",
        {
            **llama,
            "num_hidden_layers": 2,
            "head_dim": 16,
            "rope_theta": 300.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "beta_fast": 2.0,
                "beta_slow": 0.5,
                "attention_factor": 0.85,
                "original_max_position_embeddings": 32,
            },
        },
    )

    add("llama_gelu", {**llama, "num_hidden_layers": 2, "hidden_act": "gelu_pytorch_tanh"})
    add("llama_bias", {**llama, "num_hidden_layers": 2, "attention_bias": True, "mlp_bias": True})

    add(
        "smollm2",
        {
            **llama,
            "hidden_size": 72,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 8,
            "num_hidden_layers": 2,
            "rope_theta": 100000,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
        },
    )

    smollm3 = {
        **llama,
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "num_hidden_layers": 5,
        "rope_theta": 5000000.0,
        "no_rope_layer_interval": 4,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 28,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "layer_types": ["full_attention"] * 5,
        "transformers_version": "4.53.0",
    }
    add("smollm3", {**smollm3, "no_rope_layers": [1, 1, 1, 0, 1]})

    # an irregular list: it wins over the interval
    listed = {
        key: value
        for key, value in smollm3.items()
        if key not in ("rope_theta", "rope_scaling", "torch_dtype", "layer_types")
    }
    add(
        "smollm3_listed",
        {
            **listed,
            "num_hidden_layers": 3,
            "no_rope_layers": [0, 1, 0],
            "no_rope_layer_interval": 2,
            "dtype": "bfloat16",
            "rope_parameters": {"rope_theta": 20000.0, "rope_type": "default"},
            "transformers_version": "5.0.0",
        },
    )

    mistral = {
        key: value for key, value in llama.items() if key not in ("attention_bias", "mlp_bias")
    }
    add(
        "mistral",
        {
            **mistral,
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "head_dim": 12,
            "sliding_window": None,
            "rope_theta": 1000000.0,
            "torch_dtype": "bfloat16",
        },
        shards=3,
    )

    add(
        "qwen2",
        {**qwen, "tie_word_embeddings": True},
        generation={
            "bos_token_id": 1,
            "pad_token_id": 0,
            "do_sample": True,
            "eos_token_id": [2, 3],
            "repetition_penalty": 1.05,
            "temperature": 0.7,
            "top_p": 0.8,
            "top_k": 20,
            "transformers_version": "4.43.1",
        },
    )

    # as the Qwen2.5 model cards say: only `rope_scaling` is added, the positions stay
    add(
        "qwen2_yarn",
        {
            **qwen,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 32,
            "rope_theta": 100.0,
            "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32, "type": "yarn"},
        },
    )

    v5 = {
        key: value
        for key, value in qwen3.items()
        if key not in ("rope_theta", "rope_scaling", "torch_dtype")
    }
    add(
        "qwen3",
        {
            **v5,
            "dtype": "bfloat16",
            "layer_types": ["full_attention"] * 3,
            "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
            "transformers_version": "5.0.0",
        },
    )

    add("qwen3_moe", moe)
    # sparse where (i + 1) % 2 == 0, except where listed: only layer 3
    add(
        "qwen3_moe_mixed",
        {
            **moe,
            "num_hidden_layers": 4,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [1],
            "norm_topk_prob": False,
            "head_dim": 8,
        },
    )
    add_windows(add, mistral, qwen)
    add_hybrids(add, qwen3, moe)
    for name, config in deepseek(llama).items():
        add(name, config)
    return table


def add_windows(add, mistral, qwen):
    """Families whose layers see a window: shorter than the prompt, so that it is crossed."""
    add(
        "mistral_sliding",
        {
            **mistral,
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "sliding_window": 11,
        },
    )
    # the first layer sees all; layers from the second on slide
    add(
        "qwen2_sliding",
        {**qwen, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    )
    gemma = dict(
        architectures=["Gemma3ForCausalLM"],
        model_type="gemma3_text",
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        hidden_activation="gelu_pytorch_tanh",
        max_position_embeddings=128,
        rms_norm_eps=1e-6,
        query_pre_attn_scalar=20,
        sliding_window=9,
        attention_bias=False,
        attention_dropout=0.0,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        bos_token_id=2,
        eos_token_id=[1, 3],
        pad_token_id=0,
        use_cache=True,
    )
    # as Gemma 3 was published; scaled where a layer sees all, like the sizes from 4B on
    add(
        "gemma3_old",
        {
            **gemma,
            "sliding_window_pattern": 2,
            "rope_theta": 2000.0,
            "rope_local_base_freq": 40.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "torch_dtype": "bfloat16",
            "transformers_version": "4.50.0",
        },
    )
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    ropes = {"full_attention": 3000.0, "sliding_attention": 50.0}
    add(
        "gemma3",
        {
            **gemma,
            "num_key_value_heads": 1,
            "attention_bias": True,
            "query_pre_attn_scalar": 9,
            "sliding_window": 13,
            "tie_word_embeddings": False,
            "layer_types": kinds,
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": base} for kind, base in ropes.items()
            },
            "use_bidirectional_attention": False,
            "dtype": "bfloat16",
            "transformers_version": "5.0.0",
        },
    )


def add_hybrids(add, qwen3, moe):
    """Layers of Gated DeltaNet among those of attention."""
    linear = dict(
        full_attention_interval=4,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_value_head_dim=12,
    )
    following = {
        **moe,
        **linear,
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "head_dim": 16,
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000.0,
        "shared_expert_intermediate_size": 24,
        "transformers_version": "4.57.0",
    }
    for name in ("sliding_window", "use_sliding_window", "max_window_layers"):
        del following[name]
    add("qwen3_next", following)

    # three value heads a key head, values smaller than keys, a dense layer, biases, scaled rope
    odd = {name: following[name] for name in following if name not in ("rope_theta", "torch_dtype")}
    for name in ("rope_scaling", "partial_rotary_factor", "full_attention_interval"):
        del odd[name]
    add(
        "qwen3_next_odd",
        {
            **odd,
            "attention_bias": True,
            "dtype": "bfloat16",
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "linear_conv_kernel_dim": 3,
            "linear_key_head_dim": 20,
            "linear_num_value_heads": 6,
            "linear_value_head_dim": 8,
            "max_position_embeddings": 32,
            "mlp_only_layers": [1],
            "norm_topk_prob": False,
            "num_hidden_layers": 3,
            "rope_parameters": {
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "partial_rotary_factor": 0.5,
                "rope_theta": 300.0,
                "rope_type": "yarn",
            },
            "transformers_version": "5.0.0",
        },
    )

    # as published: beside vision, whose tensors are there too
    text = {
        key: value
        for key, value in qwen3.items()
        if key not in ("rope_theta", "rope_scaling", "torch_dtype", "architectures")
    }
    for name in ("sliding_window", "use_sliding_window", "max_window_layers"):
        del text[name]
    text = {
        **text,
        **linear,
        "model_type": "qwen3_5_text",
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "head_dim": 24,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [1, 1, 1],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000.0,
            "rope_type": "default",
        },
    }
    add(
        "qwen3_5",
        {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": "qwen3_5",
            "text_config": text,
            "tie_word_embeddings": False,
            "transformers_version": "4.57.0.dev0",
            "vision_config": {"depth": 1, "hidden_size": 16, "model_type": "qwen3_5"},
        },
    )

    # text alone, tied; the quarter that rope turns is the default; keys as many as values
    alone = {key: value for key, value in text.items() if key not in ("layer_types", "dtype")}
    del alone["rope_parameters"]
    add(
        "qwen3_5_text",
        {
            **alone,
            "architectures": ["Qwen3_5ForCausalLM"],
            "full_attention_interval": 2,
            "head_dim": 8,
            "linear_conv_kernel_dim": 2,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_value_head_dim": 16,
            "num_hidden_layers": 4,
            "rope_theta": 20000.0,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
        },
    )


def deepseek(llama):
    """name -> config of latent attention: every size of a head is another one."""
    absent = ("attention_bias", "mlp_bias", "rope_scaling", "rope_theta", "torch_dtype")
    third = dict(
        {key: value for key, value in llama.items() if key not in absent},
        architectures=["DeepseekV3ForCausalLM"],
        model_type="deepseek_v3",
        num_key_value_heads=4,
        q_lora_rank=24,
        kv_lora_rank=20,
        qk_nope_head_dim=10,
        qk_rope_head_dim=8,
        v_head_dim=12,
        n_routed_experts=12,
        n_shared_experts=2,
        num_experts_per_tok=3,
        moe_intermediate_size=16,
        moe_layer_freq=1,
        first_k_dense_replace=1,
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        num_nextn_predict_layers=1,
        rms_norm_eps=1e-6,
    )
    version4 = dict(rope_theta=10000, rope_scaling=None, torch_dtype="bfloat16")
    version5 = dict(
        rope_parameters={"rope_theta": 20000.0, "rope_type": "default"},
        dtype="bfloat16",
        transformers_version="5.0.0",
    )
    # both factors matter: 1.1386 / 1.0970 on cos and sin, 1.0970 squared on the products
    stretched = dict(
        type="yarn",
        factor=4,
        beta_fast=2,
        beta_slow=0.5,
        mscale=1.0,
        mscale_all_dim=0.7,
        original_max_position_embeddings=32,
    )
    plain = dict(
        q_lora_rank=None,
        n_group=1,
        topk_group=1,
        n_shared_experts=1,
        norm_topk_prob=False,
        routed_scaling_factor=1.5,
        rope_interleave=False,
        num_hidden_layers=2,
    )
    # few index heads would often score several tokens 0, all of which are then equally good
    sparse = dict(
        architectures=["DeepseekV32ForCausalLM"],
        model_type="deepseek_v32",
        index_n_heads=16,
        index_head_dim=14,
        index_topk=12,
    )
    return {
        "deepseek_v3": third | version4,
        "deepseek_v3_plain": third | version5 | plain,
        "deepseek_v3_yarn": third | version4 | dict(rope_scaling=stretched, num_hidden_layers=2),
        "deepseek_v32": third | version5 | sparse,
    }


def fresh(name, config, draw):
    """The family's config with other sizes: what makes the family itself stays."""
    heads = draw.choice([2, 4, 6])
    whole = json.loads(json.dumps(config))
    config = whole.get("text_config", whole)
    config.update(
        num_attention_heads=heads,
        num_key_value_heads=draw.choice([g for g in (1, 2, 3, 6) if heads % g == 0]),
        hidden_size=heads * draw.choice([8, 16]),
        intermediate_size=draw.choice([24, 40, 64]),
        vocab_size=draw.choice([50, 97, 128]),
    )
    if name == "llama2":
        config["num_key_value_heads"] = heads
    if "head_dim" in config:
        # where a family names head_dim, it need not be hidden_size / heads
        config["head_dim"] = draw.choice([6, 8, 16, 20])
    by_kind = config.get("rope_parameters") or config
    ropes = [rope for rope in by_kind.values() if isinstance(rope, dict) and "rope_theta" in rope]
    for rope in ropes or [by_kind]:
        rope["rope_theta"] = draw.choice([500.0, 10000.0, 1000000.0])
    if "rope_local_base_freq" in config:
        config["rope_local_base_freq"] = draw.choice([30.0, 700.0])
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        config["sliding_window"] = draw.choice([8, 10, 17, 24])
    if "query_pre_attn_scalar" in config:
        config["query_pre_attn_scalar"] = draw.choice([5, 16, 31])
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if "factor" in scaling:
        scaling["factor"] = draw.choice([2.0, 3.5, 8.0])
    if "num_experts" in config:
        config.update(
            num_experts=draw.choice([4, 7, 8]),
            num_experts_per_tok=draw.choice([1, 2, 4]),
            moe_intermediate_size=draw.choice([8, 24]),
        )
    if "linear_num_key_heads" in config:
        fresh_hybrid(config, draw)
    if "kv_lora_rank" in config:
        fresh_latent(config, draw)
    return whole


def fresh_hybrid(config, draw):
    keys = draw.choice([1, 2, 3])
    config.update(
        head_dim=draw.choice([8, 16, 24]),  # of which a quarter is turned, in pairs
        linear_conv_kernel_dim=draw.choice([2, 3, 4]),
        linear_key_head_dim=draw.choice([8, 12, 20, 24]),
        linear_num_key_heads=keys,
        linear_num_value_heads=keys * draw.choice([1, 2, 3]),
        linear_value_head_dim=draw.choice([8, 12, 20, 24]),
    )
    if "num_experts" in config:
        config["shared_expert_intermediate_size"] = draw.choice([8, 12, 40])


def fresh_latent(config, draw):
    groups = draw.choice([2, 3]) if config["n_group"] > 1 else 1
    config.update(
        num_key_value_heads=config["num_attention_heads"],
        q_lora_rank=config["q_lora_rank"] and draw.choice([12, 40]),
        kv_lora_rank=draw.choice([12, 16, 30]),
        qk_nope_head_dim=draw.choice([6, 9, 16]),
        qk_rope_head_dim=draw.choice([4, 6, 8]),
        v_head_dim=draw.choice([7, 8, 14]),
        n_routed_experts=groups * draw.choice([2, 4, 5]),
        n_shared_experts=draw.choice([1, 3]),
        num_experts_per_tok=draw.choice([1, 2]),
        moe_intermediate_size=draw.choice([8, 24]),
        first_k_dense_replace=draw.choice([0, 1]),
        n_group=groups,
        topk_group=draw.randint(1, groups),
    )
    if "index_topk" in config:
        config.update(
            index_n_heads=draw.choice([16, 24]),
            index_head_dim=draw.choice([8, 20]),
            index_topk=draw.choice([7, 30]),
        )


# ---------------------------------------------------------------- the weights


def shapes(config):
    """Published tensor name -> shape, for every tensor of the checkpoint."""
    if "text_config" in config:
        tie = config["tie_word_embeddings"]
        text = shapes({**config["text_config"], "tie_word_embeddings": tie})
        names = {name.replace("model.", "model.language_model."): text[name] for name in text}
        return {**names, "model.visual.patch_embed.proj.weight": (4, 3, 2, 2, 2)}
    E, V = config["hidden_size"], config["vocab_size"]
    H, G = config["num_attention_heads"], config["num_key_value_heads"]
    D = config.get("head_dim") or E // H
    kind = config["model_type"]
    attention_bias = config.get("attention_bias", False)
    qkv_bias = attention_bias or kind == "qwen2"
    names = {"model.embed_tokens.weight": (V, E), "model.norm.weight": (E,)}
    if not tied(config):
        names["lm_head.weight"] = (V, E)

    def linear(name, out, into, bias):
        names[name + ".weight"] = (out, into)
        if bias:
            names[name + ".bias"] = (out,)

    def mlp(name, width, bias):
        linear(name + ".gate_proj", width, E, bias)
        linear(name + ".up_proj", width, E, bias)
        linear(name + ".down_proj", E, width, bias)

    hybrid = "linear_num_key_heads" in config
    if hybrid:
        names["mtp.fc.weight"] = (E, 2 * E)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        names[layer + ".input_layernorm.weight"] = (E,)
        names[layer + ".post_attention_layernorm.weight"] = (E,)
        if "kv_lora_rank" in config:
            names.update(latent_shapes(layer, config))
            if i < config["first_k_dense_replace"]:
                mlp(layer + ".mlp", config["intermediate_size"], False)
                continue
            inner, experts = config["moe_intermediate_size"], config["n_routed_experts"]
            names[layer + ".mlp.gate.weight"] = (experts, E)
            names[layer + ".mlp.gate.e_score_correction_bias"] = (experts,)
            for e in range(experts):
                mlp(f"{layer}.mlp.experts.{e}", inner, False)
            mlp(layer + ".mlp.shared_experts", inner * config["n_shared_experts"], False)
            continue
        if kind == "gemma3_text":
            names[layer + ".pre_feedforward_layernorm.weight"] = (E,)
            names[layer + ".post_feedforward_layernorm.weight"] = (E,)
        if hybrid and is_linear(config, i):
            names.update(delta_net(layer + ".linear_attn.", config))
        else:
            linear(layer + ".self_attn.q_proj", (1 + hybrid) * H * D, E, qkv_bias)
            linear(layer + ".self_attn.k_proj", G * D, E, qkv_bias)
            linear(layer + ".self_attn.v_proj", G * D, E, qkv_bias)
            linear(layer + ".self_attn.o_proj", E, H * D, attention_bias)
            if hybrid or kind in ("qwen3", "qwen3_moe", "gemma3_text"):
                names[layer + ".self_attn.q_norm.weight"] = (D,)
                names[layer + ".self_attn.k_norm.weight"] = (D,)
        sparse = (
            "num_experts" in config
            and i not in config["mlp_only_layers"]
            and (i + 1) % config["decoder_sparse_step"] == 0
        )
        if sparse:
            names[layer + ".mlp.gate.weight"] = (config["num_experts"], E)
            for e in range(config["num_experts"]):
                mlp(f"{layer}.mlp.experts.{e}", config["moe_intermediate_size"], False)
            if kind == "qwen3_next":
                linear(layer + ".mlp.shared_expert_gate", 1, E, False)
                inner = config["shared_expert_intermediate_size"]
                mlp(layer + ".mlp.shared_expert", inner, False)
        else:
            mlp(layer + ".mlp", config["intermediate_size"], config.get("mlp_bias", False))
    return names


def tied(config):
    """Whether logits use the embedding; Gemma 3 says so by saying nothing."""
    return config.get("tie_word_embeddings", config["model_type"] == "gemma3_text")


def is_linear(config, layer):
    if "layer_types" in config:
        return config["layer_types"][layer] == "linear_attention"
    return (layer + 1) % config["full_attention_interval"] != 0


def delta_net(prefix, config):
    """A Gated DeltaNet layer's tensors: published name -> shape."""
    E, heads = config["hidden_size"], config["linear_num_value_heads"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = heads * config["linear_value_head_dim"]
    if config["model_type"] == "qwen3_next":
        rows = {"in_proj_qkvz": 2 * keys + 2 * values, "in_proj_ba": 2 * heads}
    else:
        rows = {"in_proj_qkv": 2 * keys + values, "in_proj_z": values}
        rows.update(in_proj_b=heads, in_proj_a=heads)
    return {
        **{f"{prefix}{name}.weight": (rows[name], E) for name in rows},
        prefix + "conv1d.weight": (2 * keys + values, 1, config["linear_conv_kernel_dim"]),
        prefix + "A_log": (heads,),
        prefix + "dt_bias": (heads,),
        prefix + "norm.weight": (config["linear_value_head_dim"],),
        prefix + "out_proj.weight": (E, values),
    }


def latent_shapes(layer, config):
    """The tensors of one layer's latent attention, and of its index if it has one."""
    E, H, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    ranked, turned = config["q_lora_rank"], config["qk_rope_head_dim"]
    plain, value = config["qk_nope_head_dim"], config["v_head_dim"]
    shapes = {
        "kv_a_proj_with_mqa.weight": (rank + turned, E),
        "kv_a_layernorm.weight": (rank,),
        "kv_b_proj.weight": (H * (plain + value), rank),
        "o_proj.weight": (E, H * value),
    }
    if ranked:
        shapes["q_a_proj.weight"] = (ranked, E)
        shapes["q_a_layernorm.weight"] = (ranked,)
    shapes["q_b_proj.weight" if ranked else "q_proj.weight"] = (H * (plain + turned), ranked or E)
    if "index_topk" in config:
        heads, dim = config["index_n_heads"], config["index_head_dim"]
        shapes["indexer.wq_b.weight"] = (heads * dim, ranked)
        shapes["indexer.wk.weight"] = (dim, E)
        shapes["indexer.k_norm.weight"] = (dim,)
        shapes["indexer.k_norm.bias"] = (dim,)
        shapes["indexer.weights_proj.weight"] = (heads, E)
    return {f"{layer}.self_attn.{name}": shape for name, shape in shapes.items()}


def draw_tensor(name, shape, config, generator):
    """Norm weights 0.1 to 0.6 away from 1 (from 0 where 1 is added); biases 0.2 to 0.8 away from
    0; matrices by width. States fade by half in 1 to 20 rows."""
    if name.endswith("norm.weight"):
        away = 0.1 + 0.5 * torch.rand(shape, generator=generator)
        added = config["model_type"] == "gemma3_text" or "linear_num_key_heads" in config
        middle = 0 if added and "linear_attn" not in name else 1
        return middle + away * torch.randint(0, 2, shape, generator=generator).mul(2).sub(1)
    if name.endswith("A_log"):
        return -3 * torch.rand(shape, generator=generator)
    if name.endswith("dt_bias"):
        return 2 * torch.rand(shape, generator=generator) - 1
    if name.endswith(".bias") or name.endswith("_correction_bias"):
        away = 0.2 + 0.6 * torch.rand(shape, generator=generator)
        return away * torch.randint(0, 2, shape, generator=generator).mul(2).sub(1)
    value = torch.randn(shape, generator=generator)
    if "embed_tokens" in name and not tied(config):
        return value
    # queries and keys a little larger: nearly uniform attention would hide errors of position
    large = ("q_proj", "k_proj", "q_b_proj", "kv_a_proj", "kv_b_proj")
    gain = 1.4 if any(part in name for part in large) else 1.0
    if "embed_tokens" in name and config["model_type"] == "gemma3_text":
        gain = 0.4  # it is scaled by the root of the width, and would make tokens repeat themselves
    return value * gain / math.sqrt(shape[-1])


def write_checkpoint(folder, config, generation, shards, seed):
    """Config, weights and prompt of one family; returns the prompt (P,)."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*"):
        if old.name.endswith((".safetensors", ".json")):
            old.unlink()
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    generator = torch.Generator().manual_seed(seed)
    text = {**config, **config.get("text_config", {})}
    tensors = {
        name: draw_tensor(name, shape, text, generator) for name, shape in shapes(config).items()
    }
    save_sharded(folder, tensors, shards)
    return torch.randint(0, text["vocab_size"], (PROMPT_TOKENS,), generator=generator)


def save_sharded(folder, tensors, shards):
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(tensors)
    weight_map = {}
    for s in range(shards):
        file = f"model-{s + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[s::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map.update({name: file for name in part})
    total_bytes = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {
        "metadata": {"total_size": total_bytes},
        "weight_map": dict(sorted(weight_map.items())),
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


# ---------------------------------------------------------------- the reference


def reference_model(folder, dtype):
    """transformers' model of the stored folder; every tensor must have found its place."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[what], f"{folder.name}: {what} {info[what]}"
    return model.eval()


@torch.no_grad()
def reference_run(model, prompt, forced=None):
    """(prefill_logits (P, V), greedy (N,), decode_logits (N, V)); `forced` ids are fed if given."""
    out = model(input_ids=prompt[None], use_cache=True)
    prefill = out.logits[0]
    last, greedy, decode = prefill[-1], [], []
    for i in range(DECODE_TOKENS):
        token = int(last.argmax()) if forced is None else int(forced[i])
        greedy.append(token)
        out = model(input_ids=torch.tensor([[token]]), cache=out.cache, use_cache=True)
        last = out.logits[0, -1]
        decode.append(last)
    return prefill, torch.tensor(greedy), torch.stack(decode)


def smallest_gap(prefill, decode):
    """Best logit minus the second, the smallest along the greedy path."""
    rows = torch.cat([prefill[-1:], decode])
    best = rows.topk(2, dim=-1).values
    return float((best[:, 0] - best[:, 1]).min())


def make(name, folder, config, generation, shards, seed):
    """Write one family; try seeds until the greedy path is clear and the numbers are stable."""
    import transformers

    for attempt in range(50):
        prompt = write_checkpoint(folder, config, generation, shards, seed + 1000 * attempt)
        prefill, greedy, decode = reference_run(reference_model(folder, torch.float32), prompt)
        wide = reference_run(reference_model(folder, torch.float64), prompt, forced=greedy)
        drift = max(float((prefill - wide[0]).abs().max()), float((decode - wide[2]).abs().max()))
        gap = smallest_gap(prefill, decode)
        if gap > MIN_GAP and drift < MAX_DRIFT and len(greedy.unique()) >= MIN_DISTINCT:
            break
    else:
        raise RuntimeError(
            f"{name}: no seed of 50 is usable: last gap {gap:.5f}, drift {drift:.1e}, "
            f"{len(greedy.unique())} different tokens"
        )
    about = {
        "family": name,
        "seed": seed + 1000 * attempt,
        "gap": round(gap, 5),
        "drift": f"{drift:.1e}",
        "transformers": transformers.__version__,
        "torch": torch.__version__.split("+")[0],
    }
    # one key: safetensors writes several in no fixed order
    save_file(
        {
            "prompt": prompt,
            "prefill_logits": prefill.contiguous(),
            "greedy": greedy,
            "decode_logits": decode.contiguous(),
        },
        folder / "expected.safetensors",
        metadata={"about": json.dumps(about)},
    )
    size_kib = sum(f.stat().st_size for f in folder.iterdir()) / 1024
    print(
        f"{name:16} {size_kib:5.0f} KiB  gap {gap:.4f}  drift {drift:.1e}  "
        f"std {float(prefill.std()):.2f}  different {len(greedy.unique())}/{DECODE_TOKENS}"
    )


# ---------------------------------------------------------------- Octavo beside it


@torch.no_grad()
def octavo_run(folder, prompt, forced):
    """Octavo's (prefill_logits, decode_logits) for the same ids, on the contiguous cache."""
    sys.path.insert(0, str(HERE.parent.parent))
    import kv_cache
    import model as octavo

    checkpoint = octavo.load(str(folder))
    model = octavo.Model(checkpoint.config, checkpoint.tensors, device="cpu", dtype=torch.float32)
    cache = kv_cache.ContiguousCache(
        model.config.specs,
        slots=1,
        max_len=len(prompt) + len(forced),
        device="cpu",
        dtype=torch.float32,
    )

    def logits(ids, start):
        request = SimpleNamespace(
            slot=0, tokens=[0] * start + ids, draft=[], computed=start, behind=len(ids), samples=1
        )
        step = cache.prepare([(request, len(ids))])
        hidden, _ = model(step.tokens, step.positions, step)
        cache.commit(step, None)
        return model.logits(hidden)

    prefill = logits(prompt.tolist(), 0)
    decode = [logits([token], len(prompt) + i)[0] for i, token in enumerate(forced.tolist())]
    return prefill, torch.stack(decode)


def check(folder):
    """Largest |Octavo - transformers| over all logits of a folder, computed now by both."""
    expected = load_file(folder / "expected.safetensors")
    reference = reference_model(folder, torch.float32)
    prefill, greedy, decode = reference_run(reference, expected["prompt"])
    mine = octavo_run(folder, expected["prompt"], greedy)
    return max(float((prefill - mine[0]).abs().max()), float((decode - mine[1]).abs().max()))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("families", nargs="*", help="only these (default: all)")
    parser.add_argument(
        "--fresh", nargs=2, metavar=("SEED", "OUTDIR"), help="random sizes, into OUTDIR"
    )
    parser.add_argument(
        "--check", metavar="DIR", help="compare Octavo with transformers on DIR's folders"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.check:
        folders = [
            f.parent
            for f in sorted(Path(arguments.check).glob("**/expected.safetensors"))
            if not arguments.families or f.parent.name in arguments.families
        ]
        if not folders:
            parser.error(f"no folder with expected.safetensors under {arguments.check}")
        worst = 0.0
        for folder in folders:
            difference = check(folder)
            worst = max(worst, difference)
            print(
                f"{folder.name:16} max |difference| {difference:.1e}"
                f"{'' if difference <= CHECK_TOLERANCE else '  TOO LARGE'}"
            )
        sys.exit(0 if worst <= CHECK_TOLERANCE else 1)
    table = families()
    unknown = set(arguments.families) - set(table)
    if unknown:
        parser.error(f"unknown family {sorted(unknown)}; known: {' '.join(table)}")
    draw = random.Random(int(arguments.fresh[0])) if arguments.fresh else None
    for name, family in table.items():
        if arguments.families and name not in arguments.families:
            continue
        config, seed, out = family["config"], crc32(name.encode()) % 10**6, HERE / name
        if draw:
            config, seed = fresh(name, config, draw), draw.randrange(10**6)
            out = Path(arguments.fresh[1]) / name
        make(name, out, config, family["generation"], family["shards"], seed)


if __name__ == "__main__":
    main()
