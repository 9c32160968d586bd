"""kernels.py: every operation by hand, against float64, and row by row."""

import dataclasses
import json
import math
import os
import random
import subprocess
import sys
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

import kernels
from kernels import (
    Buffer,
    Call,
    Graphs,
    Layout,
    Measurement,
    StateLayout,
    View,
    allow,
    attention,
    conv,
    convolve,
    delta_rule,
    gated_norm,
    graph_sizes,
    key_splits,
    linear,
    pack,
    recur,
    rms_norm,
    rope,
    rope_tables,
    silu_mul,
    sparse_attention,
    store_kv,
)

torch.set_num_threads(1)
HALF_STEP = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}  # of rounding once, relative


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rounded_once(found, exact, extra=2e-6):
    """found is float64's `exact` rounded to found's type, but for float32's own errors."""
    assert found.dtype in HALF_STEP
    error = (found.double() - exact).abs()
    return bool((error <= exact.abs() * HALF_STEP[found.dtype] + extra).all())


def places_of(table, length, size):
    """Where the tokens of a request lie in a pool, one after another."""
    return [table[p // size] * size + p % size for p in range(length)]


def flat(places):
    """A Part's places or rows as a list."""
    if isinstance(places, slice):
        return list(range(places.start, places.stop))
    return places.tolist()


def viewed(spans, tables, size=8, dtype=torch.float32, window=0, padded=0):
    """The view of rows [(n, length)], which lie one below another and end at their length."""
    whole, row = [], 0
    for n, length in spans:
        whole.append((row, n, length - n))
        row += n
    width, device = max(map(len, tables)), torch.device("cpu")
    layout = Layout(row + padded, len(spans) + padded, width, size, device, dtype, window)
    return layout.view(tables, whole, padded)


def loops(q, keys, values, start, causal=True, window=0, scale=None, chosen=None):
    """Attention written out, in float64: q (n, H, D) at positions start.. of keys (N, G, D).
    chosen: for each row a list of the positions that it reads."""
    q, keys, values = q.double(), keys.double(), values.double()
    n, heads, dim = q.shape
    out = torch.zeros(n, heads, values.shape[-1], dtype=torch.float64)
    for i in range(n):
        seen = range(start + i + 1 if causal else len(keys))
        seen = [p for p in seen if not window or p > start + i - window]
        seen = seen if chosen is None else chosen[i]
        for h in range(heads):
            g = h // (heads // keys.shape[1])
            scores = keys[seen, g] @ q[i, h] * (dim**-0.5 if scale is None else scale)
            out[i, h] = (scores - scores.max()).exp() @ values[seen, g]
            out[i, h] /= (scores - scores.max()).exp().sum()
    return out


def stated(counts, tables, padded=0):
    """The view of requests with those rows, which lie one below another, over those states."""
    spans, row = [], 0
    for n in counts:
        spans.append((row, n, 7))
        row += n
    layout = StateLayout(len(counts) + padded, torch.device("cpu"))
    return layout.view(tables, spans, padded), [slice(row, row + n) for row, n, _ in spans]


def delta_loops(q, k, v, g, beta, state):
    """The gated delta rule written out, in float64: heads one by one, a row after the other."""
    q, k, v, g, beta, state = (x.double() for x in (q, k, v, g, beta, state.clone()))
    out = torch.zeros(v.shape, dtype=torch.float64)
    for h in range(v.shape[1]):
        shared = h // (v.shape[1] // k.shape[1])
        for t in range(len(v)):
            key, query = (
                x[t, shared] / (x[t, shared].square().sum() + 1e-6).sqrt() for x in (k, q)
            )
            state[h] *= g[t, h].exp()
            change = beta[t, h] * (v[t, h] - key @ state[h])
            state[h] += torch.outer(key, change)
            out[t, h] = query @ state[h] / math.sqrt(len(key))
    return out, state


def delta_rows(count, shared, heads, dk, dv, decay, seed=0, dtype=torch.float32):
    """q, k, v, g, beta of that many rows. Some rows have beta 0 or 1, and some keys come again."""
    q, k = (randn(count, shared, dk, seed=seed + i, dtype=dtype) for i in (1, 2))
    again = torch.arange(count) % 3 == 2
    k[again] = k[0].clone()
    beta = randn(count, heads, seed=seed + 3).sigmoid()
    beta[again] = (beta[again] > 0.4).float()
    g = -(randn(count, heads, seed=seed + 4) * 2).exp() * decay
    return q, k, randn(count, heads, dv, seed=seed + 5, dtype=dtype), g, beta


low_bit = pytest.mark.skipif(
    kernels.cannot_quantize(torch.device("cpu"), torch.float32) is not None,
    reason="no low-bit kernels here",
)


# ---------------------------------------------------------------- by hand


def test_linear_multiplies_by_the_transposed_weight_and_adds_the_bias():
    weight = pack(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    x = torch.tensor([[1.0, 10.0]])
    assert linear(x, weight).tolist() == [[21.0, 43.0, 65.0]]
    assert linear(x, weight, torch.tensor([0.5, -1.0, 0.0])).tolist() == [[21.5, 42.0, 65.0]]


def test_a_packed_weight_knows_its_shape_and_bytes():
    for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2), (torch.float64, 8)):
        packed = pack(randn(5, 3, dtype=dtype))
        assert (packed.out_features, packed.in_features, packed.nbytes) == (5, 3, 15 * size)
    assert not pack(randn(5, 3, dtype=torch.float64)).blocked


def four(value=9.0, zero=0.0, outs=16):
    """Rows of 32 weights, all (value - 8) * 0.5 + zero."""
    values = torch.full((outs, 32), value, dtype=torch.uint8)
    numbers = torch.full((2, outs, 1), 0.5)
    numbers[1] = zero
    return kernels.FourBit(values, *numbers)


@low_bit
def test_a_4_bit_value_above_8_is_that_many_scales_above_zero():
    """32 ones times (9 - 8) * 0.5 + 2 = 2.5, in 1 row and in many."""
    for rows in (1, 20):
        x = torch.ones(rows, 32)
        packed = pack(four(9, 2.0), dtype=torch.float32)
        assert linear(x, packed).tolist() == [[80.0] * 16] * rows
        assert linear(x, packed, torch.arange(16.0))[0].tolist() == [80.0 + i for i in range(16)]


@low_bit
def test_a_quantised_weight_counts_the_bytes_that_a_row_reads():
    """64 x 96 weights: 4 bits each, a scale and a zero for every 32; or 8 bits, a scale a row."""
    weight = randn(64, 96, dtype=torch.bfloat16)
    assert pack(weight, "int4").nbytes == 64 * 48 + 2 * 2 * 64 * 3
    assert pack(weight, "int8").nbytes == 64 * 96 + 2 * 64
    assert pack(weight, "int8").many is None


def test_four_bits_are_the_nearest_of_16_steps_and_keep_both_ends():
    weight = torch.linspace(-1, 2, 32)[None].clone()
    found = kernels.four_bit(weight)
    assert (found.values[0, 0], found.values[0, -1]) == (0, 15) and found.scales[0, 0] == 0.2
    assert (found.rounded(torch.float32) - weight).abs().max() <= 0.1 + 1e-6
    same = torch.full((1, 32), 3.0)
    assert torch.equal(kernels.four_bit(same).rounded(torch.float32), same)


def test_rms_norm_of_3_and_4_divides_by_the_root_of_12_and_a_half():
    found = rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]), 0.0)
    assert found[0].tolist() == pytest.approx([3 / math.sqrt(12.5), 8 / math.sqrt(12.5)])
    found = rms_norm(torch.tensor([[3.0, 4.0]]), torch.ones(2), 12.5)  # eps is inside the root
    assert found[0].tolist() == pytest.approx([0.6, 0.8])
    assert rms_norm(torch.zeros(1, 4), torch.ones(4), 1e-6).tolist() == [[0.0] * 4]


def test_rope_turns_each_coordinate_with_its_partner_in_the_other_half():
    """A quarter turn takes (x, y) to (-y, x): pairs are (1, 3) and (2, 4), the second at rest."""
    tables = rope_tables(torch.tensor([1]), torch.tensor([math.pi / 2, 0.0]), 1.0)
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    assert rope(x, tables)[0, 0].tolist() == pytest.approx([-3.0, 2.0, 1.0, 4.0], abs=1e-6)


def test_rope_at_position_0_turns_nothing():
    x = randn(1, 3, 8)
    tables = rope_tables(torch.tensor([0]), torch.tensor([1.0, 0.1, 0.01, 0.001]), 1.0)
    assert tables.shape == (2, 1, 1, 8)
    assert tables[0].eq(1).all() and tables[1].eq(0).all()
    assert torch.equal(rope(x, tables), x)


def test_the_rope_factor_scales_cosine_and_sine():
    x, positions, frequencies = randn(2, 1, 4), torch.tensor([3, 9]), torch.tensor([1.0, 0.1])
    plain = rope(x, rope_tables(positions, frequencies, 1.0))
    scaled = rope(x, rope_tables(positions, frequencies, 1.5))
    assert torch.allclose(scaled, 1.5 * plain, atol=1e-6)


def test_rope_of_a_part_turns_the_first_numbers_of_each_head_and_leaves_the_rest():
    """As above, but with pairs of the first four numbers: (1, 3), and (2, 4) at rest."""
    tables = rope_tables(torch.tensor([1]), torch.tensor([math.pi / 2, 0.0]), 1.0)
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [0.0, 0.0, 1.0, 0.0, 7.0, 8.0]]])
    found = rope(x, tables)[0].tolist()
    assert found[0] == pytest.approx([-3.0, 2.0, 1.0, 4.0, 5.0, 6.0], abs=1e-6)
    assert found[1] == pytest.approx([-1.0, 0.0, 0.0, 0.0, 7.0, 8.0], abs=1e-6)


def test_the_gated_norm_norms_each_head_before_it_is_gated():
    """[3, 4] has the mean square 12.5; silu(0) is 0 and silu(1) 0.731."""
    x = torch.tensor([[[3.0, 4.0], [6.0, 8.0]]])
    gate = torch.tensor([[[0.0, 1.0], [1.0, 1.0]]])
    found = gated_norm(x, gate, torch.tensor([1.0, 2.0]), 0.0)[0]
    silu = 1 / (1 + math.exp(-1))
    three, eight = 3 / math.sqrt(12.5) * silu, 8 / math.sqrt(12.5) * silu
    assert found[0].tolist() == pytest.approx([0.0, eight])
    assert found[1].tolist() == pytest.approx([three, eight])


def test_silu_mul_gates_the_second_half_with_the_first():
    found = silu_mul(torch.tensor([[0.0, 1.0, -1.0, 5.0, 2.0, 3.0]]))
    sigmoid = 1 / (1 + math.exp(-1))
    assert found[0].tolist() == pytest.approx([0.0, 2 * sigmoid, -3 * (1 - sigmoid)])


def test_a_convolution_weighs_a_rows_own_input_with_the_last_weight_and_keeps_the_last_inputs():
    """States 1: (2, 3); weights 100, 10, 1. 2, 3, 4: 234; 3, 4, 5: 345. silu leaves them."""
    pool = torch.tensor([[0.0, 0.0], [2.0, 3.0], [9.0, 9.0], [9.0, 9.0]])[..., None]
    weight = torch.tensor([[100.0, 10.0, 1.0]])
    view, _ = stated([2, 1], [[1, 3], [0, 2]])
    found = conv(torch.tensor([[4.0], [5.0], [6.0]]), weight, pool, view)
    assert found[:, 0].tolist() == [234.0, 345.0, pytest.approx(6 / (1 + math.exp(-6)))]
    assert pool[..., 0].tolist() == [[0.0, 0.0], [2.0, 3.0], [0.0, 6.0], [4.0, 5.0]]


def test_a_state_fades_and_then_what_it_answers_moves_towards_the_value():
    """8 fades to 4 and moves half of the way to 10; the next row, of another key, reads nothing."""
    pool = torch.zeros(3, 1, 2, 1)
    pool[1, 0, 0] = 8
    one, other = [1e4, 0.0], [0.0, 1e4]  # as good as unit vectors
    q, k = torch.tensor([[one], [other]]), torch.tensor([[one], [one]])
    g, beta = torch.tensor([[math.log(0.5)], [0.0]]), torch.tensor([[0.5], [0.0]])
    view, _ = stated([2], [[1, 2]])
    found = recur(q, k, torch.tensor([[[10.0]], [[5.0]]]), g, beta, pool, view)
    assert found.flatten().tolist() == pytest.approx([7 / math.sqrt(2), 0.0])
    assert pool[2].flatten().tolist() == pytest.approx([7.0, 0.0])
    assert pool[1].flatten().tolist() == [8.0, 0.0], "a state is not overwritten"


