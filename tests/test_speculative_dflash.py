"""DFlash heads in speculative.py, against a reference that knows no cache: all positions at once,
an explicit mask, its own rope."""

import math
from dataclasses import dataclass, field

import pytest
import tiny
import torch

import kv_cache
import model
import speculative
from sample import DRAFT, Row, SamplingParams, distribution, draw, noise_key, sample
from speculative import DFlash, agreed, dflash_layers

DFLASH_BLOCK, DFLASH_MASK, DFLASH_WIDE, DFLASH_VOCAB = 5, 95, 32, 96

torch.set_num_threads(1)


def dflash_fields(layers: int = 2, **more) -> dict:
    """The config.json of a tiny head; its heads, rope and eps are not the target's."""
    own = {"mask_token_id": DFLASH_MASK, "target_layer_ids": [2, 0, 3]} | more.pop(
        "dflash_config", {}
    )
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": DFLASH_BLOCK,
        "dflash_config": own,
        "num_target_layers": 4,
        "num_hidden_layers": layers,
        "hidden_size": DFLASH_WIDE,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 48,
        "vocab_size": DFLASH_VOCAB,
        "max_position_embeddings": 4096,
        "rope_theta": 500.0,
        "rms_norm_eps": 1e-3,
        **more,
    }


def dflash_tensors(fields: dict, features: int = 3, seed: int = 0) -> dict:
    """11 tensors a layer and 3 more, under the names of published heads."""
    draw = torch.Generator().manual_seed(seed)
    D, F, dim = fields["hidden_size"], fields["intermediate_size"], fields["head_dim"]
    inner, shared = fields["num_attention_heads"] * dim, fields["num_key_value_heads"] * dim
    shapes = {
        "fc.weight": (D, features * DFLASH_WIDE),
        "hidden_norm.weight": (D,),
        "norm.weight": (D,),
    }
    for i in range(fields["num_hidden_layers"]):
        one = {
            "input_layernorm": (D,), "post_attention_layernorm": (D,),
            "self_attn.q_proj": (inner, D), "self_attn.k_proj": (shared, D),
            "self_attn.v_proj": (shared, D), "self_attn.o_proj": (D, inner),
            "self_attn.q_norm": (dim,), "self_attn.k_norm": (dim,),
            "mlp.gate_proj": (F, D), "mlp.up_proj": (F, D), "mlp.down_proj": (D, F),
        }  # fmt: skip
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in one.items()}
    assert len(shapes) == 11 * fields["num_hidden_layers"] + 3
    noise = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    return {n: 1 + 0.3 * x if x.dim() == 1 else 0.25 * x for n, x in noise.items()}


DFLASH_TARGET = {  # config.json of the model that it guesses for
    "model_type": "llama", "hidden_size": DFLASH_WIDE, "num_attention_heads": 4, "head_dim": 8,
    "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 256,
}  # fmt: skip


def dflash_target() -> model.Model:
    config = model.Config.from_hf(
        DFLASH_TARGET | {"num_hidden_layers": 4, "vocab_size": DFLASH_VOCAB}
    )
    return model.Model(config, model.random(config).tensors)


def dflash_norm(x, weight, eps):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def dflash_turned(x, positions, theta):
    """Rope of x (T, heads, D), pair by pair as complex numbers."""
    half = x.shape[-1] // 2
    rates = torch.tensor([theta ** (-i / half) for i in range(half)])
    angles = torch.tensor(positions)[:, None, None] * rates
    pairs = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones(()), angles)
    return torch.cat((pairs.real, pairs.imag), -1)


