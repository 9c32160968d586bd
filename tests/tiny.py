"""Builders that several test files share: a tiny model, requests as a cache sees them, garbage.

Nothing here downloads, and nothing is drawn without a seed.
"""

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