def test_requests_of_as_many_rows_are_computed_together():
    view, _ = stated([1, 3, 1, 3, 1], [[0, 4], [3, 5], [2, 6], [3, 8], [0, 9]], padded=2)
    assert (view.rows, view.most) == (9, 3)
    single, several = view.parts
    assert single.rows.tolist() == [[0], [4], [8]] and several.rows.tolist() == [
        [1, 2, 3],
        [5, 6, 7],
    ]
    assert (single.read.tolist(), single.write.tolist()) == ([0, 2, 0], [4, 6, 9])
    assert (several.read.tolist(), several.write.tolist()) == ([3, 3], [5, 8])


@pytest.mark.parametrize("table", [[1, 1], [1, 0], [0, -1]])
def test_a_step_writes_no_state_that_it_reads_and_never_the_first(table):
    with pytest.raises(AssertionError, match="states"):
        stated([1], [table])


def allowed_alone(logits, words):
    """`allow` of a single row, that of its mask: the scores, and what the mask took."""
    scores, took = allow(logits[None], words[None], torch.tensor([0]))
    return scores[0], took[0].tolist()


def test_allow_reads_bit_i_of_word_w_as_id_32_w_plus_i():
    words = torch.tensor([0b101 - 2**31, 2, -1], dtype=torch.int32)  # ids 0, 2, 31; 33; 64...
    found, _ = allowed_alone(torch.arange(70.0), words)
    allowed = [0, 2, 31, 33, 64, 65, 66, 67, 68, 69]
    assert found.isfinite().nonzero()[:, 0].tolist() == allowed
    assert found[allowed].tolist() == allowed
    assert found[1] == -torch.inf


def test_a_grammar_does_not_hide_nan():
    """A model that gives NaN has failed, whatever the grammar allows."""
    scores = torch.tensor([math.nan, math.nan, 1.0])
    found, _ = allowed_alone(scores, torch.tensor([2], dtype=torch.int32))
    assert found[:2].isnan().all() and found[2] == -math.inf


def test_allow_says_what_it_took_and_whether_the_likeliest_was_in_it():
    scores = torch.tensor([0.5, 0.3, 0.2]).log()
    for bits, mass, best in ((0b111, 0, 0), (0b110, 0.5, 1), (0b011, 0.2, 0), (0b100, 0.8, 1)):
        _, took = allowed_alone(scores, torch.tensor([bits], dtype=torch.int32))
        assert took == pytest.approx([mass, best])


def test_rows_without_a_grammar_stay_as_they_are():
    scores = torch.tensor([[1.0, 2.0], [3.0, math.nan], [5.0, 6.0]])
    found, took = allow(scores, torch.tensor([[2]], dtype=torch.int32), torch.tensor([2]))
    assert found.tolist()[0] == [1.0, 2.0] and found.tolist()[2] == [-math.inf, 6.0]
    assert found[1, 0] == 3 and found[1, 1].isnan()
    assert took.tolist() == [[pytest.approx(1 / (1 + math.e)), 0]]


def test_keys_and_values_go_where_the_slots_say_and_nowhere_else():
    keys, values = (torch.zeros(3, 4, 1, 2) for _ in range(2))
    k = torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]])
    store_kv(k, 10 * k, keys, values, View(torch.tensor([9, 3]), 2))
    assert keys[2, 1].tolist() == [[1.0, 2.0]] and keys[0, 3].tolist() == [[3.0, 4.0]]
    assert values[2, 1].tolist() == [[10.0, 20.0]] and values[0, 3].tolist() == [[30.0, 40.0]]
    assert keys.sum() == 10 and values.sum() == 100


def test_keys_without_values_are_stored_alone():
    keys = torch.zeros(3, 4, 2)  # an index's: no heads
    store_kv(
        torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]]), None, keys, None, View(torch.tensor([9]), 1)
    )
    assert keys[2, 1].tolist() == [1.0, 2.0] and keys.sum() == 3


def test_a_row_sees_as_many_tokens_as_its_window_has():
    """Two rows at 5 and 6, in a window of 3: 3 to 5, and 4 to 6. Values are positions, keys 0."""
    keys, values = torch.zeros(3, 4, 1, 1), torch.full((3, 4, 1, 1), math.nan)
    values[2, 3], values[1, :3, 0, 0] = 3.0, torch.tensor([4.0, 5.0, 6.0])
    found = viewed([(2, 7)], [[2, 1]], 4, window=3)
    assert found.parts[0].places.tolist() == [11, 4, 5, 6]
    keys.flatten(0, 1)[[0, 1, 2, 3, 7, 8, 9, 10]] = math.nan
    assert attention(torch.ones(2, 1, 1), keys, values, found, window=3).flatten().tolist() == [
        4,
        5,
    ]


def test_an_index_chooses_the_highest_scores_and_of_equal_ones_the_older():
    """Scores 2, 0, 5, 0, 2 of five tokens: of three the last is the first of the 2s' equals."""
    scores = torch.tensor([[2.0, 0.0, 5.0, -0.0, 2.0, -1.0, -torch.inf]])
    wanted = [2, 0, 4, 1, 3, 5, 6]
    for top in range(1, 9):
        assert kernels.best_of(scores, top).tolist() == [wanted[:top]]


def test_blocks_that_follow_each_other_are_a_slice_and_others_a_list_of_places():
    parts = viewed([(3, 11), (2, 11), (9, 9)], [[4, 5], [5, 4], [2, 9, 9]]).parts
    assert [part.rows for part in parts] == [slice(0, 3), slice(3, 5), slice(5, 14)]
    assert parts[0].places == slice(32, 43)
    assert parts[1].places.tolist() == [*range(40, 48), 32, 33, 34]
    assert parts[2].places.tolist() == [*range(16, 24), 72]
    assert viewed([(9, 9)], [[2, 3, 9, 7]]).parts[0].places == slice(16, 25), "9 and 7 are not used"
    assert all(part.mask is None for part in parts)
    parts = viewed([(1, 25)], [[2, 4, 3, 5]]).parts
    assert parts[0].places.tolist() == [*range(16, 24), *range(32, 40), *range(24, 32), 40]


def test_requests_of_one_row_share_a_part_and_the_shorter_is_padded_with_its_first_token():
    """Lengths 9 and 2 in blocks of 8: the second has two tokens of its own, and 14 of padding."""
    parts = viewed([(1, 9), (1, 2)], [[3, 1], [2]]).parts
    assert len(parts) == 1
    assert parts[0].rows.tolist() == [1, 0], "the longest last"
    short, long = parts[0].places.view(2, 16).tolist()
    assert short == [16, 17] + [16] * 14
    assert long == [*range(24, 32), 8] + [24] * 7
    mask = parts[0].mask
    assert mask.shape == (2, 1, 1, 16) and mask.dtype == torch.float32
    assert mask[0].flatten().tolist() == [0.0] * 2 + [-math.inf] * 14
    assert mask[1].flatten().tolist() == [0.0] * 9 + [-math.inf] * 7


def test_a_request_with_more_blocks_than_it_has_filled_is_padded_like_any_other():
    """It reserved four blocks; its part is as long as the longest of its requests."""
    parts = viewed([(1, 2), (1, 9)], [[2, 7, 6, 5], [3, 1, 8, 9]]).parts
    assert parts[0].places.tolist() == [16, 17, *[16] * 14, *range(24, 32), 8, *[24] * 7]


def test_of_requests_in_a_window_only_blocks_that_a_row_sees_are_read():
    """Lengths 30 and 9 in blocks of 8, and a window of 10: positions 20 to 29, and 0 to 8."""
    parts = viewed([(1, 30), (1, 9)], [[0, 0, 5, 3], [7, 1]], window=10).parts
    assert len(parts) == 1 and parts[0].rows.tolist() == [1, 0]
    short, long = parts[0].places.view(2, 16).tolist()
    assert short == [*range(56, 64), 8] + [56] * 7
    assert long == [44] * 4 + [44, 45, 46, 47] + [*range(24, 30)] + [44] * 2
    hidden = parts[0].mask[:, 0, 0].eq(-math.inf)
    assert hidden[0].tolist() == [False] * 9 + [True] * 7
    assert hidden[1].tolist() == [True] * 4 + [False] * 10 + [True] * 2
    parts = viewed([(1, 30)], [[0, 0, 5, 3]], window=10).parts
    assert parts[0].places.tolist() == [44, 45, 46, 47, *range(24, 30)]
    parts = viewed([(3, 30)], [[0, 0, 5, 6]], window=10).parts
    assert parts[0].places == slice(42, 54), "the first row, at 27, sees 18 to 27"


def test_what_a_step_reads_in_a_window_does_not_grow_with_the_context():
    def places(length):
        tables = [list(range(1000 * i + 1, 1000 * i + 900)) for i in range(4)]
        spans = [(1, length), (1, length + 3), (5, length), (1, length + 1)]
        return [flat(part.places) for part in viewed(spans, tables, window=20).parts]

    for length in (100, 1100, 7100):
        assert [len(x) for x in places(length)] == [24, 3 * 24]


def test_one_row_alone_is_a_part_without_a_mask():
    parts = viewed([(1, 10)], [[3, 4]]).parts
    assert (parts[0].rows, parts[0].places, parts[0].mask) == (slice(0, 1), slice(24, 34), None)


def test_a_parts_longest_has_half_as_many_blocks_again_as_its_shortest_and_four_more():
    """One block: up to 5.5. Six: up to 13."""
    lengths = [41, 8, 104, 1, 40, 105]
    tables = [list(range(1, 30, 2))] * 6
    parts = viewed([(1, length) for length in lengths], tables).parts
    assert [[lengths[row] for row in flat(part.rows)] for part in parts] == [
        [1, 8, 40],
        [41, 104],
        [105],
    ]


def test_chunks_and_single_rows_of_a_step_are_each_in_one_part():
    spans = [(1, 5), (4, 4), (1, 700), (1, 9), (3, 20), (1, 1)]
    tables = [list(range(100 * i, 100 * i + 90, 1 + i % 2)) * 2 for i in range(1, 7)]
    found = viewed(spans, tables)
    rows = [flat(part.rows) for part in found.parts]
    assert sorted(sum(rows, [])) == list(range(11))
    assert rows == [[1, 2, 3, 4], [7, 8, 9], [10, 0, 6], [5]]
    assert len(found.slots) == 11


def test_a_buffer_is_written_and_the_part_that_was_written_comes_back():
    buffer = Buffer(5, torch.device("cpu"))
    first = buffer.fill([3, 1, 2])
    assert first.tolist() == [3, 1, 2] and first.dtype == torch.int64
    assert buffer.fill([]).tolist() == []
    second = buffer.fill([9, 8, 7, 6, 5])
    assert second.tolist() == [9, 8, 7, 6, 5]
    assert first.data_ptr() == second.data_ptr(), "the buffer was allocated again"
    with pytest.raises(ValueError):
        buffer.fill([0] * 6)


def cost(name, result, spans, *given, **options):
    return kernels.COSTS.get(name, kernels._plain_cost)(result, spans, *given, **options)


def test_a_linear_reads_its_weight_once_and_multiplies_and_adds_for_every_row():
    weight = pack(randn(5, 4))
    x = randn(3, 4)
    # (5 x 4 weights + 3 x 4 in + 3 x 5 out) x 4 bytes; 2 x 3 x 5 x 4 FLOPs
    assert cost("linear", linear(x, weight), [(0, 3)], x, weight) == (188, 120)


@pytest.mark.skipif(kernels.cannot_quantize(torch.device("cpu"), torch.float32) is not None,
                    reason="no low-bit kernels here")  # fmt: skip
def test_a_linear_of_many_rows_reads_the_copy_that_multiplies_them():
    weight = pack(randn(16, 32), "int4")
    for rows, read in ((8, weight.nbytes), (9, 16 * 32 * 4)):
        x = randn(rows, 32)
        found = cost("linear", linear(x, weight), [(0, rows)], x, weight)
        assert found[0] == read + rows * (32 + 16) * 4


def test_attention_reads_what_is_stored_once_and_pairs_a_row_with_what_it_sees():
    q, pool = randn(2, 4, 8), randn(9, 16, 2, 8)
    # rows at 20 and 21 see 21 and 22: 43 pairs, x 4 x 4 heads x 8; with no mask 44
    # 22 tokens x 2 x 2 heads x 8 x 4 bytes, and q and out, 2 x 4 x 8 x 4 bytes each
    assert cost("attention", q, [(20, 2)], q, pool, pool, None) == (2816 + 512, 43 * 128)
    assert cost("attention", q, [(20, 2)], q, pool, pool, None, causal=False)[1] == 44 * 128
    # two requests of one row each: 5 and 9 tokens, each its own
    assert cost("attention", q, [(4, 1), (8, 1)], q, pool, pool, None) == (1792 + 512, 14 * 128)


