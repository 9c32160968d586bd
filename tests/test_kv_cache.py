"""kv_cache.py: attention against loops in float64, rows laid out by hand, sizes of known models."""

import json
import math
import random
from pathlib import Path

import pytest
import torch

import kv_cache
import tiny
from kernels import attend
from kv_cache import ContiguousCache, LayerSpec, Slots, bytes_per_token, layers

torch.set_num_threads(1)
MODELS = {
    entry["name"]: entry["config"]
    for entry in json.loads((Path(kv_cache.__file__).parent / "models.json").read_text("utf-8"))
}
CONFIG = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2}


# ---------------------------------------------------------------- helpers


def cache_of(slots=3, max_len=12, count=1, heads=2, dim=4):
    return tiny.garbage(ContiguousCache([LayerSpec("full", heads, dim)] * count, slots, max_len))


def dense(q, keys, values, start, causal=True):
    """Attention written out, in float64: q (n, H, D) at positions start.. of keys (L, G, D)."""
    n, heads, dim = q.shape
    shared = keys.shape[1]
    out = torch.zeros(n, heads, dim, dtype=torch.float64)
    for i in range(n):
        seen = start + i + 1 if causal else len(keys)
        for h in range(heads):
            g = h // (heads // shared)
            scores = [float(q[i, h].double() @ keys[t, g].double()) for t in range(seen)]
            weights = [math.exp((s - max(scores)) / math.sqrt(dim)) for s in scores]
            for t in range(seen):
                out[i, h] += weights[t] / sum(weights) * values[t, g].double()
    return out


def close(found, expected, atol=1e-5):
    return torch.allclose(found.double(), expected.double(), atol=atol, rtol=0)


class Sequences:
    """Random q, k, v of some requests, and a step of them through a cache, row by row the same."""

    def __init__(self, count, length, heads, shared, dim=4, seed=0):
        draw = torch.Generator().manual_seed(seed)
        self.q = torch.randn(count, length, heads, dim, generator=draw)
        self.k = torch.randn(count, length, shared, dim, generator=draw)
        self.v = torch.randn(count, length, shared, dim, generator=draw)

    def step(self, cache, chunks, layer=0, causal=True):
        """chunks: (sequence, slot, start, n). Runs them in one step: o (T, H, D)."""
        length = self.q.shape[1]
        plan = [(tiny.request(range(length), slot, start), n) for _, slot, start, n in chunks]
        step = cache.prepare(plan)
        q, k, v = (
            torch.cat([x[s, start : start + n] for s, _, start, n in chunks])
            for x in (self.q, self.k, self.v)
        )
        return step.attend(layer, q, k, v, causal)

    def expected(self, chunks, causal=True):
        return torch.cat([
            dense(self.q[s, a : a + n], self.k[s, : a + n], self.v[s, : a + n], a, causal)
            for s, _, a, n in chunks
        ])  # fmt: skip


# ---------------------------------------------------------------- by hand


@pytest.mark.parametrize("name, size", [
    ("SmolLM2-135M-Instruct", 23_040),  # 30 layers x 2 x 3 x 64 x 2 bytes
    ("Llama-3.1-8B", 131_072),  # 32 x 2 x 8 x 128 x 2
    ("Qwen3-8B", 147_456),  # 36 x 2 x 8 x 128 x 2
    ("Qwen2.5-7B", 57_344),  # 28 x 2 x 4 x 128 x 2
    ("Qwen3-30B-A3B", 98_304),  # 48 x 2 x 4 x 128 x 2
    ("Qwen3-32B", 262_144),  # 64 x 2 x 8 x 128 x 2
    ("SmolLM3-3B", 73_728),  # 36 x 2 x 4 x 128 x 2
])  # fmt: skip
def test_a_token_of_a_known_model_takes_the_published_bytes(name, size):
    specs = layers(MODELS[name])
    assert len(specs) == MODELS[name]["num_hidden_layers"]
    assert bytes_per_token(specs, 2) == size
    assert bytes_per_token(specs, 4) == 2 * size
    one = ContiguousCache(specs[:2], slots=3, max_len=10, dtype=torch.bfloat16)
    assert one.nbytes == 30 * size * 2 // len(specs)