def dflash_mixed(q, k, v, sees):
    """Attention of q (T, H, D) over k, v (N, G, D), where sees (T, N)."""
    k, v = (x.repeat_interleave(q.shape[-2] // x.shape[-2], -2) for x in (k, v))
    scores = torch.einsum("...thd,...nhd->...htn", q, k) / math.sqrt(q.shape[-1])
    return torch.einsum(
        "...htn,...nhd->...thd", scores.masked_fill(~sees, -torch.inf).softmax(-1), v
    )


def dflash_mlp(x, tensors, prefix):
    gate, up, down = (tensors[f"{prefix}mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def dflash_reference(fields, tensors, target, features, anchor, base=0, causal=None, scale=1.0):
    """What the head scores of every slot, (DFLASH_BLOCK, D): features (s, n * E) of positions base ..
    base + s - 1, in the order of target_layer_ids; causal: of each layer. Batches go before."""
    eps, theta, s = fields["rms_norm_eps"], fields["rope_theta"], features.shape[-2]
    types = fields.get("layer_types") or ["full_attention"] * fields["num_hidden_layers"]
    size = fields["block_size"]
    positions = [base + i for i in range(s + size)]
    fused = dflash_norm(features @ tensors["fc.weight"].T, tensors["hidden_norm.weight"], eps)
    anchor = torch.as_tensor(anchor)[..., None]
    masks = torch.full_like(anchor, fields["dflash_config"]["mask_token_id"])
    x = target.embedding[torch.cat((anchor, *[masks] * (size - 1)), -1)] * scale
    at, of = torch.arange(s, s + size)[:, None], torch.arange(s + size)
    for i, kind in enumerate(types):
        own = {n: tensors[f"layers.{i}.self_attn.{n}_proj.weight"] for n in "qkvo"}
        norm = {n: tensors[f"layers.{i}.self_attn.{n}_norm.weight"] for n in "qk"}
        h = dflash_norm(x, tensors[f"layers.{i}.input_layernorm.weight"], eps)
        both = torch.cat((fused, h), -2)
        q, k, v = ((y @ own[n].T).unflatten(-1, (-1, fields["head_dim"]))
                   for n, y in (("q", h), ("k", both), ("v", both)))  # fmt: skip
        q, k = dflash_norm(q, norm["q"], eps), dflash_norm(k, norm["k"], eps)
        q, k = dflash_turned(q, positions[s:], theta), dflash_turned(k, positions, theta)
        sees = torch.ones(size, s + size, dtype=torch.bool)
        if causal[i] if causal else kind == "sliding_attention":
            sees &= of <= at
        if kind == "sliding_attention":
            sees &= at - of < fields["sliding_window"]
        x = x + dflash_mixed(q, k, v, sees).flatten(-2) @ own["o"].T
        h = dflash_norm(x, tensors[f"layers.{i}.post_attention_layernorm.weight"], eps)
        x = x + dflash_mlp(h, tensors, f"layers.{i}.")
    return dflash_norm(x, tensors["norm.weight"], eps)


@dataclass(eq=False)
class Guessed:
    """A request as a drafter sees it, of which the target's features are made up."""

    tokens: list
    seed: int = 0
    params: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0))

    def feature(self, layer: int, start: int, end: int) -> torch.Tensor:
        """(end - start, E): the same for each position, whenever it is asked for."""
        draw = torch.Generator().manual_seed(1000 * self.seed + layer)
        return torch.randn(300, DFLASH_WIDE, generator=draw)[start:end]


def dflash_learns(head: DFlash, request: Guessed, start: int, end: int, chunk: int = 1000):
    """Learn positions start .. end - 1 of a request, so many at a time."""
    for at in range(start, end, chunk):
        last = min(at + chunk, end)
        head.learn(request, at, [request.feature(i, at, last) for i in head.taps])


def dflash_row(request: Guessed, guesses: list, domain: int = 0) -> Row:
    place, params = len(request.tokens) + len(guesses), request.params.with_defaults({})
    return Row(params, request.seed, place, request.tokens + guesses, None, 0, domain)


def dflash_watched(head: DFlash) -> list:
    """Logits that a head draws guesses from, as they come."""
    seen, guess = [], head.guess

    def spy(logits, rows):
        seen.append(logits.clone())
        return guess(logits, rows)

    head.guess = spy
    return seen


def dflash_guesses(head: DFlash, seen: list, requests: list, counts=None) -> list:
    """Propose, and give the logits (n, V) of each request's slots."""
    counts = counts or [head.most] * len(requests)
    seen.clear()
    drafts = head.propose(requests, counts, dflash_row)
    parts = seen[0].split(counts)
    for request, draft, logits in zip(requests, drafts, parts):
        if not request.params.temperature:
            assert draft.ids == logits.argmax(-1).tolist() and draft.beliefs is None
    return list(parts)


def dflash_expected(fields, tensors, head, request, base=0, **more) -> torch.Tensor:
    """What the reference says of slots 1 .. DFLASH_BLOCK - 1 after all tokens of a request."""
    ids = fields["dflash_config"]["target_layer_ids"]
    last = len(request.tokens) - 1
    features = torch.cat([request.feature(i, base, last) for i in ids], -1)
    x = dflash_reference(fields, tensors, head.target, features, request.tokens[-1], base, **more)
    return head.target.logits(x)[1:]


def dflash_close(found, wanted, most=1e-4):
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() < most


def dflash_opened(fields: dict, tensors: dict, tmp_path, target=None, slots=4) -> DFlash:
    head = DFlash(tiny.written(tmp_path / "head", fields, tensors), target or dflash_target())
    head.open(slots, 128)
    tiny.garbage(head.cache)
    return head


DFLASH_MODES = {  # what config.json says -> whether each of two layers is causal in the block
    "full": ({}, [False, False]),
    "causal": ({"is_causal": True}, [True, True]),
    "causal, nested": ({"dflash_config": {"causal": True}}, [True, True]),
"said twice": ({"dflash_config": {"causal": True}, "is_causal": True}, [True, True]),
    "not causal": ({"is_causal": False}, [False, False]),
    "mixed": ({"layer_types": ["sliding_attention", "full_attention"]}, [True, False]),
    "sliding": ({"layer_types": ["sliding_attention"] * 2}, [True, True]),
    "sliding, causal": (
        {"layer_types": ["full_attention", "sliding_attention"], "is_causal": True}, [True, True]
    ),
}  # fmt: skip


@pytest.mark.parametrize("mode", DFLASH_MODES)
def test_dflash_every_slot_says_what_the_reference_says_in_each_mode(mode, tmp_path):
    more, causal = DFLASH_MODES[mode]
    sliding = {"sliding_window": 7, "use_sliding_window": True} if "layer_types" in more else {}
    fields = dflash_fields(**more, **sliding)
    tensors = dflash_tensors(fields)
    head = dflash_opened(fields, tensors, tmp_path)
    assert (head.name, head.most, head.taps) == ("dflash", DFLASH_BLOCK - 1, (0, 2, 3))
    assert head.parallel and not head.free and not head.hidden
    request = Guessed(list(range(20)))
    dflash_learns(head, request, 0, 19)
    [found] = dflash_guesses(head, dflash_watched(head), [request])
    dflash_close(found, dflash_expected(fields, tensors, head, request, causal=causal))
    others = [own for _, own in DFLASH_MODES.values() if own != causal]
    if not sliding:  # a head of the other mode is another one
        for other in others:
            wrong = dflash_expected(fields, tensors, head, request, causal=other)
            assert (found - wrong).abs().max() > 1e-2


def test_dflash_window_bites():
    """Sliding layers of a window do not say what full ones say, and 7 not what 8 says."""
    base = dflash_fields(layer_types=["sliding_attention"] * 2, sliding_window=7)
    tensors, target = dflash_tensors(base), dflash_target()
    features = torch.randn(19, 3 * DFLASH_WIDE)
    x = [
        dflash_reference(base | {"sliding_window": window}, tensors, target, features, 3)
        for window in (7, 8, 1000)
    ]
    assert (x[0] - x[1]).abs().max() > 1e-2 < (x[0] - x[2]).abs().max()


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_dflash_rounds_of_any_luck_leave_the_context_right(chunk, tmp_path):
    """0 to all guesses accepted, in turn: the block of a round is gone in the next one."""
    sliding = {"sliding_window": 7, "use_sliding_window": True}
    fields = dflash_fields(layer_types=["sliding_attention", "full_attention"], **sliding)
    tensors = dflash_tensors(fields)
    head = dflash_opened(fields, tensors, tmp_path)
    seen, request = dflash_watched(head), Guessed([5, 6, 7, 8])
    dflash_learns(head, request, 0, 3, chunk)
    for accepted in (0, 2, DFLASH_BLOCK - 1, 0, 1, 3, DFLASH_BLOCK - 1):
        [found] = dflash_guesses(head, seen, [request])
        dflash_close(found, dflash_expected(fields, tensors, head, request))
        at = len(request.tokens) - 1
        request.tokens += [(3 * at + j) % DFLASH_VOCAB for j in range(accepted + 1)]
        dflash_learns(head, request, at, at + accepted + 1, chunk)
        head.keep([request])


def test_dflash_asked_twice_says_the_same(tmp_path):
    """A round without a step in between, as when no guess was worth its row."""
    fields = dflash_fields()
    head = dflash_opened(fields, dflash_tensors(fields), tmp_path)
    seen, request = dflash_watched(head), Guessed(list(range(9)))
    dflash_learns(head, request, 0, 8)
    [first], [second] = dflash_guesses(head, seen, [request]), dflash_guesses(head, seen, [request])
    assert torch.equal(first, second)


def test_dflash_what_lies_behind_computed_is_nobodys(tmp_path):
    """Whatever is left there, NaN among it, changes nothing."""
    fields = dflash_fields()
    head = dflash_opened(fields, dflash_tensors(fields), tmp_path)
    seen, request = dflash_watched(head), Guessed(list(range(9)))
    dflash_learns(head, request, 0, 8)
    [first] = dflash_guesses(head, seen, [request])
    held = head.held[request]
    assert held.computed == 8 and held.pending == 0
    for layer in head.cache.buffers:
        for buffer in layer:
            buffer[held.slot, held.computed :] = torch.nan
    [second] = dflash_guesses(head, seen, [request])
    assert torch.equal(first, second)


def test_dflash_in_a_batch_says_what_it_says_alone(tmp_path):
    """Contexts of several lengths, counts of several sizes, and slots that change hands."""
    fields = dflash_fields()
    tensors = dflash_tensors(fields)
    head = dflash_opened(fields, tensors, tmp_path, slots=3)
    seen = dflash_watched(head)
    requests = [Guessed([i] * n, seed=i) for i, n in enumerate((2, 17, 9))]
    for request in requests:
        dflash_learns(head, request, 0, len(request.tokens) - 1)
    assert [head.most_for(r) for r in requests] == [4, 4, 4]
    parts = dflash_guesses(head, seen, requests, [4, 1, 3])
    for request, found, n in zip(requests, parts, (4, 1, 3)):
        dflash_close(found, dflash_expected(fields, tensors, head, request)[:n])
    late = Guessed([1] * 6, seed=8)
    dflash_learns(head, late, 0, 5)
    assert head.most_for(late) == 0  # there is no slot
    head.keep([requests[2], late])
    assert head.slots.held == 1 and list(head.held) == [requests[2]]
    dflash_learns(head, late, 0, 5)
    parts = dflash_guesses(head, seen, [late, requests[2]])
    for request, found in zip((late, requests[2]), parts):
        dflash_close(found, dflash_expected(fields, tensors, head, request))


def test_dflash_fewer_guesses_are_the_first_of_the_whole_block(tmp_path):
    fields = dflash_fields()
    head = dflash_opened(fields, dflash_tensors(fields), tmp_path)
    seen, request = dflash_watched(head), Guessed(list(range(9)))
    dflash_learns(head, request, 0, 8)
    [whole] = dflash_guesses(head, seen, [request])
    for n in (1, 2, 3):
        [some] = dflash_guesses(head, seen, [request], [n])
        dflash_close(some, whole[:n], 1e-6)


def test_dflash_a_context_that_begins_at_a_prefix_hit_keeps_true_positions(tmp_path):
    """What was cached has no features: the context begins later. That rope only sees how far
    apart positions are would hide it if they began at 0, so they are looked at."""
    fields = dflash_fields()
    tensors = dflash_tensors(fields)
    head = dflash_opened(fields, tensors, tmp_path)
    request, positions, prepare = Guessed(list(range(30))), [], head.prepare

    def noted(work):
        step = prepare(work)
        positions.append(step.positions.tolist())
        return step

    head.prepare = noted
    dflash_learns(head, request, 16, 29)
    [found] = dflash_guesses(head, dflash_watched(head), [request])
    assert positions == [list(range(16, 29)), list(range(29, 29 + DFLASH_BLOCK))]
    dflash_close(found, dflash_expected(fields, tensors, head, request, base=16))


def test_dflash_waits_where_features_are_missing(tmp_path):
    """Forced tokens are known before the target has seen them; skipped ones begin a new context."""
    fields = dflash_fields()
    tensors = dflash_tensors(fields)
    head = dflash_opened(fields, tensors, tmp_path)
    seen, request = dflash_watched(head), Guessed(list(range(10)))
    assert head.most_for(request) == 0
    dflash_learns(head, request, 0, 7)
    assert head.most_for(request) == 0  # positions 7 and 8 are to come
    dflash_learns(head, request, 7, 9)
    assert head.most_for(request) == head.most
    request.tokens += [1, 2, 3, 4]
    dflash_learns(head, request, 11, 13)  # 9 and 10 never come
    assert head.most_for(request) == head.most
    [found] = dflash_guesses(head, seen, [request])
    dflash_close(found, dflash_expected(fields, tensors, head, request, base=11))


def test_dflash_long_prompts_do_not_wait_as_features(tmp_path):
    fields = dflash_fields()
    tensors = dflash_tensors(fields)
    head = dflash_opened(fields, tensors, tmp_path)
    head.CHUNK = 8
    request = Guessed(list(range(30)))
    for at in range(0, 29, 5):
        dflash_learns(head, request, at, min(at + 5, 29))
        head.keep([request])
        held = head.held[request]
        assert held.pending == sum(len(part[0]) for part in held.features) < 8
    [found] = dflash_guesses(head, dflash_watched(head), [request])
    dflash_close(found, dflash_expected(fields, tensors, head, request))


def dflash_streams(target: model.Model, tokens: list[int]) -> list[torch.Tensor]:
    """The residual stream after each layer of a llama, in plain PyTorch."""
    config, x, n = target.config, target.embedding[tokens], len(tokens)
    tensors, after = model.random(config).tensors, []
    for i in range(len(target.layers)):
        prefix = f"model.layers.{i}."
        h = dflash_norm(x, tensors[prefix + "input_layernorm.weight"], config.eps)
        q, k, v = ((h @ tensors[f"{prefix}self_attn.{m}_proj.weight"].T).unflatten(1, (-1, 8))
                   for m in "qkv")  # fmt: skip
        q, k = (dflash_turned(y, list(range(n)), 1e4) for y in (q, k))
        sees = torch.ones(n, n, dtype=torch.bool).tril()
        x = (
            x
            + dflash_mixed(q, k, v, sees).flatten(-2)
            @ tensors[prefix + "self_attn.o_proj.weight"].T
        )
        h = dflash_norm(x, tensors[prefix + "post_attention_layernorm.weight"], config.eps)
        x = x + dflash_mlp(h, tensors, prefix)
        after.append(x)
    return after


def test_dflash_reads_the_stream_after_the_layers_it_names_and_in_their_order(tmp_path):
    """vLLM once took the layer before: acceptance fell, and no test of tokens saw it."""
    fields = dflash_fields()
    tensors, target = dflash_tensors(fields), dflash_target()
    head = dflash_opened(fields, tensors, tmp_path, target)
    request = Guessed([3, 1, 4, 1, 5, 9, 2, 6])
    cache = kv_cache.ContiguousCache(target.config.specs, 1, 32)
    step = cache.prepare([(tiny.request(request.tokens[:-1]), 7)])
    _, tapped = target(step.tokens, step.positions, step, head.taps)
    head.learn(request, 0, tapped)
    [found] = dflash_guesses(head, dflash_watched(head), [request])
    after = dflash_streams(target, request.tokens[:-1])

    def said(ids):
        x = dflash_reference(fields, tensors, target, torch.cat([after[i] for i in ids], -1), 6)
        return target.logits(x)[1:]

    dflash_close(found, said([2, 0, 3]))
    for wrong in ([1, 0, 2], [3, 1, 3], [0, 2, 3], [3, 0, 2]):
        assert (found - said(wrong)).abs().max() > 1e-2


def test_dflash_in_16_bits(tmp_path):
    fields = dflash_fields(input_embedding_scale=1.5)
    tensors = dflash_tensors(fields)
    config = dflash_target().config
    target = model.Model(config, model.random(config).tensors, dtype=torch.bfloat16)
    head = dflash_opened(fields, tensors, tmp_path, target)
    assert all(b.dtype == torch.bfloat16 for layer in head.cache.buffers for b in layer)
    request, whole = Guessed(list(range(20))), dflash_target()
    head.learn(request, 0, [request.feature(i, 0, 19).bfloat16() for i in head.taps])
    [found] = dflash_guesses(head, dflash_watched(head), [request])
    features = torch.cat([request.feature(i, 0, 19) for i in (2, 0, 3)], -1)
    x = dflash_reference(fields, tensors, whole, features, 19, scale=1.5)
    wanted = whole.logits(x)[1:]
    assert found.dtype == torch.bfloat16
    assert (found.float() - wanted).square().mean() < 1e-3 * wanted.square().mean()


# ---- a head that is right

DFLASH_CYCLE = 24  # after token i comes i + 1, after the last 0; the id behind them is DFLASH_MASK


def dflash_cyclic() -> model.Checkpoint:
    """A target that is nearly certain of its next token, whatever came before."""
    fields = dict(DFLASH_TARGET, num_hidden_layers=4, vocab_size=DFLASH_CYCLE + 1)
    checkpoint = model.random(model.Config.from_hf(fields))
    draw, tensors = torch.Generator().manual_seed(1), checkpoint.tensors
    for name in tensors:
        if "o_proj" in name or "down_proj" in name:
            tensors[name] *= 0.1
    tokens = torch.randn(DFLASH_CYCLE + 1, DFLASH_WIDE, generator=draw)
    tokens = tokens / tokens.norm(dim=-1, keepdim=True) * DFLASH_WIDE**0.5
    tensors["model.embed_tokens.weight"] = tokens
    tensors["lm_head.weight"] = torch.cat((tokens[:DFLASH_CYCLE].roll(1, 0), tokens[DFLASH_CYCLE:]))
    return checkpoint


def dflash_cycle(start: int, n: int) -> list[int]:
    return [(start + i) % DFLASH_CYCLE for i in range(n)]


def dflash_taps(target: model.Model, tokens: list[int], taps) -> list[torch.Tensor]:
    cache = kv_cache.ContiguousCache(target.config.specs, 1, len(tokens))
    step = cache.prepare([(tiny.request(tokens), len(tokens))])
    return target(step.tokens, step.positions, step, taps)[1]


def dflash_fitted(checkpoint: model.Checkpoint) -> tuple[dict, dict]:
    """config.json and tensors of a head that learnt the cycle, by the reference's gradients."""
    sliding = {"layer_types": ["sliding_attention"], "use_sliding_window": True}
    own = {"mask_token_id": DFLASH_CYCLE}
    fields = dflash_fields(
        1, vocab_size=DFLASH_CYCLE + 1, dflash_config=own, sliding_window=8, **sliding
    )
    tensors = {n: x.requires_grad_() for n, x in dflash_tensors(fields).items()}
    target, head = model.Model(checkpoint.config, checkpoint.tensors), checkpoint.tensors
    taps = [dflash_taps(target, dflash_cycle(i, 8), (0, 2, 3)) for i in range(DFLASH_CYCLE)]
    features = torch.stack([torch.cat([one[i] for i in (1, 0, 2)], -1) for one in taps])
    anchors = (torch.arange(DFLASH_CYCLE) + 8) % DFLASH_CYCLE
    wanted = (anchors[:, None] + torch.arange(1, DFLASH_BLOCK)) % DFLASH_CYCLE
    for i in range(40):
        x = dflash_reference(fields, tensors, target, features, anchors)[:, 1:]
        logits = x.flatten(0, 1) @ head["lm_head.weight"].T
        loss = torch.nn.functional.cross_entropy(logits, wanted.flatten())
        slopes = torch.autograd.grad(loss, list(tensors.values()))
        with torch.no_grad():
            for one, slope in zip(tensors.values(), slopes):
                one -= (40 - i) / 40 * 0.02 * slope.sign()
    return fields, {name: x.detach() for name, x in tensors.items()}


def dflash_accepted(head: DFlash, starts=(0, 5, 17), rounds: int = 4) -> float:
    """Share of guesses that are what the target says, in some rounds of several requests."""
    requests, right, made = [Guessed(dflash_cycle(i, 9 + i)) for i in starts], 0, 0
    for _ in range(rounds):
        for request in requests:
            seen = head.held[request].seen if request in head.held else 0
            taps = dflash_taps(head.target, request.tokens[:-1], head.taps)
            head.learn(request, seen, [x[seen:] for x in taps])
        drafts = head.propose(requests, [head.most] * len(requests), dflash_row)
        for request, draft in zip(requests, drafts):
            came = dflash_cycle(request.tokens[-1] + 1, DFLASH_BLOCK)
            n = agreed(draft.ids, came)
            right, made = right + n, made + len(draft.ids)
            request.tokens += came[: n + 1]
    return right / made


def test_dflash_a_head_that_learnt_its_target_is_right_and_shifted_by_one_slot_it_is_not(tmp_path):
    """The control: 97 % or more of the guesses are right, less than 2 % if each is what the slot
    before it says, as if slots told of the next token."""
    checkpoint = dflash_cyclic()
    target = model.Model(checkpoint.config, checkpoint.tensors)
    fields, tensors = dflash_fitted(checkpoint)
    head = dflash_opened(fields, tensors, tmp_path, target)
    assert dflash_accepted(head) >= 0.97
    head = dflash_opened(fields, tensors, tmp_path, target)
    guess = head.guess

    def shifted(logits, rows):
        return guess(logits.unflatten(0, (-1, head.most)).roll(1, 1).flatten(0, 1), rows)

    head.guess = shifted
    assert dflash_accepted(head) <= 0.02


# ---- how guesses are drawn


def test_dflash_guesses_are_drawn_as_if_one_after_another(tmp_path):
    """With penalties each guess depends on those before it; beliefs are what each was drawn from."""
    fields = dflash_fields()
    head = dflash_opened(fields, dflash_tensors(fields), tmp_path)
    some = {"temperature": 1.5, "presence_penalty": 4.0, "repetition_penalty": 3.0}
    params = [{"temperature": 0.8}, some, {"temperature": 0, "frequency_penalty": 9.0}]
    requests = [Guessed([i] * (i + 4), 7 + i, SamplingParams(**p)) for i, p in enumerate(params)]
    counts, seen = [4, 4, 3], dflash_watched(head)
    for request in requests:
        dflash_learns(head, request, 0, len(request.tokens) - 1)
    plain = head.propose(requests, counts, dflash_row)
    parts = seen[0].split(counts)
    for request, draft, logits in zip(requests, plain, parts):
        ids = []
        for x in logits:
            ids += sample(x[None], [dflash_row(request, ids)])[0]
        assert draft.ids == ids and draft.beliefs is None
    drafts = head.propose(requests, counts, lambda r, ids: dflash_row(r, ids, DRAFT))
    for request, draft, logits in zip(requests, drafts, parts):
        for j, x in enumerate(logits):
            row = dflash_row(request, draft.ids[:j], DRAFT)
            law, _ = distribution(x[None], [row])
            assert torch.allclose(draft.beliefs[j], law[0])
            assert draw(law, [noise_key(row.seed, DRAFT, row.position)]).tolist() == [draft.ids[j]]
    assert len(set(parts[2].argmax(-1).tolist())) == 1 < len(set(plain[2].ids)) == 3


def test_dflash_a_draft_ends_before_logits_that_are_not_finite(tmp_path):
    fields = dflash_fields()
    head = dflash_opened(fields, dflash_tensors(fields), tmp_path)
    requests = [Guessed([1, 2, 3]), Guessed([4, 5, 6], seed=1)]
    for request in requests:
        dflash_learns(head, request, 0, 2)
    score = head._score

    def broken(x):
        logits = score(x)
        logits[2] = torch.nan
        return logits

    whole = head.propose(requests, [4, 4], dflash_row)
    head._score = broken
    first, second = head.propose(requests, [4, 4], dflash_row)
    assert (first.ids, second.ids) == (whole[0].ids[:2], whole[1].ids)
    first, second = head.propose(requests, [4, 4], lambda r, ids: dflash_row(r, ids, DRAFT))
    assert len(first.ids) == len(first.beliefs) == 2 and len(second.ids) == len(second.beliefs) == 4


# ---- what a folder may hold


@pytest.mark.parametrize("one", [True, False])
def test_dflash_other_names_of_the_same_tensors(one, tmp_path):
    fields = dflash_fields(layers=1 if one else 2)
    tensors = dflash_tensors(fields)
    names = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}
    names |= {"layers.0.": "midlayer."} if one else {}
    other = {
        next((new + n[len(old) :] for old, new in names.items() if n.startswith(old)), n): x
        for n, x in tensors.items()
    }
    assert other.keys() != tensors.keys()
    head, same = (
        dflash_opened(fields, t, tmp_path / str(i)) for i, t in enumerate((tensors, other))
    )
    request = Guessed(list(range(9)))
    found = []
    for each in (head, same):
        dflash_learns(each, request, 0, 8)
        found += dflash_guesses(each, dflash_watched(each), [request])
    assert torch.equal(*found)


def test_dflash_own_embedding_and_reduced_vocabulary(tmp_path):
    """A head of another width, that knows 40 ids: d2t is what to add to each of its rows."""
    fields = dflash_fields(hidden_size=24, draft_vocab_size=40, input_embedding_scale=2.0)
    tensors = dflash_tensors(fields)
    draw = torch.Generator().manual_seed(5)
    ids = torch.randperm(DFLASH_VOCAB, generator=draw)[:40].sort().values
    extra = {
        "embed_tokens.weight": torch.randn(DFLASH_VOCAB, 24, generator=draw),
        "lm_head.weight": torch.randn(40, 24, generator=draw),
        "d2t": ids - torch.arange(40),
        "t2d": torch.zeros(DFLASH_VOCAB, dtype=torch.bool).index_fill(0, ids, True),
    }
    head = dflash_opened(fields, tensors | extra, tmp_path)
    request = Guessed(list(range(9)))
    dflash_learns(head, request, 0, 8)
    [found] = dflash_guesses(head, dflash_watched(head), [request])

    class Own:
        embedding = extra["embed_tokens.weight"]

    features = torch.cat([request.feature(i, 0, 8) for i in (2, 0, 3)], -1)
    x = dflash_reference(fields, tensors, Own, features, 8, scale=2.0)
    dflash_close(found[:, ids], (x @ extra["lm_head.weight"].T)[1:])
    missing = [i for i in range(DFLASH_VOCAB) if i not in ids.tolist()]
    assert (found[:, missing] == -torch.inf).all()
    [draft] = head.propose([request], [4], lambda r, guesses: dflash_row(r, guesses, DRAFT))
    assert set(draft.ids) <= set(ids.tolist()) and not draft.beliefs[:, missing].any()


def test_dflash_which_layers_are_read_if_it_does_not_say():
    """By hand: from layer 1 to the third from the end, evenly."""
    assert dflash_layers({}, 36, 5) == [1, 9, 17, 25, 33]
    assert dflash_layers({}, 36, 1) == [18]
    assert dflash_layers({"target_layer_ids": [7, 3]}, 36, 5) == [7, 3]


DFLASH_REFUSED = {  # name: (fields, words of the sentence)
    "another architecture": ({"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel"),
    "another family": ({"model_type": "llama"}, "model_type 'llama' of a DFlash head"),
    "biases": ({"attention_bias": True}, "attention_bias True"),
    "a cap": ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0"),
    "a multiplier": ({"dflash_config": {"output_multiplier": 2.0}}, "output_multiplier 2.0"),
    "sinks": ({"dflash_config": {"attention_sink_bias": True}}, "attention_sink_bias True"),
    "pairs": ({"is_neox_style": False}, "is_neox_style False"),
    "a selector": ({"dflash_config": {"selector_top_k": 16}}, "dflash_config: selector_top_k"),
    "an own window": ({"dflash_config": {"use_swa": True}}, "use_swa True"),
    "a window both ways": (
        {"is_causal": False, "layer_types": ["sliding_attention"] * 2, "sliding_window": 9,
         "use_sliding_window": True}, "sliding_window 9: one in both directions",
    ),
    "no window": (
        {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": False},
        "use_sliding_window is not true",
    ),
    "unknown layers": ({"layer_types": ["linear_attention"] * 2}, "linear_attention"),
    "no mask": ({"dflash_config": {"mask_token_id": None}}, "mask_token_id None is no id"),
    "mask behind the end": ({"dflash_config": {"mask_token_id": 96}}, "mask_token_id 96"),
    "mask below 0": ({"dflash_config": {"mask_token_id": -1}}, "mask_token_id -1"),
    "layer behind the end": ({"dflash_config": {"target_layer_ids": [0, 1, 4]}}, "are 0 to 3"),
    "layer below 0": ({"dflash_config": {"target_layer_ids": [0, 1, -1]}}, "are 0 to 3"),
    "no layers": ({"dflash_config": {"target_layer_ids": []}}, "is not a list of layers"),
    "a layer's name": ({"dflash_config": {"target_layer_ids": ["a"]}}, "is not a list of layers"),
    "too few features": ({"dflash_config": {"target_layer_ids": [0, 1]}}, "fc.weight "),
    "a block of one": ({"block_size": 1}, "block_size 1 is not from 2 to 65"),
    "a long block": ({"block_size": 66}, "block_size 66 is not from 2 to 65"),
    "no block": ({"block_size": None}, "block_size is None"),
    "another target": ({"num_target_layers": 36}, "num_target_layers 36, but the target has 4"),
    "a wide target": ({"target_hidden_size": 64}, "target_hidden_size 64, but the target has 32"),
    "another vocabulary": ({"vocab_size": 97}, "vocab_size 97, but the target has 96"),
    "a config of another shape": ({"dflash_config": [1]}, "dflash_config [1] is not an object"),
    "two modes": (
        {"dflash_config": {"causal": True}, "is_causal": False},
        "causal True and is_causal False disagree",
    ),
    "a mode that is no mode": ({"is_causal": "yes"}, "is_causal is 'yes'"),
    "one layer more": ({"num_hidden_layers": 3}, "no tensor layers.2.self_attn.q_proj.weight"),
    "one layer less": ({"num_hidden_layers": 1}, "tensors that the model does not use: layers.1."),
    "other heads": ({"head_dim": 8}, "layers.0.self_attn.q_proj.weight is [64, 32]"),
    "another width": ({"hidden_size": 24}, "fc.weight "),
}  # fmt: skip


@pytest.fixture(scope="module")
def dflash_door():
    fields = dflash_fields()
    return fields, dflash_tensors(fields), dflash_target()


@pytest.mark.parametrize("what", DFLASH_REFUSED)
def test_dflash_refuses(what, dflash_door, tmp_path):
    (fields, tensors, target), (change, words) = dflash_door, DFLASH_REFUSED[what]
    own = change.get("dflash_config")
    if isinstance(own, dict):
        change = change | {"dflash_config": fields["dflash_config"] | own}
    folder = tiny.written(tmp_path, fields | change, tensors)
    with pytest.raises(ValueError) as error:
        DFlash(str(folder), target)
    message = str(error.value)
    assert words in message and str(tmp_path) in message and "\n" not in message


def test_dflash_refuses_what_is_wrong_with_its_tensors(dflash_door, tmp_path):
    fields, tensors, target = dflash_door
    for name in tensors:  # none may be missing
        rest = {n: x for n, x in tensors.items() if n != name}
        with pytest.raises(ValueError, match=f"no tensor {name}, of shape"):
            DFlash(tiny.written(tmp_path / "one", fields, rest), target)
    narrow = {n: torch.cat((x, x)) if n.startswith("layers.1.mlp.up") else x
              for n, x in tensors.items()}  # fmt: skip
    wrong = {
        "is [96, 32], config.json makes it [48, 32]": narrow,
        "does not use: layers.0.self_attn.g_proj.weight": tensors
        | {"layers.0.self_attn.g_proj.weight": torch.zeros(4, 32)},
        "does not use: layers.0.self_attn.qkv_proj.weight": tensors
        | {"layers.0.self_attn.qkv_proj.weight": torch.zeros(4, 32)},
        "does not use: layers.0.attention_conv.base_kernel": tensors
        | {"layers.0.attention_conv.base_kernel": torch.zeros(2, 2, 32)},
        "lm_head.weight is [5, 32]": tensors | {"lm_head.weight": torch.zeros(5, 32)},
    }
    for words, them in wrong.items():
        with pytest.raises(ValueError) as error:
            DFlash(tiny.written(tmp_path / "two", fields, them), target)
        assert words in str(error.value)
    reduced = tensors | {"lm_head.weight": torch.zeros(3, 32), "d2t": torch.tensor([0, 0, 94])}
    folder = tiny.written(tmp_path / "three", fields | {"draft_vocab_size": 3}, reduced)
    with pytest.raises(ValueError, match="d2t does not lead to 3 different ids below 96"):
        DFlash(folder, target)
    small = fields | {"hidden_size": 24}
    folder = tiny.written(tmp_path / "four", small, dflash_tensors(small))
    with pytest.raises(ValueError, match="hidden_size 24, the target's is 32: no embed_tokens"):
        DFlash(folder, target)


def test_dflash_refuses_broken_files(dflash_door, tmp_path):
    fields, tensors, target = dflash_door
    folder = tmp_path / "head"
    tiny.written(folder, fields, tensors)
    assert speculative.drafter(f"dflash:{folder}", target, None).most == DFLASH_BLOCK - 1
    (folder / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(ValueError, match="mask_embedding.pt is a pickle"):
        DFlash(str(folder), target)
    (folder / "mask_embedding.pt").unlink()
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="truncated or not safetensors"):
        DFlash(str(folder), target)
    file.unlink()
    with pytest.raises(ValueError, match="no .*safetensors file"):
        DFlash(str(folder), target)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not readable as JSON"):
        DFlash(str(folder), target)
    with pytest.raises(ValueError, match="no such file or folder"):
        DFlash(str(tmp_path / "nowhere"), target)
    with pytest.raises(ValueError, match="dflash:PATH"):
        speculative.drafter("dflash", target, None)
