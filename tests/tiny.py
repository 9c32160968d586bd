"""Builders that several test files share: a tiny model, requests as a cache sees them, garbage.

Nothing here downloads, and nothing is drawn without a seed.
"""

import json
from dataclasses import replace
from types import SimpleNamespace

import torch
from safetensors.torch import save_file

import kv_cache
import model


def build(vocab: int = 96, experts: int = 0, seed: int = 0) -> model.Model:
    """Two layers of random weights, 4 query heads on 2 key/value heads: see `model.tiny`."""
    checkpoint = model.random(model.tiny(vocab, experts), seed)
    return model.Model(checkpoint.config, checkpoint.tensors)


def request(tokens, slot=0, computed=0, draft=(), samples=1) -> SimpleNamespace:
    """What `prepare` needs of a request, without a scheduler."""
    behind = len(tokens) + len(draft) - computed
    return SimpleNamespace(
        tokens=list(tokens), slot=slot, computed=computed, draft=list(draft), samples=samples,
        behind=behind, id=0, index=0,
    )  # fmt: skip


def poisoned(cache):
    """Fill a paged cache with NaN, but for the state before any token: see `garbage`."""
    for spec, pools in zip(cache.specs, cache.pools):
        for pool in pools:
            pool[spec.kind == "linear" :] = torch.nan
    return cache


def garbage(cache: kv_cache.ContiguousCache) -> kv_cache.ContiguousCache:
    """Fill a cache with NaN: whatever is read without having been written shows."""
    for layer in cache.buffers:
        for buffer in layer:
            buffer.fill_(torch.nan)
    return cache


def eagle(
    own: bool = False, seed: int = 0, wide: int = 32, vocab: int = 96, **changes
) -> tuple[dict, dict]:
    """A random EAGLE-3 head: config.json as published, and tensors by the published names. What a
    field is changed to None is absent."""
    fields = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": wide,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 48, "vocab_size": vocab, "draft_vocab_size": 40,
        "max_position_embeddings": 128, "rms_norm_eps": 1e-3, "rope_theta": 300.0,
        "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    } | changes  # fmt: skip
    fields = {name: value for name, value in fields.items() if value is not None}
    D, H, G = (fields[x] for x in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    F, d = fields["intermediate_size"], fields.get("head_dim", D // H)
    V, ids = fields["vocab_size"], fields.get("draft_vocab_size", fields["vocab_size"])
    parts = len(fields.get("eagle_aux_hidden_state_layer_ids", "123"))
    shapes = {"fc": (D, parts * wide), "lm_head": (ids, D)}
    attention = {"q": (H * d, 2 * D), "k": (G * d, 2 * D), "v": (G * d, 2 * D), "o": (D, H * d)}
    shapes |= {f"midlayer.self_attn.{x}_proj": shape for x, shape in attention.items()}
    mlp = {"gate": (F, D), "up": (F, D), "down": (D, F)}
    shapes |= {f"midlayer.mlp.{x}_proj": shape for x, shape in mlp.items()}
    norms = {f"midlayer.{x}": D for x in ("input_layernorm", "hidden_norm")}
    norms |= {"midlayer.post_attention_layernorm": D, "norm": D}
    if fields.get("norm_before_fc"):
        norms["input_norm"] = parts * wide
    if fields.get("fc_norm"):
        norms |= {f"fc_norm.{i}": wide for i in range(parts)}
    draw = torch.Generator().manual_seed(seed)
    tensors = {f"{x}.weight": 0.3 * torch.randn(s, generator=draw) for x, s in shapes.items()}
    for name, width in norms.items():
        tensors[f"{name}.weight"] = 1 + 0.3 * torch.randn(width, generator=draw)
    biased = attention if fields.get("attention_bias") else {}
    biased = {f"self_attn.{x}_proj": shape for x, shape in biased.items()}
    biased |= {f"mlp.{x}_proj": s for x, s in mlp.items() if fields.get("mlp_bias")}
    for name, shape in biased.items():
        tensors[f"midlayer.{name}.bias"] = 0.3 * torch.randn(shape[0], generator=draw)
    if own:
        tensors["embed_tokens.weight"] = torch.randn((V, D), generator=draw)
    if ids < V:
        known = torch.randperm(V, generator=draw)[:ids].sort().values
        tensors["d2t"] = known - torch.arange(ids)
        tensors["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill(0, known, True)
    return fields, tensors


def written(folder, fields: dict, tensors: dict) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def with_head(checkpoint: model.Checkpoint, seed: int = 0) -> model.Checkpoint:
    """The same checkpoint with a random MTP head, under the names that its family publishes: a
    layer like the last one that attends, and what is around it."""
    config, tensors = checkpoint.config, dict(checkpoint.tensors)
    E, count = config.width, len(config.specs)
    attends = max(i for i, spec in enumerate(config.specs) if spec.kind != "linear")
    layer, head = f"model.layers.{attends}.", {}
    if config.gate:
        prefix, inner = "mtp.", "mtp.layers.0."
        vectors, fc = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"), "fc"
    else:
        prefix = inner = f"model.layers.{count}."
        vectors, fc = ("enorm", "hnorm", "shared_head.norm"), "eh_proj"
        head = {f"{prefix}embed_tokens.weight": tensors["model.embed_tokens.weight"]}
        head[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"]
    shapes = {inner + n.removeprefix(layer): x.shape for n, x in tensors.items() if layer in n}
    shapes |= {f"{prefix}{name}.weight": (E,) for name in vectors}
    shapes[f"{prefix}{fc}.weight"] = (E, 2 * E)
    draw = torch.Generator().manual_seed(seed)
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=draw)
        matrix = noise * 1.5 * shape[-1] ** -0.5
        head[name] = matrix if len(shape) > 1 else 0.3 * noise + model.mean(name, config)
    return replace(checkpoint, tensors=tensors | head)