def test_heads_and_head_size_default_as_the_config_says():
    assert layers(CONFIG) == [LayerSpec("full", 2, 4)] * 2
    shared = {"num_key_value_heads": 1, "head_dim": 16}
    assert layers(CONFIG | shared) == [LayerSpec("full", 1, 16)] * 2
    assert layers(CONFIG | {"num_key_value_heads": None, "head_dim": None}) == layers(CONFIG)
    assert layers(CONFIG | {"head_dim": 3, "hidden_size": 7})[0].dim == 3  # need not divide then
    assert layers(CONFIG | {"model_type": "qwen3"})[0].dim == 128  # as transformers


def test_sliding_windows_are_read_in_the_three_ways_configs_say_them():
    def windows(**fields):
        return [s.window for s in layers(CONFIG | {"num_hidden_layers": 4} | fields)]

    assert windows(sliding_window=64) == [0] * 4  # llama has no such thing
    assert windows(model_type="mistral", sliding_window=64) == [64] * 4
    assert windows(model_type="mistral", sliding_window=None) == [0] * 4
    assert windows(model_type="mistral") == [4096] * 4  # as transformers
    for use in (False, True):  # fields that Mistral does not know
        unknown = {"use_sliding_window": use, "sliding_window_pattern": 2}
        assert windows(model_type="mistral", sliding_window=64, **unknown) == [64] * 4
    qwen = {"model_type": "qwen2", "sliding_window": 64, "max_window_layers": 3}
    assert windows(**qwen, use_sliding_window=True) == [0, 0, 0, 64]
    assert windows(**qwen, use_sliding_window=False) == [0] * 4
    assert windows(**qwen) == [0] * 4
    kinds = ["sliding_attention", "full_attention"] * 2
    assert windows(**qwen, use_sliding_window=True, layer_types=kinds) == [64, 0, 64, 0]
    spec = layers(CONFIG | {"model_type": "mistral", "sliding_window": 64})
    assert spec[0].kind == "sliding" and bytes_per_token(spec, 2) == 0  # does not grow


def test_rows_and_positions_of_two_requests_lie_one_below_another():
    """The docstring's picture: 2 rows of slot 1 at 2, one row of slot 0 at 5."""
    first, second = tiny.request("abcdef", 0, computed=5), tiny.request("klmnop", 1, computed=2)
    first.tokens, second.tokens = list(range(6)), list(range(10, 16))
    step = cache_of().prepare([(first, 1), (second, 2)])
    assert step.tokens.tolist() == [5, 12, 13]
    assert step.positions.tolist() == [5, 2, 3]
    assert [(s.slot, s.row, s.n, s.start) for s in step.segments] == [(0, 0, 1, 5), (1, 1, 2, 2)]
    assert step.sample_rows.tolist() == [0]  # the second is not through its prompt
    assert step.tokens.dtype == step.positions.dtype == step.sample_rows.dtype == torch.int64


def test_a_request_is_sampled_from_its_last_row_and_from_each_row_of_its_draft():
    prefill = tiny.request([1, 2, 3], 0)
    verify = tiny.request([4, 5, 6], 1, computed=2, draft=[7, 8])
    decode = tiny.request([9, 9], 2, computed=1)
    step = cache_of().prepare([(prefill, 3), (verify, 3), (decode, 1)])
    assert step.tokens.tolist() == [1, 2, 3, 6, 7, 8, 9]
    assert step.positions.tolist() == [0, 1, 2, 2, 3, 4, 1]
    assert step.sample_rows.tolist() == [2, 3, 4, 5, 6]


def test_a_chunk_that_does_not_reach_the_last_token_has_no_row_to_sample_from():
    for n, rows in ((1, []), (3, []), (4, [3])):
        step = cache_of().prepare([(tiny.request([1, 2, 3, 4], 0), n)])
        assert step.tokens.tolist() == [1, 2, 3, 4][:n]
        assert step.sample_rows.tolist() == rows


def test_the_last_row_of_a_prompt_is_sampled_as_often_as_it_has_samples():
    asked = tiny.request([1, 2, 3, 4], 0, computed=1, samples=3)
    other = tiny.request([5], 1)
    assert cache_of().prepare([(asked, 3), (other, 1)]).sample_rows.tolist() == [2, 2, 2, 3]
    asked = tiny.request([1, 2, 3, 4], 0, samples=3)
    assert cache_of().prepare([(asked, 3)]).sample_rows.tolist() == []