def test_attention_in_a_window_reads_what_a_row_sees_and_a_latent_once():
    q, pool = randn(2, 4, 8), randn(9, 16, 2, 8)
    # rows at 20 and 21 see 5 each, together 6 tokens
    spans, bound = [(20, 2)], q.nbytes * 2
    found = cost("attention", q, spans, q, pool, pool, None, window=5)
    assert found == (6 * 2 * 2 * 8 * 4 + bound, 10 * 128)
    # rows at 2 to 5 see 3, 4, 5 and 5
    assert cost("attention", q, [(2, 4)], q, pool, pool, None, True, 5)[1] == 17 / 2 * 256
    latent, out = randn(9, 16, 1, 8), randn(2, 4, 6)
    found = cost("attention", out, spans, q, latent, latent[..., :6], None)
    assert found == (22 * 8 * 4 + q.nbytes + out.nbytes, 43 * 2 * 4 * 14)
    # and of what an index chooses each row's 5 tokens, besides all 22 index keys
    index = randn(2, 3, 4), randn(9, 16, 4), randn(2, 3)
    found = cost("sparse_attention", out, spans, q, latent, latent[..., :6], None, *index, 5)
    moved = 22 * 4 * 4 + 10 * 8 * 4 + sum(x.nbytes for x in (q, out, index[0], index[2]))
    assert found == (moved, 43 * 2 * 3 * 4 + 10 * 2 * 4 * 14)


def test_a_linear_layer_reads_a_state_and_writes_one_for_each_request():
    """2 requests, 3 rows. Of 2 heads x 8 x 4 numbers; of 3 inputs of 10 channels."""
    q, v, g, pool = randn(3, 1, 8), randn(3, 2, 4), randn(3, 2), randn(9, 2, 8, 4)
    moved = 4 * (2 * 2 * 64 + 24 + 24 + 24 + 6 + 6 + 24)
    assert cost("recur", v, [(5, 2), (0, 1)], q, q, v, g, g, pool, None) == (moved, 7 * 3 * 64)
    x, weight, pool = randn(3, 10), randn(10, 4), randn(9, 3, 10)
    moved = 4 * (2 * 2 * 30 + 30 + 40 + 30)
    assert cost("conv", x, [(5, 2), (0, 1)], x, weight, pool, None) == (moved, 30 * 12)


@low_bit
def test_experts_compute_as_much_whatever_their_weights_are_stored_in():
    x, chosen = randn(3, 64), torch.tensor([[0, 1], [0, 1], [1, 0]])
    plain = randn(2, 64, 64), randn(2, 64, 32)  # (X, 2 F, E), (X, E, F)
    packed = [[[pack(w, kind) for w in both] for both in plain] for kind in (None, "int8", "int4")]
    for weights in (plain, *packed):
        _, flops = cost("experts", x, [(0, 3)], x, chosen, None, *weights)
        assert flops == 6 * 2 * 3 * 32 * 64


def test_storing_moves_keys_and_values_and_not_their_pool():
    k, pool = randn(3, 2, 8), randn(9, 16, 2, 8)
    assert cost("store_kv", None, [(0, 3)], k, k, pool, pool, None) == (4 * 3 * 2 * 8 * 4, 0)
    assert cost("store_kv", None, [(0, 3)], k, None, pool, None, None) == (2 * 3 * 2 * 8 * 4, 0)


def test_any_other_operation_moves_its_tensors_once():
    x, weight = randn(3, 4), randn(4)
    assert cost("rms_norm", x, [(0, 3)], x, weight, 1e-6) == ((12 + 4 + 12) * 4, 48)
    assert cost("new", x, [(0, 3)], x, eps=weight) == ((12 + 4 + 12) * 4, 48)


def test_calls_are_recorded_in_order_by_name_and_what_they_call_is_theirs():
    gate, up = pack(randn(6, 4)), pack(randn(8, 4))
    pool = torch.zeros(2, 8, 1, 4)
    q, k = randn(1, 2, 4), randn(1, 1, 4)
    with kernels.measured([(0, 1)], {id(up): "up"}) as calls:
        x = kernels.rms_norm(randn(1, 4), torch.ones(4), 1e-6)
        kernels.linear(x, gate), kernels.linear(x, up)
        there = viewed([(1, 1)], [[1]])
        kernels.store_kv(k, k, pool, pool, there)
        kernels.attention(q, pool, pool, there)  # calls `attend`, which is an operation too
    assert [call.name for call in calls] == [
        "rms_norm", "linear", "up", "store_kv", "attention"
    ]  # fmt: skip
    assert all(call.seconds > 0 and call.count == 1 for call in calls)
    assert [call.flops for call in calls[1:3]] == [48, 64]


@pytest.mark.parametrize("ends", ["well", "badly"])
def test_operations_are_put_back_whatever_happens(ends):
    owner = SimpleNamespace(draw=lambda x: x)
    before, draw = dict(vars(kernels)), owner.draw
    with pytest.raises(RuntimeError) if ends == "badly" else kernels.nullcontext():
        with kernels.measured([(0, 2)], also=[("drawing", owner, "draw")]) as calls:
            assert kernels.linear is not before["linear"] and owner.draw is not draw
            owner.draw(randn(2, 4))
            if ends == "badly":
                kernels.linear(randn(2, 5), pack(randn(4, 6)))
    assert vars(kernels) == before and owner.draw is draw
    assert [call.name for call in calls] == ["drawing"]


def test_an_operation_that_is_added_is_recorded_without_being_told(monkeypatch):
    def halved(x: torch.Tensor) -> torch.Tensor:
        return x / 2

    halved.__module__ = "kernels"
    monkeypatch.setattr(kernels, "halved", halved, raising=False)
    with kernels.measured([(0, 2)]) as calls:
        kernels.halved(randn(2, 4))
    assert calls == [Call("halved", 64, 32, calls[0].seconds)]


def test_the_run_of_median_time_counts(monkeypatch):
    ticks = iter([0.0, 0.3, 1.0, 1.1, 2.0, 2.4, 3.0, 3.2, 9.0])  # 0.3, 0.1, 0.4, 0.2 s
    monkeypatch.setattr(kernels, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    step = Measurement("decode", [(7, 1)], lambda: None)
    step.measure({})
    assert step.seconds == pytest.approx(0.3) and next(ticks) == 9.0  # 1 s is over


def test_a_gpus_calls_get_the_time_of_their_own_ranges():
    def event(name, start, us, kind=DeviceType.CPU):
        where = SimpleNamespace(start=start)
        return SimpleNamespace(name=name, time_range=where, device_time_total=us, device_type=kind)

    calls = [Call("linear", 8, 1, 9.0), Call("rope", 8, 1, 9.0), Call("linear", 8, 1, 9.0)]
    events = [
        event("linear", 50, 3.0), event("rope", 20, 2.0), event("linear", 10, 1.0),
        event("aten::mm", 11, 1.0), event("linear", 12, 7.0, DeviceType.CUDA),
    ]  # fmt: skip
    kernels.set_seconds(calls, events)
    assert [call.seconds for call in calls] == [1e-6, 2e-6, 3e-6]
    with pytest.raises(ValueError):
        kernels.set_seconds(calls, events[1:])


def two_steps():
    """A prefill at half of 100 GFLOP/s, a decode at half of 10 GB/s: ridge 10 FLOP/byte."""
    prefill, decode = (Measurement(*step, print) for step in (
        ("prefill", [(0, 50)]), ("decode", [(50, 1)]),
    ))  # fmt: skip
    prefill.calls = [Call("linear", 10**9, 40e9, 0.8)]
    decode.calls = [Call("linear", 10**9, 1e9, 0.1), Call("linear", 10**9, 1e9, 0.1)]
    prefill.seconds, decode.seconds = 0.8, 0.4
    return prefill, decode


def test_a_report_says_which_limit_is_near_and_what_a_token_costs():
    text = kernels.report(*two_steps(), bandwidth=10e9, rate=100e9)
    lines = [line.split() for line in text.splitlines()]
    assert "linear 1 800.00 100% 1,000.0 40.00 40.0 1.2 50.0 arithmetic 50%".split() in lines
    assert "linear 2 200.00 50% 2,000.0 2.00 1.0 10.0 10.0 memory 100%".split() in lines
    assert "between them 200.00 50%".split() in lines
    assert "all 2 400.00 100% 2,000.0 2.00 1.0 5.0 5.0 memory 50%".split() in lines
    assert "prompt token takes 16 ms, an answer token 400 ms: 25.0 times" in text
    assert "below 10.0 FLOP/byte memory is the limit" in text


def test_the_roof_rises_with_flops_a_byte_up_to_the_ridge_and_nothing_is_above_it():
    lines = kernels._roofline({"P": two_steps()[0].total, "D": two_steps()[1].total}, 10e9, 100e9)
    picture = [line[11:].ljust(61) for line in lines[1:10]]
    roof = [next(i for i, line in enumerate(picture) if line[c] != " ") for c in range(61)]
    assert roof == sorted(roof, reverse=True) and roof[-1] == 0
    (p,) = [(i, line.index("P")) for i, line in enumerate(picture) if "P" in line]
    (d,) = [(i, line.index("D")) for i, line in enumerate(picture) if "D" in line]
    ridge = picture[0].index("-")
    assert d[1] < ridge < p[1], "decode is left of the ridge, prefill right of it"
    assert p[0] >= roof[p[1]] and d[0] >= roof[d[1]] and p[0] < d[0]


def test_rows_without_a_slot_are_not_stored_and_attend_to_nothing():
    """Two decodes and two padded rows, whose queries, keys and values are NaN."""
    layout = Layout(8, 4, 3, 8, torch.device("cpu"), torch.float32)
    found = layout.view([[2], [1]], [(0, 1, 3), (1, 1, 0)], padded=2)
    assert found.slots.tolist() == [19, 8, -1, -1] and (found.rows, found.most) == (2, 1)
    k, v, q = randn(4, 1, 4, seed=1), randn(4, 1, 4, seed=2), randn(4, 2, 4)
    for x in (k, v, q):
        x[2:] = math.nan
    keys, values = randn(4, 8, 1, 4, seed=3), randn(4, 8, 1, 4, seed=4)
    before = keys.clone()
    store_kv(k, v, keys, values, found)
    changed = (keys != before).any(-1).flatten().nonzero()[:, 0].tolist()
    assert changed == [8, 19] and keys.isfinite().all() and values.isfinite().all()
    out = attention(q, keys, values, found)
    assert out[2:].eq(0).all()
    assert torch.equal(
        out[:2], attention(q[:2], keys, values, viewed([(1, 4), (1, 1)], [[2], [1]]))
    )


def test_few_programs_split_the_keys_into_4_or_16_parts(monkeypatch):
    monkeypatch.setattr(kernels, "PROGRAMS", 264)
    wanted = {1: 16, 8: 16, 65: 16, 66: 4, 67: 4, 263: 4, 264: 1, 999: 1}
    assert {programs: key_splits(programs, 16) for programs in wanted} == wanted
    assert key_splits(1, 32) == 1, "several rows of a request are enough"


def test_recorded_steps_have_1_2_4_then_multiples_of_8_then_of_16_rows_and_the_most():
    assert graph_sizes(0) == ()
    assert graph_sizes(1) == (1,)
    assert graph_sizes(3) == (1, 2, 3)
    assert graph_sizes(8) == (1, 2, 4, 8)
    assert graph_sizes(40) == (1, 2, 4, 8, 16, 24, 32, 40)
    assert graph_sizes(42) == (1, 2, 4, 8, 16, 24, 32, 40, 42)
    assert graph_sizes(5000) == graph_sizes(512) and graph_sizes(512)[-2:] == (496, 512)
    assert graph_sizes(100) == (1, 2, 4, *range(8, 64, 8), 64, 80, 96, 100)


def test_a_step_is_replayed_where_its_size_was_recorded_and_called_elsewhere():
    called, replayed = [], []
    graphs = Graphs(lambda step: called.append(step) or "called", torch.device("cpu"), (1, 2))
    graphs.record(None)  # a CPU records nothing
    small, large, chunk = (SimpleNamespace(padded=size) for size in (1, 2, None))
    assert [graphs(step) for step in (small, large, chunk)] == ["called"] * 3
    recorded = SimpleNamespace(replay=lambda: replayed.append(2))
    graphs.recorded[2] = recorded, "replayed"
    assert [graphs(step) for step in (small, large, chunk)] == ["called", "replayed", "called"]
    assert called == [small, large, chunk, small, chunk] and replayed == [2]


# ---------------------------------------------------------------- against the reference


def test_a_trace_has_a_range_for_every_call(tmp_path):
    weight, x = pack(randn(64, 64)), randn(2, 64)
    step = Measurement("decode", [(7, 2)], lambda: kernels.silu_mul(kernels.linear(x, weight)))
    kernels.trace([step], tmp_path / "t.json", {id(weight): "gate, up"})
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    ranges = {e["name"]: e for e in events if e.get("cat") == "user_annotation"}
    assert {"decode", "gate, up", "silu_mul"} <= set(ranges)
    whole, inner = ranges["decode"], ranges["silu_mul"]
    assert whole["ts"] <= inner["ts"] <= whole["ts"] + whole["dur"]
    assert step.calls == [], "on a CPU a traced run is not a measured one: tracing takes time"


def test_what_is_launched_in_a_range_belongs_to_an_operation_of_the_profiler(tmp_path):
    """A Triton kernel's time would be nobody's."""
    x = randn(2, 64)
    step = Measurement("decode", [(7, 2)], lambda: kernels.silu_mul(x))
    kernels.trace([step], tmp_path / "t.json", {})
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    mine = next(e for e in events if e["name"] == "silu_mul")
    inner = next(e for e in events if e.get("cat") == "cpu_op" and e["ts"] >= mine["ts"])
    assert inner["name"] == "launches" and inner["dur"] <= mine["dur"]


def test_the_profilers_ranges_take_as_long_as_the_clock_says():
    """What a GPU's seconds are read from, on a CPU."""
    weight, x = pack(randn(512, 512)), randn(256, 512)
    with torch.profiler.profile() as profiler:
        with kernels.measured([(0, 256)], ranges=True) as calls:
            for _ in range(3):
                kernels.silu_mul(kernels.linear(x, weight))
    clock = [call.seconds for call in calls]
    kernels.set_seconds(calls, profiler.events(), "cpu_time_total")
    for seconds, call in zip(clock, calls):
        assert 0 < seconds <= call.seconds * 1.01 + 1e-4


def test_the_rate_of_products_is_that_of_a_product():
    rate = kernels.multiply_rate(torch.device("cpu"), torch.float32, 512)
    x, seconds = randn(512, 512), []
    for _ in range(5):
        began = time.perf_counter()
        x @ x
        seconds.append(time.perf_counter() - began)
    assert rate > 2 * 512**3 / max(seconds) / 20


INTERPRETED = {  # test -> which of triton_cases.py it runs
    "test_every_kernel_in_tritons_interpreter_equals_its_pytorch_body": (),
    "test_every_kernel_in_more_shapes": ("-m", "slow"),
}


@pytest.fixture(scope="module", autouse=True)
def interpreter(request):
    """Runs of triton_cases.py, begun with the first test of this file: they have another core."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    chosen = {item.name for item in request.session.items if item.path == request.path}
    runs = {
        name: subprocess.Popen(
            [*command, *options, "tests/triton_cases.py"], cwd=Path(__file__).parent.parent,
            env=os.environ | {"TRITON_INTERPRET": "1"}, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for name, options in INTERPRETED.items()
        if name in chosen
    }  # fmt: skip
    yield runs
    for run in runs.values():
        run.kill()


def passes(run: subprocess.Popen):
    said, _ = run.communicate()
    assert run.returncode == 0 and " passed" in said, said[-5000:]


TRITON = pytest.mark.skipif(kernels.triton is None, reason="Triton is for Linux")


@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("biased", [True, False])
def test_linear_of_a_packed_weight_equals_the_plain_product(rows, dtype, biased):
    """48 products of numbers near 1 in float32; bfloat16 is rounded once, from more than it has."""
    weight, x = randn(40, 48, seed=1, dtype=dtype), randn(rows, 48, seed=2, dtype=dtype)
    bias = randn(40, seed=3, dtype=dtype) if biased else None
    exact = x.double() @ weight.double().T + (bias.double() if biased else 0)
    found = linear(x, pack(weight), bias)
    assert found.dtype == dtype and found.shape == (rows, 40)
    if dtype == torch.float64:
        assert torch.allclose(found, exact)
    else:
        assert rounded_once(found, exact, 2e-5)


@low_bit
@pytest.mark.parametrize("rows", [1, 8, 9, 16, 17, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_linear_of_a_quantised_weight_equals_float64_over_its_values(rows, dtype, kind):
    """Within two half steps of its type of the result, and one of what was added up: weights are
    rounded to that type for more rows than FEW_ROWS, sums and the bias for fewer."""
    weight, x = randn(48, 96, seed=1, dtype=dtype), randn(rows, 96, seed=2, dtype=dtype)
    bias, packed = randn(48, seed=3, dtype=dtype), pack(weight, kind)
    if kind == "int8":
        values = packed.data.double() * packed.scales.double()[:, None]
        assert (values - weight.double()).abs().max() <= weight.abs().max() / 127
    else:
        low = kernels.four_bit(weight)
        scales, zeros = (n.to(dtype).double()[..., None] for n in (low.scales, low.zeros))
        values = ((low.values.double().view(48, 3, 32) - 8) * scales + zeros).flatten(1)
    exact = x.double() @ values.T + bias.double()
    found = linear(x, packed, bias)
    sizes = x.double().abs() @ values.abs().T + bias.double().abs()
    assert found.dtype == dtype and found.shape == (rows, 48)
    allowed = HALF_STEP[dtype] * (2 * exact.abs() + sizes) + 2e-5
    assert ((found.double() - exact).abs() <= allowed).all()


@low_bit
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_few_rows_and_many_see_the_same_quantised_weight(kind):
    """Each row by its own kernel, and all by oneDNN's: only the order of a sum differs."""
    weight, x = randn(48, 96, seed=1), randn(40, 96, seed=2)
    packed = pack(weight, kind)
    alone = torch.cat([linear(row[None], packed) for row in x])
    assert torch.allclose(alone, linear(x, packed), atol=1e-4)
    assert torch.allclose(linear(x[::10], packed), alone[::10], atol=1e-4)
    sliced = randn(4, 192, seed=2)[:, 50:146]
    assert torch.allclose(linear(sliced, packed), linear(sliced.contiguous(), packed))


def test_linear_takes_weights_and_rows_that_are_slices_of_larger_tensors():
    weight, x = randn(80, 96)[::2, 48:], randn(6, 96, seed=1)[::2, :48]
    assert torch.allclose(linear(x, pack(weight)), x @ weight.T, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e3])
