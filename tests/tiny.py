"""Builders that several test files share: a tiny model, requests as a cache sees them, garbage.

Nothing here downloads, and nothing is drawn without a seed.
"""

from dataclasses import replace
from types import SimpleNamespace

import torch

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