def test_attention_to_one_key_is_its_value_and_to_two_equal_keys_their_mean():
    key, values = torch.ones(1, 1, 2), torch.tensor([[[2.0, 0.0]], [[4.0, 8.0]]])
    q = torch.ones(1, 1, 2)
    assert attend(q, key, values[:1]).tolist() == [[[2.0, 0.0]]]
    assert attend(q, key.expand(2, 1, 2), values).tolist() == [[[3.0, 4.0]]]


def test_attention_scales_scores_by_the_root_of_the_head_size():
    """q = k1 = [2, 2, 2, 2], k0 = 0: scores 0 and 16 / sqrt(4) = 8."""
    q, keys = torch.full((1, 1, 4), 2.0), torch.zeros(2, 1, 4)
    keys[1] = 2.0
    values = torch.tensor([0.0, 1.0])[:, None, None].expand(2, 1, 4)
    share = 1 / (1 + math.exp(-8))
    assert close(attend(q, keys, values), torch.full((1, 1, 4), share), 1e-7)


# ---------------------------------------------------------------- against the reference


@pytest.mark.parametrize("heads, shared", [(4, 4), (4, 2), (6, 2), (3, 1)])
@pytest.mark.parametrize("start, n", [(0, 1), (0, 7), (5, 1), (3, 4), (6, 2)])
def test_attention_equals_loops_in_float64(heads, shared, start, n):
    data = Sequences(1, start + n, heads, shared, seed=heads + start)
    for causal in (True, False):
        q, keys, values = data.q[0, start:], data.k[0], data.v[0]
        found = attend(q, keys, values, causal)
        assert found.shape == (n, heads, 4)
        assert close(found, dense(q, keys, values, start, causal))


@pytest.mark.parametrize("chunks", [(10,), (1,) * 10, (4, 6), (3, 1, 1, 5), (9, 1)], ids=str)
@pytest.mark.parametrize("heads, shared", [(4, 2), (3, 3)])
def test_a_sequence_in_chunks_equals_dense_attention_of_the_whole(chunks, heads, shared):
    data, cache = Sequences(1, 10, heads, shared), cache_of(heads=shared)
    outputs, start = [], 0
    for n in chunks:
        outputs.append(data.step(cache, [(0, 1, start, n)]))
        start += n
    assert close(torch.cat(outputs), dense(data.q[0], data.k[0], data.v[0], 0))


@pytest.mark.parametrize("causal", [True, False])
def test_segments_of_one_step_attend_to_their_own_slots_only(causal):
    data, cache = Sequences(3, 10, 4, 2), cache_of()
    first = [(0, 2, 0, 4), (1, 0, 0, 1)]
    second = [(2, 1, 0, 5), (0, 2, 4, 1), (1, 0, 1, 6)]
    for chunks in (first, second):
        assert close(data.step(cache, chunks, causal=causal), data.expected(chunks, causal))


def test_all_layers_have_their_own_keys_and_values():
    data = [Sequences(1, 6, 4, 2, seed=layer) for layer in range(3)]
    cache = cache_of(count=3)
    for start, n in ((0, 4), (4, 2)):
        for layer in range(3):
            chunks = [(0, 0, start, n)]
            assert close(data[layer].step(cache, chunks, layer), data[layer].expected(chunks))


def test_bfloat16_attention_is_that_of_the_rounded_inputs():
    data = Sequences(1, 8, 4, 2)
    q, k, v = (x[0].bfloat16() for x in (data.q, data.k, data.v))
    for start in (0, 3, 7):
        found = attend(q[start:], k, v)
        assert found.dtype == torch.bfloat16
        assert close(found, dense(q[start:], k, v, start), 0.03)


def test_a_fork_copies_the_first_positions_of_every_layer_and_no_more():
    cache = cache_of(count=2, max_len=6)
    buffers = [buffer for layer in cache.buffers for buffer in layer]
    cache.prepare([])
    for buffer in buffers:
        buffer[0] = torch.randn(buffer[0].shape)
    cache.copy(tiny.request([], 0), tiny.request([], 2), 4)
    for buffer in buffers:
        assert torch.equal(buffer[2, :4], buffer[0, :4])
        assert buffer[2, 4:].isnan().all() and buffer[1].isnan().all()