def test_rms_norm_equals_float64_rounded_to_its_type(dtype, size):
    x, weight = (randn(7, 64, seed=1) * size).to(dtype), 1 + randn(64, seed=2, dtype=dtype) / 4
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    found = rms_norm(x, weight, 1e-6)
    assert found.dtype == dtype and rounded_once(found, exact * weight.double())


def test_rms_norm_of_heads_is_over_the_last_dimension():
    x, weight = randn(5, 3, 8), randn(8, seed=1)
    found = rms_norm(x, weight, 1e-6)
    assert torch.allclose(found[2, 1], rms_norm(x[2, 1:2], weight, 1e-6)[0])


def turned(x, positions, frequencies, factor=1.0):
    """Complex multiplication in float64: pair (x[i], x[i + D/2]) times e^(i angle)."""
    half = x.shape[-1] // 2
    angles = positions.double()[:, None, None] * frequencies.double()
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
    pairs = pairs * torch.polar(torch.full_like(angles, factor), angles)
    return torch.cat((pairs.real, pairs.imag), -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rope_equals_complex_multiplication_at_near_and_far_positions(dtype):
    """Frequencies are powers of two, so float32 angles are exact up to 2^24 as promised."""
    positions = torch.tensor([0, 1, 2, 77, 4095, 131_071, 2**20 + 1, 2**24])
    frequencies = torch.tensor([1.0, 0.5, 0.125, 2.0**-10])
    x = randn(8, 3, 8, dtype=dtype)
    found = rope(x, rope_tables(positions, frequencies, 1.25))
    assert found.dtype == dtype and found.shape == x.shape
    assert rounded_once(found, turned(x, positions, frequencies, 1.25))


def test_rope_of_a_real_models_frequencies_is_within_float32_of_the_exact_angles():
    """theta 1e4, positions up to 128 Ki: an angle's error is at most its own float32 rounding,
    2^-24 relative for the frequency and again for the product."""
    frequencies = 1e4 ** -(torch.arange(32).double() / 32)
    positions = torch.tensor([1, 1000, 8191, 131_071])
    x = randn(4, 2, 64)
    found = rope(x, rope_tables(positions, frequencies.float(), 1.0)).double()
    error = (found - turned(x, positions, frequencies)).abs().amax((1, 2))
    assert (error <= positions * 2.0**-23 * float(x.abs().max()) * 1.5 + 1e-6).all()


def test_rope_keeps_lengths_and_depends_on_the_distance_of_positions_only():
    frequencies = torch.tensor([1.0, 0.3, 0.01, 0.002])
    q, k = randn(1, 1, 8, seed=1), randn(1, 1, 8, seed=2)

    def at(x, position):
        return rope(x, rope_tables(torch.tensor([position]), frequencies, 1.0))

    assert torch.allclose(at(q, 50).norm(), q.norm(), atol=1e-5)
    scores = [float((at(q, 7 + shift) * at(k, 2 + shift)).sum()) for shift in (0, 1, 100, 1000)]
    assert scores == pytest.approx([scores[0]] * 4, abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wide", [False, True])
def test_the_gated_norm_equals_float64_rounded_once(wide, dtype):
    x, gate = (randn(5, 9, 3, 20, seed=seed, dtype=dtype)[:, 2] * 4 for seed in (1, 2))
    weight = randn(20, seed=3, dtype=torch.float32 if wide else dtype)
    before = x.clone()
    found = gated_norm(x, gate, weight, 1e-5)
    y, z = x.double(), gate.double()
    exact = y * (y.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    assert found.dtype == dtype and torch.equal(x, before)
    assert rounded_once(found, exact * z * z.sigmoid(), 5e-6)


@pytest.mark.parametrize("norm", [rms_norm, lambda x, w, eps: kernels.add_norm(x, x, w, eps)[1]])
def test_norms_of_bfloat16_rows_take_a_weight_in_float32(norm):
    x, weight = randn(5, 64, dtype=torch.bfloat16), 1 + randn(64, seed=1) / 1000
    y = x.double()
    exact = y * (y.square().mean(-1, keepdim=True) + 1e-9).rsqrt() * weight.double()
    assert rounded_once(norm(x, weight, 1e-9), exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_silu_mul_equals_float64_within_two_roundings(dtype):
    x = randn(9, 24, dtype=dtype) * 4
    gate, up = x.double().chunk(2, -1)
    exact = gate / (1 + (-gate).exp()) * up
    found = silu_mul(x)
    assert found.dtype == dtype and found.shape == (9, 12)
    assert ((found.double() - exact).abs() <= exact.abs() * 3 * HALF_STEP[dtype] + 1e-6).all()


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 64, 257])
def test_allow_equals_a_loop_over_bits(vocab):
    draw = torch.Generator().manual_seed(vocab)
    words = torch.randint(-(2**31), 2**31, (-(-vocab // 32),), generator=draw).int()
    logits = randn(vocab, seed=vocab)
    expected = [
        x if int(words[i // 32]) >> i % 32 & 1 else -math.inf for i, x in enumerate(logits.tolist())
    ]
    before = logits.clone()
    assert allowed_alone(logits, words)[0].tolist() == expected
    assert torch.equal(logits, before)


STEPS = [  # rows and length of each request of a step
    [(1, 1)],
    [(7, 7), (1, 9), (1, 30)],
    [(1, 16), (1, 17), (1, 15), (1, 200), (5, 40)],
    [(1, 8), (3, 24), (16, 16), (2, 19), (1, 3)],
    [(1, 33)] * 5,
]


@pytest.mark.parametrize("heads, shared, dtype, causal", [
    (4, 2, torch.float32, True),
    (2, 2, torch.float32, False),
    (6, 1, torch.float32, True),
    (4, 2, torch.bfloat16, True),
    (4, 1, torch.bfloat16, False),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("spans", STEPS, ids=str)
@pytest.mark.parametrize("ordered", [True, False])
def test_attention_over_blocks_equals_loops_in_float64(
    spans, heads, shared, dtype, causal, ordered
):
    """In pools where every place that no token of the step is in holds NaN."""
    size, draw = 8, torch.Generator().manual_seed(len(spans))
    needs = [-(-length // size) for _, length in spans]
    count = sum(needs)
    order = torch.arange(count) if ordered else torch.randperm(count, generator=draw)
    tables = [table.tolist() for table in (order + 1).split(needs)]
    keys, values = (torch.full((count + 2, size, shared, 4), math.nan, dtype=dtype) for _ in "kv")
    found = viewed(spans, tables, size, dtype)
    whole = [
        [randn(length, shared, 4, seed=10 * i + j, dtype=dtype) for j in (1, 2)]
        for i, (_, length) in enumerate(spans)
    ]
    for (n, length), table, (k, v) in zip(spans, tables, whole):
        before = torch.tensor(places_of(table, length - n, size), dtype=torch.int64)
        store_kv(k[: length - n], v[: length - n], keys, values, View(before, len(before)))
    new = [
        torch.cat([pair[j][len(pair[j]) - n :] for pair, (n, _) in zip(whole, spans)])
        for j in (0, 1)
    ]
    store_kv(*new, keys, values, found)
    q = randn(sum(n for n, _ in spans), heads, 4, seed=99, dtype=dtype)
    out = attention(q, keys, values, found, causal)
    assert out.dtype == dtype and out.shape == q.shape
    row = 0
    for (n, length), (k, v) in zip(spans, whole):
        exact = loops(q[row : row + n], k, v, length - n, causal)
        error = (out[row : row + n].double() - exact).abs().max()
        assert error <= (1e-5 if dtype == torch.float32 else 0.03)
        row += n


def stored(spans, size, shared, dim, values, dtype=torch.float32, window=0):
    """Tables of requests [(n, length)], pools in which everything but what a row of them sees is
    NaN, and what each request stored. Blocks before the window are block 0; values shorter than
    keys are the first part of them. Index keys, of size 4, have a few values only."""
    needs = [-(-length // size) for _, length in spans]
    order = torch.randperm(sum(needs), generator=torch.Generator().manual_seed(len(spans))) + 1
    tables = [table.tolist() for table in order.split(needs)]
    shapes = [(shared, dim), (shared, values), (4,)]
    pools = [torch.full((len(order) + 2, size, *x), math.nan, dtype=dtype) for x in shapes]
    if values < dim:
        pools[1] = pools[0][..., :values]
    whole = []
    for i, ((n, length), table) in enumerate(zip(spans, tables)):
        found = [randn(length, *x, seed=10 * i + j, dtype=dtype) for j, x in enumerate(shapes)]
        if values < dim:
            found[1] = found[0][..., :values]
        found[2] = found[2].round()
        first = max(length - n - window + 1, 0) if window else 0
        places = places_of(table, length, size)[first:]
        for pool, content in zip(pools, found):
            pool.flatten(0, 1)[places] = content[first:]
        table[: first // size] = [0] * (first // size)
        whole.append(found)
    return tables, pools, whole


def assert_rows(out, spans, whole, wanted, bound):
    """Each request's rows of out are wanted(rows, request's number, n, start, what it stored)."""
    row = 0
    for i, (n, length) in enumerate(spans):
        exact = wanted(slice(row, row + n), length - n, *whole[i])
        error = (out[row : row + n].double() - exact).abs().max()
        assert error <= bound, f"{error:.2g} off, rows {row} to {row + n}"
        row += n
    assert out[row:].eq(0).all()


@pytest.mark.parametrize("window", [1, 7, 8, 9, 24, 500])
@pytest.mark.parametrize("spans", STEPS, ids=str)
def test_attention_in_a_window_equals_loops_in_float64(spans, window):
    tables, (keys, values, _), whole = stored(spans, 8, 2, 4, 4, window=window)
    found = viewed(spans, tables, window=window, padded=2)
    q = randn(len(found.slots), 4, 4, seed=99)
    q[found.rows :] = math.nan
    out = attention(q, keys, values, found, window=window, scale=0.7)
    assert_rows(out, spans, whole, lambda rows, start, k, v, _: (
        loops(q[rows], k, v, start, True, window, 0.7)
    ), 1e-5)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads, dim, values", [(3, 24, 16), (20, 16, 12), (1, 576, 512)])
@pytest.mark.parametrize("spans", STEPS[:4], ids=str)
def test_attention_over_latents_equals_loops_in_float64(spans, heads, dim, values, dtype):
    """Values are the first part of keys, in the same memory; the products' scale is given."""
    tables, (keys, latents, _), whole = stored(spans, 8, 1, dim, values, dtype)
    assert latents.data_ptr() == keys.data_ptr()
    found = viewed(spans, tables, dtype=dtype, padded=1)
    q = randn(len(found.slots), heads, dim, seed=99, dtype=dtype)
    out = attention(q, keys, latents, found, scale=0.2)
    assert out.shape == (len(q), heads, values) and out.dtype == dtype
    assert_rows(out, spans, whole, lambda rows, start, k, v, _: (
        loops(q[rows], k, v, start, scale=0.2)
    ), 1e-5 if dtype == torch.float32 else 0.03)  # fmt: skip


def chosen_by_hand(q, keys, weights, start, top):
    """Each row's positions: the highest scores, the older of equal ones. All numbers are small
    integers, so that sums are exact whatever their order."""
    found = []
    for i, row in enumerate(q.double()):
        products = (keys[: start + i + 1].double() @ row.T).clamp(min=0)  # (N, H)
        scores = (products @ weights[i].double()).tolist()
        found.append(sorted(range(len(scores)), key=lambda p: (-scores[p], p))[:top])
    return found


@pytest.mark.parametrize("top", [1, 2, 7, 16, 40, 1000])
@pytest.mark.parametrize("spans", STEPS, ids=str)
def test_sparse_attention_equals_loops_over_what_is_chosen_by_hand(spans, top, monkeypatch):
    """Scores are small integers, so many are equal; relu makes many of them 0."""
    monkeypatch.setattr(kernels, "CHOOSING", 3)
    tables, (keys, values, index), whole = stored(spans, 8, 1, 24, 16)
    found = viewed(spans, tables, padded=2)
    q, index_q = randn(len(found.slots), 3, 24, seed=99), randn(len(found.slots), 2, 4, seed=98)
    index_q, weights = index_q.round(), randn(len(q), 2, seed=97).round()
    out = sparse_attention(q, keys, values, found, index_q, index, weights, top, 0.3)
    assert_rows(out, spans, whole, lambda rows, start, k, v, index: (
        loops(q[rows], k, v, start, scale=0.3, chosen=chosen_by_hand(
            index_q[rows], index, weights[rows], start, top
        ))
    ), 1e-5)  # fmt: skip


def test_sparse_attention_that_chooses_all_is_attention():
    spans = STEPS[2]
    tables, (keys, values, index), _ = stored(spans, 8, 1, 24, 16)
    found = viewed(spans, tables)
    q, index_q = randn(len(found.slots), 3, 24), randn(len(found.slots), 2, 4)
    weights = randn(len(q), 2)
    out = sparse_attention(q, keys, values, found, index_q, index, weights, 208, 0.3)
    assert torch.equal(out, attention(q, keys, values, found, scale=0.3))


def test_sparse_attention_reads_no_key_that_is_not_chosen():
    """All but the chosen are NaN: not even weighted with 0."""
    spans, top = [(1, 20), (3, 30), (1, 25)], 4
    tables, (keys, values, index), whole = stored(spans, 8, 1, 24, 16)
    found, rows = viewed(spans, tables), 5
    index_q, weights = randn(rows, 2, 4, seed=98).round(), randn(rows, 2, seed=97).round()
    q, used, row = randn(rows, 3, 24), set(), 0
    before = sparse_attention(q, keys, values, found, index_q, index, weights, top)
    for (n, length), table, (_, _, k) in zip(spans, tables, whole):
        mine = slice(row, row + n)
        chosen = chosen_by_hand(index_q[mine], k, weights[mine], length - n, top)
        used |= {places_of(table, length, 8)[p] for one in chosen for p in one}
        row += n
    keys.flatten(0, 1)[sorted(set(range(len(keys) * 8)) - used)] = math.nan
    assert torch.equal(
        sparse_attention(q, keys, values, found, index_q, index, weights, top), before
    )


def test_attention_takes_queries_that_are_a_slice_of_a_larger_tensor():
    """As a model has them: q, k and v of a row lie in one tensor, next to each other."""
    heads = randn(3, 8, 4)
    keys, values = randn(6, 8, 2, 4, seed=1), randn(6, 8, 2, 4, seed=2)
    for spans in ([(1, 9), (1, 12), (1, 3)], [(3, 12)], [(1, 9), (2, 11)]):
        found = viewed(spans, [[1, 4], [2, 5], [3]][: len(spans)])
        expected = attention(heads[:, :4].contiguous(), keys, values, found)
        assert torch.equal(attention(heads[:, :4], keys, values, found), expected)


@pytest.mark.parametrize("before", [0, 5, 300])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads, shared", [(6, 2), (4, 4)])
def test_long_bfloat16_chunks_are_as_exact_as_their_values(before, causal, heads, shared):
    """Scores up to 60: rounded to bfloat16 they would be off by 0.1, and weights by a tenth."""
    n = 200
    q, k, v = (
        randn(rows, count, 16, seed=i, dtype=torch.bfloat16) * scale
        for i, (rows, count, scale) in enumerate(
            [(n, heads, 4), (n + before, shared, 4), (n + before, shared, 1)]
        )
    )
    found = kernels._attend_tiles(q, k, v, causal)
    exact = loops(q, k, v, before, causal)
    assert (found.double() - exact).abs().max() <= 2.0**-8 * v.abs().max()


@pytest.mark.parametrize("dim, values, shared", [(16, 16, 2), (24, 16, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 1, 100, 300])
def test_long_chunks_see_their_windows_and_latents(window, dtype, dim, values, shared):
    """Tiles of 128 rows: each has keys of its own."""
    spans = [(200, 350)]
    tables, (keys, held, _), whole = stored(spans, 8, shared, dim, values, dtype, window)
    q = randn(200, 6, dim, seed=99, dtype=dtype)
    found = viewed(spans, tables, dtype=dtype, window=window)
    out = attention(q, keys, held, found, window=window, scale=0.5)
    bound = 1e-5 if dtype == torch.float32 else 2.0**-8 * whole[0][1].abs().max()
    assert_rows(out, spans, whole, lambda rows, start, k, v, _: (
        loops(q[rows], k, v, start, True, window, 0.5)
    ), bound)  # fmt: skip


@pytest.mark.parametrize(
    "table", [list(range(2, 32)), list(range(31, 1, -1))], ids=["row", "apart"]
)
def test_long_bfloat16_chunks_read_blocks_wherever_they_lie(table):
    before, n, size = 37, 150, 8
    k, v = (randn(before + n, 2, 16, seed=i, dtype=torch.bfloat16) for i in (1, 2))
    q = randn(n, 6, 16, dtype=torch.bfloat16)
    places = places_of(table, before + n, size)
    pools = [torch.full((33, size, 2, 16), math.nan, dtype=torch.bfloat16) for _ in range(2)]
    for pool, content in zip(pools, (k, v)):
        pool.flatten(0, 1)[places] = content
    found = attention(q, *pools, viewed([(n, before + n)], [table], size, torch.bfloat16))
    error = (found.double() - loops(q, k, v, before)).abs().max()
    assert error <= 2.0**-8 * v.abs().max()


# ---------------------------------------------------------------- by property


@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize("seed", range(6))
def test_every_row_is_in_one_part_and_every_part_reads_its_own_places_only(seed, window):
    """The view's own promises, for random requests with tables of random blocks."""
    draw = torch.Generator().manual_seed(seed)

    def number(low, high):
        return int(torch.randint(low, high + 1, (), generator=draw))

    size = 2 ** number(3, 5)
    spans = [(n, n + number(0, 60 * size // 2)) for n in (number(1, 3) for _ in range(25))]
    blocks = torch.randperm(25 * 100, generator=draw) + 1
    tables = [blocks[100 * i : 100 * i + 100].tolist() for i in range(25)]
    found = viewed(spans, tables, size, window=window)
    owner = [i for i, (n, _) in enumerate(spans) for _ in range(n)]
    assert sorted(sum((flat(part.rows) for part in found.parts), [])) == list(range(len(owner)))
    for part in found.parts:
        rows, places = flat(part.rows), flat(part.places)
        if part.mask is None:
            span, table = spans[owner[rows[0]]], tables[owner[rows[0]]]
            first = max(span[1] - span[0] - window + 1, 0) if window else 0
            assert len(rows) == span[0] and places == places_of(table, span[1], size)[first:]
            continue
        n = part.mask.shape[2]
        firsts = rows[::n]  # of each request
        lengths = [spans[owner[row]][1] for row in firsts]
        assert rows == [row + j for row in firsts for j in range(n)]
        assert window or lengths == sorted(lengths)
        assert all(spans[owner[row]][0] == n for row in rows)
        seen = [max(length - n - window + 1, 0) if window else 0 for length in lengths]
        skipped = [first // size * size for first in seen]
        shortest, longest = (-(-(lengths[i] - skipped[i]) // size) for i in (0, -1))
        assert len(places) == len(firsts) * longest * size
        assert window or longest <= 1.5 * shortest + 4
        for i, (row, length, first, gone) in enumerate(zip(firsts, lengths, seen, skipped)):
            mine = places_of(tables[owner[row]], length, size)
            here = places[i * longest * size :][: longest * size]
            assert here[first - gone : length - gone] == mine[first:]
            assert set(here[: first - gone] + here[length - gone :]) <= {mine[first]}
            for j in range(n):  # each row sees what is up to itself
                own = length - n + j
                hidden = part.mask[i, 0, j].eq(-math.inf).tolist()
                low = max(own - window + 1, 0) if window else 0
                assert hidden == [not low <= gone + at <= own for at in range(len(hidden))]


@pytest.mark.parametrize("seed", range(20))
def test_the_lines_of_a_layout_are_its_tables_whatever_happens_to_them(seed, monkeypatch):
    """Requests come, grow, fork, give blocks back, are preempted, end and come again; blocks in
    the middle are replaced, all between two views. What a recorded step reads is the buffer."""
    monkeypatch.setattr(kernels, "on_triton", lambda x: True)
    draw, most, width = random.Random(seed), 6, 12
    layout = Layout(64, most, width, 8, torch.device("cpu"), torch.float32)
    requests: list[list[list[int]]] = []  # each holds its table, a list that keeps its identity

    def blocks(count):
        return [draw.randint(1, 99) for _ in range(count)]

    def change(request):
        table = request[0]
        what = draw.choice(["grow", "grow", "shrink", "both", "replace", "free", "preempt", "end"])
        if what == "shrink" or what == "both":
            del table[max(1, len(table) - draw.randint(1, 4)) :]
        if what == "grow" or what == "both":
            table += blocks(min(draw.randint(1, 4), width - len(table)))
        if what == "replace":
            table[draw.randrange(len(table))] = draw.randint(1, 99)
        if what == "free":  # behind a window
            count = draw.randrange(len(table))
            table[:count] = [0] * count
        if what == "preempt":
            table.clear()
            request[0] = blocks(draw.randint(1, width))
        if what == "end":
            requests.remove(request)

    for _ in range(150):
        for request in draw.sample(requests, draw.randint(0, len(requests))):
            change(request)
        while len(requests) < most and draw.random() < 0.5:
            table = blocks(draw.randint(1, width))
            if requests and draw.random() < 0.5:
                table = draw.choice(requests)[0].copy()  # a fork
            requests.append([table])
        chosen = draw.sample(requests, draw.randint(0, len(requests)))
        tables = [request[0] for request in chosen]
        padded = draw.randint(0, most - len(chosen))
        view = layout.view(tables, [(i, 1, 0) for i in range(len(tables))], padded)
        spans = view.spans.tolist()
        assert spans[len(tables) :] == [[len(tables) + i, 1, 0, 0, 0] for i in range(padded)]
        lines = [span[4] for span in spans[: len(tables)]]
        assert len(set(lines)) == len(lines), "two tables in one line"
        for table, line in zip(tables, lines):
            assert view.tables[line, : len(table)].tolist() == table
        assert view.tables.data_ptr() == layout.tables.tensor.data_ptr()


@pytest.mark.parametrize("seed", range(5))
def test_lines_in_a_window_are_their_tables_from_the_first_block_that_is_read(seed, monkeypatch):
    """Requests grow by any number of tokens, give back what left the window, are preempted and
    come again, also where a prefix is found; what is copied does not grow with the context."""
    monkeypatch.setattr(kernels, "on_triton", lambda x: True)
    draw, window, size, most = random.Random(seed), 20, 8, 3
    layout = Layout(90, most, 100, size, torch.device("cpu"), torch.float32, window)
    copied, fill = [], layout.tables.fill
    layout.tables.fill = lambda values, start: copied.append(len(values)) or fill(values, start)
    requests = [[[], 0] for _ in range(most)]  # table, tokens
    for _ in range(200):
        spans, row = [], 0
        for request in requests:
            if request[1] > 700 or draw.random() < 0.02:
                request[1] = draw.choice([0, 16, 80])
                request[0][:] = [0] * (request[1] // size)
            n, table = draw.choice([1, 1, 1, 5, 30]), request[0]
            start, request[1] = request[1], request[1] + n
            gone = max(start - window + 1, 0) // size
            for block, there in enumerate(table[gone:], gone):
                table[block] = there or draw.randint(1, 99)
            table += [draw.randint(1, 99) for _ in range(-(-request[1] // size) - len(table))]
            table[:gone] = [0] * gone
            spans.append((row, n, start))
            row += n
        copied.clear()
        view = layout.view([table for table, _ in requests], spans)
        assert all(count <= (window + 30) // size + 2 for count in copied)
        for (table, _), (_, _, start), span in zip(requests, spans, view.spans.tolist()):
            first = max(start - window + 1, 0) // size
            assert view.tables[span[4], first : len(table)].tolist() == table[first:]


def test_products_are_left_to_pytorchs_attention_where_onednn_has_no_bfloat16(monkeypatch):
    found = []
    monkeypatch.setattr(kernels, "_attend_products", lambda *given: found.append(1) or given[0])
    q, k, v = (randn(64, heads, 8, dtype=torch.bfloat16) for heads in (4, 2, 2))
    for has in (True, False):
        monkeypatch.setattr(kernels, "multiplies_bfloat16", lambda has=has: has)
        kernels._attend_tiles(q, k, v, True)
    assert found == [1]


def test_a_table_longer_than_its_line_leaves_the_others_alone(monkeypatch):
    """Before a fork a request holds blocks for all its samples."""
    monkeypatch.setattr(kernels, "on_triton", lambda x: True)
    layout = Layout(8, 2, 16, 8, torch.device("cpu"), torch.float32)
    one, other = [5, 6], list(range(10, 40))
    for tables in ([one, other], [other, one], [one, other[:3]]):
        view = layout.view(tables, [(0, 1, 0), (1, 1, 0)])
        lines = [line for _, _, _, _, line in view.spans.tolist()]
        for table, line in zip(tables, lines):
            assert view.tables[line, : len(table)].tolist() == table[: layout.width]
    del other[3:]
    view = layout.view([other], [(0, 1, 0)])
    assert view.tables[view.spans[0, 4], :3].tolist() == [10, 11, 12]


@pytest.mark.parametrize("missing", ["triton", "gpu"])
def test_only_kernels_of_triton_on_a_gpu_are_recorded(missing, monkeypatch):
    """PyTorch's attention has no launches that are right for other lengths."""
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    monkeypatch.setattr(kernels, "triton", None if missing == "triton" else object())
    device = torch.device("cpu" if missing == "gpu" else "cuda")
    graphs = kernels.Graphs(lambda step: pytest.fail("ran"), device, (1, 2))
    graphs.record(None)
    assert graphs.recorded == {}


def test_recordings_leave_their_results_in_one_place(monkeypatch):
    """Where a GPU is but pretended to be: else logits of every size would be kept."""
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    monkeypatch.setattr(kernels, "triton", object())
    for name in ("graph_pool_handle", "Stream", "synchronize", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, lambda *given: object())
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **how: kernels.nullcontext())
    alive = []

    def run(step):
        assert sum(one() is not None for one in alive) <= 1, "more than the largest one's"
        found = torch.full((step.padded, 3), step.padded)
        alive.append(weakref.ref(found))
        return [found]

    cache = SimpleNamespace(prepare=lambda plan, size: SimpleNamespace(padded=size))
    graphs = kernels.Graphs(run, torch.device("cuda"), (1, 2, 4))
    graphs.record(cache)
    assert sorted(graphs.recorded) == [1, 2, 4]
    results = {size: result for size, (_, (result,)) in graphs.recorded.items()}
    assert [len(result) for _, result in sorted(results.items())] == [1, 2, 4]
    assert len({result.data_ptr() for result in results.values()}) == 1
    assert results[4][:, 0].tolist() == [1, 2, 4, 4]  # the last that was recorded came last


def test_what_a_place_of_another_holds_changes_no_bit_of_a_row():
    spans, tables = [(1, 9), (1, 30), (4, 12)], [[1, 7], [2, 9, 4, 8], [3, 6]]
    found = viewed(spans, tables)
    keys, values = randn(11, 8, 2, 4, seed=1), randn(11, 8, 2, 4, seed=2)
    q = randn(6, 4, 4)
    before = attention(q, keys, values, found)
    for i, (first, end) in enumerate([(0, 1), (1, 2), (2, 6)]):
        own = places_of(tables[i], spans[i][1], 8)
        for poison in (math.nan, math.inf, 1e30):
            others = [torch.full_like(x, poison) for x in (keys, values)]
            for x, source in zip(others, (keys, values)):
                x.flatten(0, 1)[own] = source.flatten(0, 1)[own]
            assert torch.equal(attention(q, *others, found)[first:end], before[first:end])


def test_attention_and_storing_write_neither_queries_nor_what_was_stored():
    q, k, v = randn(2, 4, 4), randn(2, 2, 4, seed=3), randn(2, 2, 4, seed=4)
    keys, values = randn(4, 8, 2, 4, seed=1), randn(4, 8, 2, 4, seed=2)
    found = viewed([(1, 9), (1, 3)], [[1, 3], [2]])
    kept = [x.clone() for x in (q, k, v, keys, values)]
    store_kv(k, v, keys, values, found)
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), kept))
    changed = (keys != kept[3]).any(-1).any(-1).flatten().nonzero()[:, 0].tolist()
    assert changed == sorted(found.slots.tolist()) == [18, 24]
    stored = keys.clone(), values.clone()
    attention(q, keys, values, found)
    assert torch.equal(keys, stored[0]) and torch.equal(values, stored[1])
    assert torch.equal(q, kept[0])


def operations(dtype):
    """Every operation as a function of rows (T, 32) alone, and of their positions."""
    weight, norm = pack(randn(32, 32, seed=1, dtype=dtype)), randn(32, seed=2, dtype=dtype)
    bias, frequencies = randn(32, seed=3, dtype=dtype), torch.tensor([1.0, 0.1, 0.01, 0.001])
    return {
        "linear": lambda x, positions: linear(x, weight, bias),
        "rms_norm": lambda x, positions: rms_norm(x, norm, 1e-6),
        "silu_mul": lambda x, positions: silu_mul(x),
        "rope": lambda x, positions: rope(
            x.view(-1, 4, 8), rope_tables(positions, frequencies, 1.0)
        ).flatten(1),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["linear", "rms_norm", "silu_mul", "rope"])
def test_a_rows_result_depends_on_that_row_alone(name, dtype):
    """Bit for bit when other rows change; up to rounding when they are gone or permuted."""
    run = operations(dtype)[name]
    x, positions = randn(20, 32, dtype=dtype), torch.arange(20) * 37
    whole = run(x, positions)
    other, elsewhere = x.clone(), positions.clone()
    other[:7], elsewhere[:7] = 1e6, 999
    assert torch.equal(run(other, elsewhere)[7:], whole[7:])
    step = 4 * HALF_STEP[dtype]
    alone = torch.cat([run(x[i : i + 1], positions[i : i + 1]) for i in range(20)])
    assert torch.allclose(alone.float(), whole.float(), rtol=step, atol=1e-5)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(1))
    permuted = run(x[order], positions[order])
    assert torch.allclose(permuted.float(), whole[order].float(), rtol=step, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_packed_weight_is_never_written_after_it_is_made(dtype):
    weight, bias = randn(24, 16, seed=1, dtype=dtype), randn(24, seed=2, dtype=dtype)
    packed, kept = pack(weight), weight.clone()
    x = randn(3, 16, dtype=dtype)
    first, data = linear(x, packed), packed.data
    for rows in (1, 3, 17):
        linear(randn(rows, 16, dtype=dtype), packed, bias)
    assert torch.equal(linear(x, packed), first)
    assert packed.data is data and torch.equal(weight, kept)
    with pytest.raises(dataclasses.FrozenInstanceError):
        packed.data = weight


@pytest.mark.parametrize("name", ["linear", "rms_norm", "silu_mul", "rope"])
def test_no_operation_writes_its_input(name):
    x = randn(5, 32)
    before = x.clone()
    operations(torch.float32)[name](x, torch.arange(5))
    assert torch.equal(x, before)


MIXES = {  # rows of each request, tables, rows of padding
    "a decode": ([1], [[2, 5]], 0),
    "decodes": ([1, 1, 1], [[3, 9], [0, 4], [3, 6]], 2),
    "a prompt": ([9], [[0, 1]], 0),
    "a chunk": ([130], [[7, 8]], 0),
    "mixed": ([1, 70, 2, 1, 5, 2], [[3, 9], [0, 1], [2, 10], [3, 4], [5, 6], [7, 8]], 3),
}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("inputs", [1, 2, 4, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_conv_equals_convolve_for_each_request(mix, inputs, dtype):
    """Also of columns of a wider tensor; what is not of a request is NaN, or stays as it is."""
    counts, tables, padded = MIXES[mix]
    view, rows = stated(counts, tables, padded)
    x = torch.full((sum(counts) + padded, 9), math.nan, dtype=dtype)[:, 2:7]
    x[: sum(counts)] = randn(sum(counts), 5, seed=1, dtype=dtype) * 2
    weight, pool = randn(5, inputs, dtype=dtype), torch.full((12, inputs - 1, 5), math.nan)
    pool = pool.to(dtype)
    pool[0] = 0
    for read in {read for read, _ in tables} - {0}:
        pool[read] = randn(inputs - 1, 5, seed=read, dtype=dtype)
    before = pool.clone()
    found = conv(x, weight, pool, view)
    assert found.dtype == dtype and found.shape == x.shape and found[sum(counts) :].eq(0).all()
    for request, (read, write) in zip(rows, tables):
        wanted, after = convolve(x[request], weight, before[read])
        assert rounded_once(found[request], wanted.double(), 2e-6 + 2 * HALF_STEP[dtype])
        assert torch.equal(pool[write], after)
        before[write] = after
    assert torch.equal(pool.nan_to_num(7), before.nan_to_num(7)), "another state was written"


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("shape", [(1, 1, 8, 10), (2, 4, 12, 6), (1, 3, 20, 8)])
@pytest.mark.parametrize("decay", [1e-3, 1.0, 1e3])
def test_recur_equals_loops_in_float64(mix, shape, decay):
    """Also of columns of a wider tensor; what is not of a request is NaN, or stays as it is."""
    recur_case(mix, shape, decay, torch.float32, 3e-6)


@pytest.mark.parametrize("mix", MIXES)
def test_recur_of_bfloat16_is_that_of_float32_rounded_once(mix):
    recur_case(mix, (2, 4, 16, 10), 0.1, torch.bfloat16, 3e-6)


def recur_case(mix, shape, decay, dtype, extra):
    (counts, tables, padded), (_, heads, dk, dv) = MIXES[mix], shape
    view, rows = stated(counts, tables, padded)
    given, count = [], sum(counts)
    for x in delta_rows(count, *shape, decay, dtype=dtype):
        wide = torch.full((count + padded, 2, *x.shape[1:]), math.nan, dtype=x.dtype)
        wide[:count, 1] = x
        given.append(wide[:, 1])
    pool = torch.full((12, heads, dk, dv), math.nan)
    pool[0] = 0
    for read in {read for read, _ in tables} - {0}:
        pool[read] = randn(heads, dk, dv, seed=read)
    before = pool.clone()
    found = recur(*given, pool, view)
    assert found.dtype == dtype and found.shape == (count + padded, heads, dv)
    assert found[count:].eq(0).all(), "padded rows are not 0"
    for request, (read, write) in zip(rows, tables):
        wanted, after = delta_loops(*(x[request] for x in given), before[read])
        assert rounded_once(found[request], wanted, extra)
        assert rounded_once(pool[write], after, 2 * extra)
        before[write] = pool[write]
    assert torch.equal(pool.nan_to_num(7), before.nan_to_num(7)), "another state was written"


@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 128, 129, 300])
@pytest.mark.parametrize("decay", [0.0, 1e-3, 1.0, 1e4])
def test_rows_in_chunks_equal_the_delta_rule_a_token_at_a_time(n, decay):
    """Decays of 1 and of next to nothing; `delta_rule` itself against float64."""
    given = delta_rows(n, 1, 2, 12, 10, decay, seed=n)
    pool = torch.cat((torch.zeros(1, 2, 12, 10), randn(1, 2, 12, 10), torch.zeros(1, 2, 12, 10)))
    wanted, after = delta_loops(*given, pool[1])
    for out, state in (
        (recur(*given, pool, stated([n], [[1, 2]])[0]), pool[2]),
        delta_rule(*given, pool[1]),
    ):
        assert rounded_once(out, wanted, 1e-5) and rounded_once(state, after, 1e-5)


def test_a_small_decay_counts_in_a_chunk_also_after_a_large_one():
    """e^-1000000 and then nine times e^-0.125: in float32 sums of these, 0.125 is two steps."""
    q, k, v, _, beta = delta_rows(10, 1, 1, 8, 8, 1.0)
    g = torch.full((10, 1), -0.125 / 3)
    g[0] = -1e6
    pool = torch.zeros(2, 1, 8, 8)
    wanted, after = delta_loops(q, k, v, g, beta, pool[0])
    found = recur(q, k, v, g, beta, pool, stated([10], [[0, 1]])[0])
    assert rounded_once(found, wanted) and rounded_once(pool[1], after)


@pytest.mark.parametrize("cuts", [[1] * 20, [7, 13], [19, 1]])
def test_a_prompt_in_pieces_leaves_the_state_of_the_whole(cuts):
    """A step reads what the one before wrote, of two states in turn."""
    given, x, weight = delta_rows(20, 1, 2, 8, 6, 0.3), randn(20, 5), randn(5, 4)
    states, inputs = torch.zeros(3, 2, 8, 6), torch.zeros(3, 3, 5)
    whole = stated([20], [[0, 1]])[0]
    wanted = recur(*given, states, whole), conv(x, weight, inputs, whole), states[1], inputs[1]
    states, inputs, found, row = states.clone(), inputs.clone(), [], 0
    tables = [[0, 2]] + [[2, 1], [1, 2]] * 10
    for n, table in zip(cuts, tables):
        view, rows = stated([n], [table])[0], slice(row, row + n)
        found.append(
            (recur(*(y[rows] for y in given), states, view), conv(x[rows], weight, inputs, view))
        )
        row += n
    out, mixed = (torch.cat(parts) for parts in zip(*found))
    for a, b in zip((out, mixed, states[table[1]], inputs[table[1]]), wanted):
        assert torch.allclose(a, b, atol=2e-6)
    assert not states[0].any() and not inputs[0].any()


# ---------------------------------------------------------------- ahead of time

ROOT = Path(__file__).parent.parent
ALL = {name: kernel for name, kernel in vars(kernels).items() if name.endswith("_kernel")}
TYPES = {kernels.ELEMENTS[dtype]: dtype for dtype in kernels.ELEMENTS}
TYPES |= {"i32": torch.int32, "i64": torch.int64}


@pytest.mark.parametrize("arch", kernels.ARCHS)
def test_every_kernel_is_compiled_ahead_of_time_in_every_type(arch):
    found = {(id(launch.kernel), launch.dtype) for launch in kernels.launches(arch)}
    for name, kernel in ALL.items():
        every = name not in ("draw_kernel", "allow_kernel")
        dtypes = kernels.ELEMENTS if every else [torch.float32]
        for dtype in dtypes:
            assert (id(kernel), dtype) in found, f"no launch of {name} in {dtype} is compiled"


def test_attention_is_compiled_for_every_head_block_number_of_rows_and_split():
    configs = [x.config for x in kernels.launches(90) if x.kernel is kernels.attention_kernel]
    wanted = {
        "D": {64, 96, 128, 256, 576}, "S": {1, 8, 16, 64, 256}, "CAUSAL": {True, False},
        "WINDOW": {0, 512, 4096}, "VALUES": {64, 96, 128, 256, 512},
    }  # fmt: skip
    for key, values in wanted.items():
        assert {config[key] for config in configs} == values
    assert {config["SPLITS"] for config in configs} == {1, 2, 4, 8, 16}
    assert {1, 4, 5, 7, 8} <= {config["H"] // config["G"] for config in configs}
    tiles = {(config["D"], config["ONE_ROW"], config["BLOCK_M"]) for config in configs}
    assert {(128, True, 16), (128, False, 64), (128, False, 128), (256, False, 64)} <= tiles
    assert {(576, True, 16), (576, False, 32)} <= tiles


def test_the_shapes_are_those_of_the_models():
    models = {m["name"]: m["config"] for m in map(json.loads, lines_of(ROOT / "models.json"))}
    models["SmolLM2-135M"] = models["SmolLM2-135M-Instruct"]
    for name, shape in {**kernels.SHAPES, **kernels.OTHER_SHAPES}.items():
        if name in models:
            c = models[name]
            assert (shape.H, shape.G) == (c["num_attention_heads"], c["num_key_value_heads"])
            assert shape.D == c.get("head_dim", c["hidden_size"] // shape.H), name
            assert shape.E == c["hidden_size"]
            assert shape.F == c.get("moe_intermediate_size", c["intermediate_size"])
            assert (shape.X, shape.K) == (c.get("num_experts", 0), c.get("num_experts_per_tok", 0))
    assert set(kernels.SHAPES) <= set(models)


def lines_of(path):
    """models.json without its brackets and commas."""
    return [line.rstrip(",") for line in path.read_text().splitlines() if line.startswith("{")]


class Recorder:
    """In a kernel's place: notes what launches give it."""

    def __init__(self, kernel):
        self.kernel, self.seen = kernel, []

    def __getitem__(self, grid):
        return lambda *given, **constants: self.seen.append((given, constants))


def kind(value):
    """A launch's argument as ahead-of-time compilation names it."""
    if value is None:
        return "constexpr"
    if isinstance(value, torch.Tensor):
        return "*" + next(name for name, dtype in TYPES.items() if dtype == value.dtype)
    return {int: "i32", float: "fp32"}[type(value)]


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def run_linear_layer(s, rows, most):
    """What linear attention launches, and what is around it, on tensors without contents."""
    spans = empty(rows // most, 4, dtype=torch.int32)
    view, keys = kernels.StateView(rows, most, [], spans), s.HK * s.DK
    x = kernels.conv(
        empty(rows, 2 * keys + s.H * s.DV + 64)[:, :-64], empty(2 * keys + s.H * s.DV, s.K),
        empty(9, s.K - 1, 2 * keys + s.H * s.DV), view,
    )  # fmt: skip
    q, k, v = x.split((keys, keys, s.H * s.DV), 1)
    g, pool = empty(rows, s.H, dtype=torch.float32), empty(9, s.H, s.DK, s.DV, dtype=torch.float32)
    q, k, v = (y.unflatten(1, (-1, dim)) for y, dim in ((q, s.DK), (k, s.DK), (v, s.DV)))
    out = kernels.recur(q, k, v, g, g, pool, view)
    kernels.gated_norm(out, v, empty(s.DV), 1e-6)
    kernels.gated_norm(out, v, empty(s.DV, dtype=torch.float32), 1e-6)
    kernels.rope(empty(rows, s.heads, s.D), empty(2, rows, 1, s.R, dtype=torch.float32))
    kernels.rms_norm(empty(rows, s.heads, s.D), empty(s.heads, s.D, dtype=torch.float32), 1e-6)


def run_operations(s, rows, most):
    """What a step launches, on tensors without contents."""
    requests = rows // most
    spans, tables = empty(requests, 5, dtype=torch.int32), empty(requests, 64, dtype=torch.int32)
    view = View(empty(rows, dtype=torch.int64), rows, most, [], spans, tables)
    x, pool = empty(rows, s.E), empty(9, 16, s.G, s.D)
    kernels.rms_norm(x, empty(s.E), 1e-6)
    kernels.add_norm(x, x, empty(s.E), 1e-6)
    heads = empty(rows, s.H + 2 * s.G, s.D)
    kernels.rms_norm(heads[:, : s.H + s.G], empty(s.H + s.G, s.D), 1e-6)
    kernels.rope(heads[:, : s.H + s.G], empty(2, rows, 1, s.D, dtype=torch.float32))
    kernels.store_kv(heads[:, s.H : s.H + s.G], heads[:, s.H + s.G :], pool, pool, view)
    kernels.attention(heads[:, : s.H], pool, pool, view)
    kernels.silu_mul(empty(rows, 2 * s.F))
    kernels.gelu_mul(empty(rows, 2 * s.F))
    if s.X:
        weights = empty(s.X, 2 * s.F, s.E), empty(s.X, s.E, s.F)
        chosen = empty(rows, s.K, dtype=torch.int64)
        kernels.experts(x, chosen, empty(rows, s.K), *weights)
    scaled, columns = empty(rows, 1000, dtype=torch.float32), empty(rows, 4, dtype=torch.float32)
    keys, ids = empty(rows, 1, 2, dtype=torch.int32), empty(rows, 1, dtype=torch.int64)
    kernels.draw(scaled, columns, keys, ids, ids)


def run_kinds(s, rows, most):
    """The same of layers with a window, or with latents of which an index chooses."""

    def empty(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    spans = empty(rows // most, 5, dtype=torch.int32)
    tables = empty(len(spans), 256, dtype=torch.int32)
    view = View(empty(rows, dtype=torch.int64), rows, most, [], spans, tables)
    q, k, pool = empty(rows, s.H, s.D), empty(rows, s.G, s.D), empty(9, 16, s.G, s.D)
    if s.window:
        kernels.store_kv(k, k, pool, pool, view)
        kernels.attention(q, pool, pool, view, window=s.window)
        return
    heads, dim = s.index
    index = empty(rows, heads, dim), empty(9, 16, dim), empty(rows, heads, dtype=torch.float32)
    kernels.store_kv(k, None, pool, None, view)
    kernels.store_kv(index[0][:, :1], None, index[1], None, view)
    kernels.attention(q, pool, pool[..., : s.values], view)
    kernels.sparse_attention(q, pool, pool[..., : s.values], view, *index, 2048, 0.1)


@pytest.mark.parametrize("name", [*kernels.SHAPES, *kernels.KINDS, *kernels.HYBRIDS])
@pytest.mark.parametrize("rows", [1, 8, 64, 512])
def test_what_a_step_launches_is_what_is_compiled(name, rows, monkeypatch):
    """Constants, options and the arguments' types, of decodes and of a prompt."""
    pytest.importorskip("triton")
    listed = kernels.launches(90)
    monkeypatch.setattr(kernels, "on_triton", lambda x: True)
    recorders = [Recorder(kernel) for kernel in ALL.values()]
    for short, recorder in zip(ALL, recorders):
        monkeypatch.setattr(kernels, short, recorder)
    if name in kernels.SHAPES:
        run, shape, count = run_operations, kernels.SHAPES[name], 18
    elif name in kernels.KINDS:
        run, shape, count = run_kinds, kernels.KINDS[name], 4
    else:
        run, shape, count = run_linear_layer, kernels.HYBRIDS[name], 12
    run(shape, rows, 1)
    run(shape, rows, rows)
    assert sum(len(recorder.seen) for recorder in recorders) >= count
    for recorder in recorders:
        for given, constants in recorder.seen:
            types = dict(zip(recorder.kernel.arg_names, map(kind, given)))
            assert any(
                launch.kernel is recorder.kernel
                and launch.config == constants
                and all(kernels.argument(launch, name) == types[name] for name in types)
                for launch in listed
            ), f"{recorder.kernel} is launched with {constants} and {types}, and never compiled so"


def noted(monkeypatch, *names: str) -> list[list]:
    """Launches of these kernels, instead of launching: they are added to the last list."""
    monkeypatch.setattr(kernels, "on_triton", lambda x: True)
    found = []

    class Noted:
        def __getitem__(self, grid):
            return lambda *given, **constants: found[-1].append((grid, constants, kinds(given)))

    def kinds(given):
        return [x.shape if isinstance(x, torch.Tensor) else x for x in given]

    for name in names:
        monkeypatch.setattr(kernels, name, Noted())
    return found


@pytest.mark.parametrize("most", [1, 5, 40])
def test_what_a_step_launches_does_not_depend_on_lengths(most, monkeypatch):
    """Invariant 5: what was recorded with short contexts is replayed with long ones."""
    found = noted(monkeypatch, "attention_kernel", "combine_kernel", "store_kernel", "index_kernel")
    pool = torch.zeros(500, 8, 2, 16)
    for lengths in ((most, most), (most + 3, most + 200), (most + 900, most)):
        layout = Layout(2 * most, 2, 200, 8, torch.device("cpu"), torch.float32)
        tables = [list(range(1 + 200 * i, 201 + 200 * i)) for i in range(2)]
        spans = [(i * most, most, length - most) for i, length in enumerate(lengths)]
        view = layout.view(tables, spans)
        found.append([])
        k = torch.zeros(2 * most, 2, 16)
        store_kv(k, k, pool, pool, view)
        q, index = torch.zeros(2 * most, 4, 16), torch.zeros(500, 8, 4)
        attention(q, pool, pool, view)
        attention(q, pool, pool, view, window=20)
        latent, index_q = pool[:, :, :1], torch.zeros(2 * most, 2, 4)
        weights = torch.zeros(2 * most, 2)
        sparse_attention(q, latent, latent[..., :8], view, index_q, index, weights, 10)
    assert found[0] == found[1] == found[2] and len(found[0]) >= 5


@pytest.mark.parametrize("most", [1, 5, 40])
def test_what_a_linear_layer_launches_does_not_depend_on_states_or_lengths(most, monkeypatch):
    """Invariant 5, of padded steps as well."""
    found = noted(monkeypatch, "conv_kernel", "recur_kernel")
    k, g, x = torch.zeros(3 * most, 1, 8), torch.zeros(3 * most, 1), torch.zeros(3 * most, 8)
    steps = [([[0, 1]], most, 0), ([[0, 1], [5, 4], [3, 2]], most, 0), ([[7, 8]], most, 9000)]
    for tables, n, position in steps:
        layout = StateLayout(3 * most, torch.device("cpu"))
        spans = [(i * n, n, position) for i in range(len(tables))]
        view = layout.view(tables, spans, 3 * most - len(tables) * n)
        found.append([])
        conv(x, torch.zeros(8, 4), torch.zeros(9, 3, 8), view)
        recur(k, k, k, g, g, torch.zeros(9, 1, 8, 8), view)
    assert len(found[0]) == 2 and found[0] == found[2]
    assert most > 1 or found[0] == found[1], "three decodes, or one and two rows of padding"


FINE = kernels.Compiled(128, 0, 40.0, 4, "mma", 64, 0)  # a decode tile's


@pytest.mark.parametrize("arch, most, changed, words", [
    (90, 1, {}, None),
    (90, 1, {"spills": 4}, "4 bytes of registers spill"),
    (80, 1, {"shared_kib": 164.0}, "164 of 163 KiB"),
    (90, 1, {"shared_kib": 164.0}, None),
    (90, 1, {"instruction": "fma"}, "fma instead of mma"),
    (80, 64, {}, None),
    (90, 64, {}, "mma instead of wgmma"),
    (90, 64, {"instruction": "wgmma"}, None),
    (100, 64, {"instruction": "wgmma"}, "wgmma instead of tcgen05"),
    (90, 1, {"wide": 31}, "less than 16 bytes"),
    (90, 1, {"wide": 32}, None),
    (90, 1, {"narrow": 1}, "less than 16 bytes"),
    (90, 1, {"programs": 2}, "2 programs"),
    (80, 64, {"programs": 1}, None),
])  # fmt: skip
def test_a_compiled_launch_is_held_to_each_rule(arch, most, changed, words):
    """64 keys of 128 bfloat16 are 16 KiB: 8 copies of 16 bytes for each of 128 threads, of keys
    and of values, before the loop and in it."""
    shape = kernels.SHAPES["Llama-3.1-8B"]
    launch = kernels.attention_launches(shape, torch.bfloat16, most, 16, True, 1, arch)[0]
    wrong = kernels.broken(launch, arch, dataclasses.replace(FINE, **changed))
    assert len(wrong) == (words is not None)
    assert words is None or words in wrong[0]


def test_the_assemblers_log_and_the_code_are_read():
    """168 registers are 21 * 256 a warp: 12 warps fit, which is 3 programs of 4."""
    log = "16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads\nUsed 168 registers, "
    code = (
        "cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;\n"
        "cp.async.ca.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x4, %r2;\n"
        "cp.async.ca.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x8, %r2;\n"
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %r1 };\n"
    )

    class Result:
        asm = {"ptx": code}

        class metadata:
            shared, num_warps, tmem_size = 40 * 1024, 4, 0

    found = kernels.inspected(Result, log, 90)
    assert found == kernels.Compiled(168, 20, 40.0, 3, "mma", 1, 1)
    Result.metadata.shared = 80 * 1024
    assert kernels.inspected(Result, log, 90).programs == 2, "81 KiB of 228"
    Result.metadata.tmem_size = 512
    assert kernels.inspected(Result, log, 100).programs == 1


def covering(arch):
    """Launches in which, over the three architectures, every kernel, type and head size occurs:
    each kernel on each of them, and each kind of attention's tile on one."""
    turn, chosen = list(kernels.ARCHS).index(arch), {}
    for launch in kernels.launches(arch):
        c = launch.config
        if launch.kernel is kernels.attention_kernel:
            rows = 1 if c["ONE_ROW"] else 5 if c["BLOCK_M"] < 64 else 512
            key = (launch.kernel, launch.dtype, c["D"], rows, c["WINDOW"])
            place = [64, 96, 128, 256, 576].index(c["D"]) + list(kernels.ELEMENTS).index(
                launch.dtype
            )
            if (place + rows % 4) % 3 == turn:
                chosen[str(key)] = launch
        else:
            chosen.setdefault(str((launch.kernel, c.get("BLOCK_M"), c.get("CHUNK"))), launch)
    return list(chosen.values())


def compile_covering(arch, part):
    """In a process of its own: the interpreter's environment must not reach it."""
    wrong = []
    for launch in covering(arch):
        if part == part_of(launch):
            found = kernels.compiled(launch, arch)
            name = f"{launch.name} {launch.dtype}"
            wrong += [f"{name}: {what}" for what in kernels.broken(launch, arch, found)]
    sys.exit("\n".join(wrong) or None)


def part_of(launch):
    if launch.kernel is not kernels.attention_kernel:
        return "rest"
    return "plain" if launch.dtype == torch.float32 else "half"


def test_the_covering_has_every_kernel_type_and_head_size_on_every_gpu():
    count = 0
    for arch in kernels.ARCHS:
        chosen = covering(arch)
        count += len(chosen)
        assert {id(launch.kernel) for launch in chosen} == set(map(id, ALL.values()))
        assert {launch.dtype for launch in chosen} == set(kernels.ELEMENTS)
        assert {x.config["D"] for x in chosen if "OPERAND" in x.config and "D" in x.config} == {
            64, 96, 128, 256, 576
        }  # fmt: skip
    assert count <= 90


@pytest.mark.slow
@pytest.mark.parametrize("part", ["half", "plain", "rest"])
@pytest.mark.parametrize("arch", kernels.ARCHS)
def test_what_is_compiled_keeps_the_rules(arch, part, tmp_path):
    pytest.importorskip("triton")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", f"import test_kernels as t; t.compile_covering({arch}, '{part}')"],
        cwd=ROOT / "tests", env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr


# ---------------------------------------------------------------- the door


def test_rows_of_another_width_are_refused():
    for dtype in (torch.float32, torch.float64):
        with pytest.raises(RuntimeError):
            linear(randn(2, 5, dtype=dtype), pack(randn(4, 6, dtype=dtype)))


@low_bit
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_quantised_weight_refuses_rows_of_another_width(kind):
    """PyTorch's kernels read past the row."""
    for rows in (1, 40):
        with pytest.raises(RuntimeError, match="64.*32"):
            linear(randn(rows, 64), pack(randn(16, 32), kind))


@low_bit
@pytest.mark.parametrize(
    ("shape", "kind", "dtype", "words"),
    [
        ((16, 32), "int3", torch.float32, "'int3' is not int8 or int4"),
        ((16, 40), "int8", torch.bfloat16, "in_features in 32s.*16, 40"),
        ((16, 40), "int4", torch.bfloat16, "in_features in 32s.*16, 40"),
        ((24, 32), "int4", torch.bfloat16, "out_features in 16s.*24, 32"),
        ((16, 32), "int8", torch.float16, "bfloat16 or float32 rows, not float16"),
        ((16, 32), "int4", torch.float64, "bfloat16 or float32 rows, not float64"),
    ],
)
def test_what_no_low_bit_kernel_takes_is_refused(shape, kind, dtype, words):
    with pytest.raises(ValueError, match=words):
        pack(randn(*shape, dtype=dtype), kind)
    assert pack(randn(24, 32), "int8").out_features == 24


def test_low_bit_weights_are_refused_where_pytorch_has_no_kernels(monkeypatch):
    with pytest.raises(ValueError, match="CPU only, not on meta"):
        pack(randn(16, 32).to("meta"), "int4")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    with pytest.raises(ValueError, match="AVX2"):
        pack(randn(16, 32), "int8")


def test_a_weight_is_a_matrix():
    with pytest.raises(ValueError):
        pack(randn(4))


def test_keys_of_another_shape_than_the_pools_are_refused():
    keys, values = torch.zeros(3, 4, 2, 2), torch.zeros(3, 4, 2, 2)
    with pytest.raises(RuntimeError):
        store_kv(randn(2, 2, 5), randn(2, 2, 5), keys, values, View(torch.tensor([4, 5]), 2))
    with pytest.raises(RuntimeError):
        attention(randn(1, 3, 2), keys, values, viewed([(1, 2)], [[1]], 4))
    with pytest.raises(IndexError):
        store_kv(randn(1, 2, 2), randn(1, 2, 2), keys, values, View(torch.tensor([12]), 1))


def test_a_window_without_causal_rows_is_refused():
    pool, found = torch.zeros(3, 8, 1, 2), viewed([(1, 2)], [[1]], window=5)
    with pytest.raises(ValueError, match="window of 5 tokens needs causal rows"):
        attention(randn(1, 3, 2), pool, pool, found, causal=False, window=5)


@pytest.mark.parametrize("count", [2, 4])
def test_a_mask_of_another_width_than_the_logits_is_refused(count):
    with pytest.raises(AssertionError, match="70"):
        allowed_alone(randn(70), torch.ones(count, dtype=torch.int32))


def test_a_trace_that_cannot_be_written_is_an_error(tmp_path):
    step = Measurement("decode", [(7, 1)], lambda: None)
    with pytest.raises(OSError):
        kernels.trace([step], tmp_path / "none" / "t.json", {})


def refusal(*command, **environment):
    result = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env={**os.environ, **environment},
        capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 1 and result.stdout == ""
    return result.stderr


def test_compiling_is_refused_in_the_interpreter_and_without_triton():
    if kernels.triton is not None:
        assert refusal("kernels.py", "--compile", TRITON_INTERPRET="1") == (
            "--compile cannot run in Triton's interpreter: unset TRITON_INTERPRET\n"
        )
    hidden = "import runpy, sys; sys.modules['triton'] = None; sys.argv = ['kernels.py', {}]; "
    hidden += "runpy.run_path('kernels.py', run_name='__main__')"
    assert refusal("-c", hidden.format("'--compile'")) == (
        "--compile needs Triton, which is not installed here\n"
    )


# ---------------------------------------------------------------- in Triton's interpreter, by now


@TRITON
def test_every_kernel_in_tritons_interpreter_equals_its_pytorch_body(interpreter, request):
    passes(interpreter[request.node.name])


@TRITON
@pytest.mark.slow
def test_every_kernel_in_more_shapes(interpreter, request):
    passes(interpreter[request.node.name])