def test_a_fork_copies_a_state_whole_however_short_the_request():
    spec = LayerSpec("linear", 8, 4, values=4, conv=(3, 6))
    cache = tiny.garbage(ContiguousCache([spec], 3, 12))
    cache.prepare([])
    for buffer in cache.buffers[0]:
        buffer[0] = torch.randn(buffer[0].shape)
    cache.copy(tiny.request([], 0), tiny.request([], 2), 2)
    for buffer in cache.buffers[0]:
        assert torch.equal(buffer[2], buffer[0]) and buffer[1].isnan().all()


def test_a_forked_slot_goes_on_as_the_original_would_have():
    data, cache = Sequences(2, 8, 4, 2), cache_of()
    data.k[1, :5], data.v[1, :5] = data.k[0, :5], data.v[0, :5]
    data.step(cache, [(0, 0, 0, 5)])
    cache.copy(tiny.request([], 0), tiny.request([], 1), 5)
    chunks = [(0, 0, 5, 3), (1, 1, 5, 3)]
    assert close(data.step(cache, chunks), data.expected(chunks))


def test_a_models_logits_are_the_same_whole_in_chunks_and_beside_others():
    with torch.inference_mode():
        model = tiny.build()
        prompts = [[7 * i % 96 for i in range(20)], [5 * i % 96 for i in range(9)]]

        def logits(cache, *plan):
            step = cache.prepare(plan)
            hidden, _ = model(step.tokens, step.positions, step)
            return model.logits(hidden[step.sample_rows])

        def fresh():
            return tiny.garbage(ContiguousCache(model.config.specs, 3, 32))

        whole = [logits(fresh(), (tiny.request(p, 0), len(p))) for p in prompts]
        cache = fresh()
        assert len(logits(cache, (tiny.request(prompts[0], 2), 13))) == 0
        last, other = tiny.request(prompts[0], 2, computed=13), tiny.request(prompts[1], 0)
        together = logits(cache, (last, 7), (other, 9))
        assert close(together, torch.cat(whole), 1e-4)


# ---------------------------------------------------------------- by property


def test_stale_content_of_a_slot_is_never_read():
    """A slot full of NaN, and one that a longer request had before."""
    data, cache = Sequences(2, 10, 4, 2), cache_of(slots=1)
    assert close(data.step(cache, [(0, 0, 0, 10)]), data.expected([(0, 0, 0, 10)]))
    for start, n in ((0, 3), (3, 1), (4, 2)):
        chunks = [(1, 0, start, n)]
        assert close(data.step(cache, chunks), data.expected(chunks))


def test_rejected_rows_are_overwritten_by_the_next_step():
    data, cache = Sequences(2, 10, 4, 2), cache_of(slots=1)
    data.q[1, :5], data.k[1, :5], data.v[1, :5] = data.q[0, :5], data.k[0, :5], data.v[0, :5]
    data.step(cache, [(0, 0, 0, 8)])  # positions 5..7 are drafts that will be rejected
    cache.commit(cache.step, [])
    chunks = [(1, 0, 5, 2)]
    assert close(data.step(cache, chunks), data.expected(chunks))


def test_a_row_sees_nothing_of_the_rows_after_it():
    data, cache = Sequences(1, 8, 4, 2), cache_of()
    before = data.step(cache, [(0, 0, 0, 8)])
    data.k[0, 5:] += 100
    data.v[0, 5:] += 100
    after = data.step(cache, [(0, 0, 0, 8)])
    assert torch.equal(before[:5], after[:5]) and not torch.equal(before[5:], after[5:])


@pytest.mark.parametrize("seed", range(6))
def test_random_steps_equal_dense_attention(seed):
    draw = random.Random(seed)
    heads, shared = draw.choice([(4, 2), (2, 2), (4, 1)])
    data, cache = Sequences(4, 12, heads, shared, seed=seed), cache_of(slots=4, heads=shared)
    slots, computed = draw.sample(range(4), 4), [0] * 4
    while min(computed) < 12:
        chunks = []
        for s in draw.sample(range(4), draw.randint(1, 4)):
            n = min(draw.choice([1, 1, 2, 5]), 12 - computed[s])
            if n:
                chunks.append((s, slots[s], computed[s], n))
                computed[s] += n
        if chunks:
            assert close(data.step(cache, chunks), data.expected(chunks))


@pytest.mark.parametrize("seed", range(20))
def test_random_requests_hold_each_slot_at_most_once_and_give_all_back(seed):
    draw = random.Random(seed)
    total = draw.randint(1, 5)
    slots, requests = Slots(total), [tiny.request([1], slot=None) for _ in range(8)]
    for _ in range(200):
        request = draw.choice(requests)
        held = [r for r in requests if r.slot is not None]
        if draw.random() < 0.4:
            slots.release(request)
            assert request.slot is None
        elif held and len(held) < total and request not in held and draw.random() < 0.5:
            slots.fork(draw.choice(held), request)
            assert request.slot is not None
        else:
            before = request.slot
            grown = slots.grow(request, 3)
            assert grown == (before is not None or len(held) < total)
            assert before is None or request.slot == before
        slots.check(requests)
        taken = [r.slot for r in requests if r.slot is not None]
        assert len(set(taken)) == len(taken) == total - len(slots.free)
    for request in requests:
        slots.release(request)
    slots.check(requests)
    assert sorted(slots.free) == list(range(total))


def test_slots_reuse_nothing_and_set_no_limit():
    slots = Slots(1)
    assert slots.match([1, 2, 3], None) == ([], 0)
    assert slots.limit(tiny.request([1]), 7) == 7


def test_check_sees_a_lost_a_doubled_and_a_foreign_slot():
    def held():
        slots, request = Slots(2), tiny.request([1], slot=None)
        slots.grow(request, 1)
        slots.check([request])
        return slots, request

    for spoil in (
        lambda slots, request: slots.free.clear(),
        lambda slots, request: slots.free.append(request.slot),
        lambda slots, request: setattr(request, "slot", 1 - request.slot),
    ):
        slots, request = held()
        spoil(slots, request)
        with pytest.raises(AssertionError, match="lost"):
            slots.check([request])


def test_repair_frees_what_no_running_request_names():
    slots, requests = Slots(3), [tiny.request([1], slot=None) for _ in range(2)]
    for request in requests:
        slots.grow(request, 1)
    slots.free.clear()
    slots.repair(requests[:1])
    slots.check(requests[:1])
    assert len(slots.free) == 2


# ---------------------------------------------------------------- the door

REFUSED = [
    ({"model_type": "gpt9"}, "model_type 'gpt9' is not one of .*llama"),
    ({"model_type": None}, "model_type None"),
    ({"num_hidden_layers": None}, "num_hidden_layers is None"),
    ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    ({"num_attention_heads": "4"}, "num_attention_heads is '4'"),
    ({"num_attention_heads": True}, "num_attention_heads is True"),
    ({"hidden_size": -8}, "hidden_size is -8"),
    ({"hidden_size": 8.0}, "hidden_size is 8.0"),
    ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
    ({"num_key_value_heads": 3}, "2 query heads cannot share 3 key/value heads"),
    ({"hidden_size": 9}, "hidden_size 9 is not a multiple of 2 heads"),
    ({"head_dim": 0}, "head_dim is 0"),
    ({"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
    ({"layer_types": ["full_attention"]}, "layer_types of 2 layers: 1"),
]


@pytest.mark.parametrize("fields, message", REFUSED, ids=str)
def test_a_config_that_cannot_be_sized_is_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        layers(CONFIG | fields)


@pytest.mark.parametrize("name", list(CONFIG))
def test_a_missing_field_is_refused_by_name(name):
    with pytest.raises(ValueError, match=name):
        layers({key: value for key, value in CONFIG.items() if key != name})


def test_the_contiguous_cache_refuses_layers_that_it_only_knows_the_size_of():
    with pytest.raises(ValueError, match="'chunked' are sized, but no cache here holds them"):
        ContiguousCache([LayerSpec("full", 1, 2), LayerSpec("chunked", 1, 2, 8)], 1, 8)


def test_more_tokens_than_a_slot_has_room_for_are_refused():
    cache = cache_of(max_len=4)
    cache.prepare([(tiny.request([1, 2, 3, 4, 5]), 4)])
    with pytest.raises(AssertionError, match="5 tokens in a slot of 4"):
        cache.prepare([(tiny.request([1, 2, 3, 4, 5], computed=3), 2)])


def test_a_fork_without_a_free_slot_is_refused():
    slots, parent = Slots(1), tiny.request([1], slot=None)
    slots.grow(parent, 1)
    with pytest.raises(AssertionError, match="no free slot for sample 0 of request 0"):
        slots.fork(parent, tiny.request([1], slot=None))
