"""sample.py: the filters' law, the draw's exactness, the noise's quality, the door.

Every chi-square here is one-sided at 1e-6: the chance that a correct file fails it. Seeds are
fixed, so a test that passed keeps passing.
"""

import math
import random

import pytest
import torch

from sample import (
    ACCEPT,
    DRAFT,
    RESIDUAL,
    TARGET,
    Row,
    SamplingParams,
    _draw,
    distribution,
    draw,
    gumbel,
    mix,
    noise_bits,
    noise_key,
    sample,
    sample_seed,
    uniform,
)

torch.set_num_threads(1)


# ---------------------------------------------------------------- helpers


def params(**fields):
    return SamplingParams(**fields).with_defaults({})


def one(logits, history=(), prompt_tokens=0, mask=None, seed=1, **fields):
    """Sample one row of logits given as a list: (id, logprobs)."""
    row = Row(params(**fields), seed, len(history), list(history), mask, prompt_tokens)
    ids, logprobs, _ = sample(torch.tensor([logits]), [row])
    return ids[0], logprobs[0]


def words(allowed, vocab):
    """A mask's int32 words: bit i of words[w] allows id 32 * w + i."""
    result = [0] * -(-vocab // 32)
    for i in allowed:
        result[i // 32] |= 1 << i % 32
    signed = [word - (word >> 31 << 32) for word in result]
    return torch.tensor(signed, dtype=torch.int32)


def critical(df):
    """The chi-square value exceeded with probability 1e-6 (Wilson and Hilferty 1931)."""
    return df * (1 - 2 / (9 * df) + 4.7534 * math.sqrt(2 / (9 * df))) ** 3


def chi_square(counts, expected):
    assert min(expected) >= 5, "too few draws for a chi-square"
    return sum((c - e) ** 2 / e for c, e in zip(counts, expected))


def law(scores, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """What should be drawn, by sorting in float64: {id: probability}.

    Temperature, top-k, top-p on the renormalised rest, min-p; of equals the smaller id first.
    """
    best = max(scores)
    weights = [math.exp((s - best) / temperature) for s in scores]
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    if 0 < top_k < len(order):
        order = order[:top_k]
    total, mass, kept = sum(weights[i] for i in order), 0.0, []
    for i in order:
        if mass < top_p or top_p >= 1:
            kept.append(i)
        mass += weights[i] / total
    kept = [i for i in kept if weights[i] > 0 and weights[i] >= min_p * weights[order[0]]]
    total = sum(weights[i] for i in kept)
    return {i: weights[i] / total for i in kept}


def full_gumbel(scores, rows):
    """Noisy scores (R, V) in float64 over the whole vocabulary, and how exact float32 can be."""
    temperatures = torch.tensor([r.params.temperature for r in rows], dtype=torch.float64)
    best = scores.double().amax(-1, keepdim=True)
    scaled = (scores.double() - best) / temperatures[:, None]
    keys = [noise_key(row.seed, TARGET, row.position) for row in rows]
    keys = torch.tensor(keys, dtype=torch.int32)[:, None]
    noise = gumbel(keys, torch.arange(scores.shape[1])[None])
    rounding = 1e-6 + 2.0**-22 * best[:, 0].abs() / temperatures
    return scaled + noise, rounding


def assert_wins(scores, rows, ids):
    """Each id has the largest noisy score of its row, up to float32 rounding of the scores."""
    noisy, rounding = full_gumbel(scores, rows)
    regret = noisy.amax(-1) - noisy.gather(1, ids[:, None])[:, 0]
    worst = int((regret - rounding).argmax())
    assert (regret <= rounding).all(), (
        f"row {worst} drew id {ids[worst]}, {regret[worst]} below the winner"
        f" {noisy[worst].argmax()}, {int((regret > rounding).sum())} rows in all"
    )


# ---------------------------------------------------------------- by hand


def test_temperature_0_takes_the_largest_logit_and_the_first_of_equals():
    assert one([0.0, 3.0, 1.0], temperature=0)[0] == 1
    assert one([0.0, 3.0, 3.0, 3.0], temperature=0)[0] == 1
    assert one([-1.0, -1.0], temperature=0)[0] == 0


def test_top_p_keeps_the_token_that_crosses_p():
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log().expand(2000, -1)
    for p, kept in ((0.6, {2, 3}), (0.3, {3}), (0.75, {1, 2, 3}), (0.95, {0, 1, 2, 3})):
        ids, *_ = sample(logits, [Row(params(top_p=p), 1, i) for i in range(2000)])
        assert set(ids) == kept, f"top_p {p}"


def test_of_equals_the_filters_keep_the_smaller_ids():
    logits = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0]).expand(500, -1)
    for fields, kept in (({"top_k": 2}, {1, 2}), ({"top_k": 3, "top_p": 0.5}, {1, 2})):
        ids, *_ = sample(logits, [Row(params(**fields), 1, i) for i in range(500)])
        assert set(ids) == kept, f"{fields}"


def test_a_repetition_penalty_halves_positive_scores_and_doubles_negative_ones():
    """Penalty 2 on ids 0 (prompt) and 1 (output): 4 becomes 2, -1 becomes -2, the rest stays."""
    penalty = {"repetition_penalty": 2.0, "temperature": 0}
    assert one([4.0, -1.0, 2.5], [0, 1], 1, **penalty)[0] == 2  # 2, -2, 2.5
    assert one([4.0, -1.0, 1.5], [0, 1], 1, **penalty)[0] == 0  # 2, -2, 1.5
    assert one([-5.0, -1.0, -1.5], [0, 1], 1, **penalty)[0] == 2  # -10, -2, -1.5
    assert one([-5.0, -1.0, -2.5], [0, 1], 1, **penalty)[0] == 1  # -10, -2, -2.5
    assert one([4.0, -9.0, 2.5], [0, 0, 0], 3, **penalty)[0] == 2  # once, not once each time


def test_presence_is_subtracted_once_and_frequency_each_time_and_only_for_the_output():
    history = [2, 0, 0, 0, 1]  # prompt [2], output three times 0, once 1
    presence = {"presence_penalty": 1.0, "temperature": 0}
    assert one([3.0, 2.5, 2.25], history, 1, **presence)[0] == 2  # 2, 1.5, 2.25
    assert one([3.0, 2.5, 1.75], history, 1, **presence)[0] == 0  # 2, 1.5, 1.75
    frequency = {"frequency_penalty": 0.5, "temperature": 0}
    assert one([3.0, 2.25, 1.0], history, 1, **frequency)[0] == 1  # 1.5, 1.75, 1
    assert one([3.0, 1.75, 1.0], history, 1, **frequency)[0] == 0  # 1.5, 1.25, 1
    both = {"presence_penalty": 1.0, "frequency_penalty": 0.5, "temperature": 0}
    assert one([3.0, 0.0, 0.75], history, 1, **both)[0] == 2  # 0.5, -1.5, 0.75
    assert one([3.0, 0.0, 0.25], history, 1, **both)[0] == 0  # 0.5, -1.5, 0.25
    assert one([1.0, 0.0], [0, 0], 2, **both)[0] == 0  # a prompt alone is not penalised
    assert one([1.0, 0.9], [1], 0, presence_penalty=-0.5, temperature=0)[0] == 1  # rewarded


def test_penalties_then_bias_then_mask_then_the_draw():
    bias = {"logit_bias": {0: -1.0, 2: 0.75}, "temperature": 0}
    assert one([2.0, 1.5, 1.0], **bias)[0] == 2  # 1, 1.5, 1.75
    halved = {"repetition_penalty": 2.0, "logit_bias": {0: 2.0}, "temperature": 0}
    assert one([4.0, 3.5], [0], 1, **halved)[0] == 0  # 4 / 2 + 2, not (4 + 2) / 2
    assert one([2.0, 1.5, 1.0], mask=words([0, 1], 3), **bias)[0] == 1  # bias cannot unmask
    assert one([2.0, 1.5, 1.0], mask=words([2], 3), temperature=1)[0] == 2


def test_logprobs_are_of_the_raw_logits_whatever_changes_the_draw():
    """softmax of ln [1, 2, 5] is [1/8, 2/8, 5/8]."""
    logits = [math.log(1), math.log(2), math.log(5)]
    changed = {"repetition_penalty": 9.0, "logit_bias": {1: 50.0}, "top_k": 1, "min_p": 0.5}
    for temperature in (0, 0.1, 10):
        token, found = one(logits, [2], 0, None, temperature=temperature, logprobs=2, **changed)
        assert token == found.id == 1
        assert found.logprob == pytest.approx(math.log(2 / 8), abs=1e-6)
        assert [i for i, _ in found.top] == [2, 1]
        assert [x for _, x in found.top] == pytest.approx([math.log(5 / 8), math.log(2 / 8)])
    assert one(logits, temperature=0, logprobs=0)[1].top == ()
    assert len(one(logits, temperature=0, logprobs=1000)[1].top) == 3  # no more than there are
    assert one(logits, temperature=0)[1] is None


def test_each_row_of_a_batch_gets_its_own_logprobs_or_none():
    logits = torch.tensor([[0.0, 1.0], [1.0, 0.0], [math.nan, 0.0], [5.0, 0.0]])
    asked = [None, 1, 1, 0]
    rows = [Row(params(temperature=0, logprobs=n), 0, 1, [0], prompt_tokens=1) for n in asked]
    ids, logprobs, _ = sample(logits, rows)
    assert ids == [1, 0, None, 0]
    assert [x and x.id for x in logprobs] == [None, 0, None, 0]
    assert logprobs[1].logprob == pytest.approx(-math.log1p(math.exp(-1)))


def test_sample_0_has_the_requests_own_seed_and_the_others_differ():
    assert sample_seed(7, 0) == 7
    seeds = [sample_seed(7, i) for i in range(64)]
    assert len(set(seeds)) == 64
    assert not set(seeds[1:]) & {sample_seed(8, i) for i in range(64)}
    logits = torch.zeros(64, 1000)
    ids, *_ = sample(logits, [Row(params(), seed, 1, [0], prompt_tokens=1) for seed in seeds])
    assert len(set(ids)) > 50  # 64 draws of 1000 equal ids: 62 different ones on average


# ---------------------------------------------------------------- against the reference

LOGITS = [1.0, -0.5, 2.0, 2.0, 0.3, -1.5, 1.2, 0.0]  # ids 2 and 3 are equals
FILTERS = [
    {},
    {"temperature": 0.7},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 4},
    {"top_k": 8},
    {"top_k": -1, "temperature": 1.5},
    {"top_p": 0.5},
    {"top_p": 0.9},
    {"min_p": 0.2},
    {"top_k": 5, "top_p": 0.8},  # of the five; of all eight it would keep one more
    {"top_k": 3, "min_p": 0.5},
    {"top_p": 0.93, "min_p": 0.12},
    {"temperature": 1.7, "top_k": 6, "top_p": 0.85, "min_p": 0.3},
    {"temperature": 0.6, "top_k": 5, "top_p": 0.97, "min_p": 0.05},
]


@pytest.mark.parametrize("fields", FILTERS, ids=str)
def test_draws_follow_the_brute_force_law(fields):
    """8000 draws; 1e-6 is the chance that a correct sampler fails one of these."""
    draws = 8000
    p = params(**fields)
    rows = [Row(p, 3, i) for i in range(draws)]
    ids, *_ = sample(torch.tensor(LOGITS).expand(draws, -1), rows)
    expected = law(LOGITS, **fields)
    assert set(ids) == set(expected)
    counts = [ids.count(i) for i in expected]
    if len(expected) > 1:
        found = chi_square(counts, [draws * share for share in expected.values()])
        assert found < critical(len(expected) - 1)


def test_draws_over_many_seeds_follow_the_law_as_draws_over_positions_do():
    draws, fields = 8000, {"temperature": 1.3, "top_k": 5}
    rows = [
        Row(params(**fields), seed, 1, [0], prompt_tokens=1)
        for seed in range(-draws // 2, draws // 2)
    ]
    ids, *_ = sample(torch.tensor(LOGITS).expand(draws, -1), rows)
    expected = law(LOGITS, **fields)
    counts = [ids.count(i) for i in expected]
    found = chi_square(counts, [draws * share for share in expected.values()])
    assert set(ids) == set(expected) and found < critical(len(expected) - 1)


def test_consecutive_draws_of_one_seed_are_independent():
    """Pairs of draws at neighbouring positions, as a 4 x 4 table: 15 degrees of freedom."""
    draws = 20_000
    rows = [Row(params(), 11, i) for i in range(draws)]
    ids, *_ = sample(torch.tensor([0.0, 0.5, 1.0, -0.5]).expand(draws, -1), rows)
    shares = law([0.0, 0.5, 1.0, -0.5])
    counts = {(a, b): 0 for a in range(4) for b in range(4)}
    for pair in zip(ids[::2], ids[1::2]):
        counts[pair] += 1
    expected = [draws / 2 * shares[a] * shares[b] for a, b in counts]
    assert chi_square(counts.values(), expected) < critical(15)


def test_top_p_is_taken_of_what_top_k_left():
    """Of [.4 .3 .2 .1] the best two have 4/7 and 3/7, so p = .5 keeps one; of all it is two."""
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().expand(500, -1)
    for fields, kept in (({"top_p": 0.5}, {0, 1}), ({"top_p": 0.5, "top_k": 2}, {0})):
        ids, *_ = sample(logits, [Row(params(**fields), 1, i) for i in range(500)])
        assert set(ids) == kept


def test_temperature_0_is_the_argmax_after_penalties_bias_and_mask_whatever_the_filters():
    draw = random.Random(0)
    for case in range(200):
        logits = [draw.choice([-2.0, -0.5, 0.0, 0.5, 1.0, 3.0]) for _ in range(9)]
        history = [draw.randrange(9) for _ in range(6)]
        allowed = draw.sample(range(9), 5)
        bias = {draw.randrange(9): draw.choice([-2.0, 2.0])}
        scores = [
            (x / 1.5 if x > 0 else x * 1.5) if i in history else x for i, x in enumerate(logits)
        ]
        for i in range(9):
            count = history[3:].count(i)
            scores[i] += bias.get(i, 0) - (0.25 * (count > 0) + 0.125 * count)
        best = min(allowed, key=lambda i: (-scores[i], i))
        for filters in ({}, {"top_k": 1}, {"top_k": 3, "top_p": 0.01}, {"min_p": 1.0}):
            token, _ = one(
                logits, history, 3, words(allowed, 9), temperature=0, repetition_penalty=1.5,
                presence_penalty=0.25, frequency_penalty=0.125, logit_bias=bias, **filters,
            )  # fmt: skip
            assert token == best, f"case {case}, {filters}"


ROWS = [  # scores of (rows, vocabulary), and the temperature
    ("normal", 2000, 300, 1.0),
    ("normal", 1000, 300, 0.1),
    ("normal", 1000, 300, 1e-3),
    ("normal", 1000, 300, 1e-4),
    ("normal", 1000, 300, 100.0),
    ("uniform", 1000, 300, 1.0),
    ("uniform", 1000, 300, 1e-4),
    ("bfloat16 ties", 1000, 300, 1.0),
    ("bfloat16 ties", 1000, 300, 1e-4),
    ("one far ahead", 1000, 300, 1.0),
    ("half masked", 1000, 300, 0.5),
    ("one left", 1000, 300, 1.0),
    ("large offset", 1000, 300, 1.0),
    ("normal", 48, 49_152, 1.0),
    ("uniform", 24, 49_152, 1.0),
    ("bfloat16 ties", 24, 49_152, 0.3),
]


def scores_of(kind, R, V, seed):
    draw = torch.Generator().manual_seed(seed)
    scores = torch.randn(R, V, generator=draw) * 4
    if kind == "uniform":
        scores = torch.full((R, V), 20.0)
    elif kind == "bfloat16 ties":
        scores = scores.round().bfloat16().float() + 16
    elif kind == "one far ahead":
        scores[torch.arange(R), torch.arange(R) % V] += 30
    elif kind == "half masked":
        scores[torch.rand(R, V, generator=draw) < 0.5] = -torch.inf
    elif kind == "one left":
        only = torch.full_like(scores, -torch.inf)
        only[torch.arange(R), torch.arange(R) * 7 % V] = -3.0
        scores = only
    elif kind == "large offset":
        scores += 1000
    return scores


@pytest.mark.parametrize("kind, R, V, temperature", ROWS)
def test_the_draw_is_the_argmax_of_all_noisy_scores(kind, R, V, temperature):
    """Nothing that could win is left out unexamined: ids are compared one by one."""
    scores = scores_of(kind, R, V, seed=R + V)
    rows = [Row(params(temperature=temperature), 5, i) for i in range(R)]
    assert_wins(scores, rows, _draw(scores, rows))


@pytest.mark.parametrize("V, R", [(40, 900), (300, 300), (49_152, 9)])
def test_the_filtered_draw_is_the_argmax_over_what_the_law_keeps(V, R):
    """The law's kept ids by sorting; where p or min_p falls within 1e-5 both answers count."""
    draw = random.Random(V)
    for kind in ("normal", "bfloat16 ties", "uniform", "half masked"):
        scores = scores_of(kind, R // 3, V, seed=V)
        rows = []
        for i in range(R // 3):
            p = params(
                temperature=draw.choice([0.5, 1.0, 2.0]),
                top_k=draw.choice([0, 1, 3, 20, V, V + 9]),
                top_p=draw.choice([1.0, 0.871, 0.457, 0.0537]),
                min_p=draw.choice([0.0, 0.0, 0.1, 0.6]),
            )
            rows.append(Row(p, draw.randrange(2**64), i))
        found = _draw(scores, rows).tolist()
        noisy, _ = full_gumbel(scores, rows)
        ambiguous = 0
        for i, row in enumerate(rows):
            p, winners = row.params, set()
            for share in (1 - 1e-5, 1 + 1e-5):
                top_p = 1.0 if p.top_p == 1 else p.top_p * share
                kept = list(law(scores[i].tolist(), p.temperature, p.top_k, top_p, p.min_p * share))
                winners.add(kept[int(noisy[i, kept].argmax())])
            ambiguous += len(winners) - 1
            assert found[i] in winners, f"{kind}, row {i}: {p}"
        assert ambiguous <= 1 + R // 100


@pytest.mark.parametrize("fields", FILTERS, ids=str)
def test_the_distribution_is_the_law_of_the_draws(fields):
    p, _ = distribution(
        torch.tensor([LOGITS, LOGITS]), [Row(params(**fields), 3, i) for i in (0, 1)]
    )
    expected = law(LOGITS, **fields)
    for row in p.tolist():
        assert {i for i, x in enumerate(row) if x} == set(expected)
        assert {i: x for i, x in enumerate(row) if x} == pytest.approx(expected, abs=1e-7)


def exact_rows(count, vocab, seed):
    """Rows of every kind, all of it exact in float32, and the law of each, by brute force."""
    draw = random.Random(seed)
    logits, rows, laws = [], [], []
    for i in range(count):
        scores = [draw.randrange(-96, 96) / 16 for _ in range(vocab)]  # some are equals
        history = [draw.randrange(vocab) for _ in range(9)]
        allowed = draw.choice([None, sorted(draw.sample(range(vocab), vocab // 2))])
        filters = {
            "temperature": draw.choice([0.5, 0.75, 1.0, 2.5]),
            "top_k": draw.choice([0, -1, 1, 7, vocab, vocab + 3]),
            "top_p": draw.choice([1.0, 0.9071, 0.4567, 0.0513]),
            "min_p": draw.choice([0.0, 0.0, 0.0303]),
        }
        changes = draw.choice([{}, {
            "repetition_penalty": 2.0, "presence_penalty": 0.5, "frequency_penalty": 0.25,
            "logit_bias": {3: 1.5},
        }])  # fmt: skip
        mask = None if allowed is None else words(allowed, vocab)
        p = params(**filters, **changes)
        rows.append(Row(p, seed + i, 9, history, mask, 4, draw.choice([TARGET, DRAFT])))
        logits.append(scores.copy())
        for j in set(history) if changes else ():
            scores[j] = scores[j] / 2 if scores[j] > 0 else scores[j] * 2
            scores[j] -= (j in history[4:]) * 0.5 + history[4:].count(j) * 0.25
        if changes:
            scores[3] += 1.5
        ids = range(vocab) if allowed is None else allowed
        found = law([scores[j] for j in ids], **filters)
        laws.append({ids[j]: x for j, x in found.items()})
    return torch.tensor(logits), rows, laws


def test_the_distribution_is_that_of_brute_force_whatever_shapes_it():
    logits, rows, laws = exact_rows(300, 40, 1)
    before = logits.clone()
    p, took = distribution(logits, rows)
    for row, expected in zip(p.tolist(), laws):
        assert {i: x for i, x in enumerate(row) if x} == pytest.approx(expected, abs=1e-9)
    assert torch.equal(logits, before) and took == sample(logits, rows)[2]
    shared = [distribution(logits[i : i + 1], rows[i : i + 1])[0][0] for i in range(20)]
    assert torch.allclose(torch.stack(shared), p[:20], atol=1e-12)  # whatever its neighbours


@pytest.mark.parametrize("count, vocab", [(300, 40), (3, 49_152)])
def test_to_draw_from_the_distribution_by_the_same_noise_is_to_sample(count, vocab):
    logits, rows, _ = (
        exact_rows(count, vocab, 2) if vocab < 99 else (*some_rows(count, vocab, 2), 0)
    )
    keys = [noise_key(row.seed, row.domain, row.position) for row in rows]
    assert draw(distribution(logits, rows)[0], keys).tolist() == sample(logits, rows)[0]


def test_where_one_id_or_none_can_be_drawn_the_distribution_says_so():
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0]] * 7)
    logits[1, 2], logits[2, 0], logits[3, :] = math.nan, math.inf, -math.inf
    kinds = [{"temperature": 0}, {}, {"top_k": 2}, {"top_p": 0.5}, {}, {"temperature": 1e-30}]
    rows = [Row(params(**fields), 1, i) for i, fields in enumerate(kinds)]
    rows[4] = Row(params(), 1, 4, mask=words([], 4))
    rows.append(Row(params(temperature=0, top_p=0.1), 1, 6, mask=words([0, 3], 4)))
    p, _ = distribution(logits, rows)
    expected = [[0, 1, 0, 0], *[[0] * 4] * 4, [0, 0.5, 0.5, 0], [1, 0, 0, 0]]
    assert p.tolist() == expected
    drawn = draw(p, [noise_key(1, TARGET, i) for i in range(7)]).tolist()
    assert drawn[:5] == [1, -1, -1, -1, -1] and drawn[5] in (1, 2) and drawn[6] == 0
    assert sample(logits, rows)[0] == [None if i < 0 else i for i in drawn]


def test_draws_from_probabilities_follow_them():
    draws, shares = 8000, [0.4, 0.0, 0.3, 0.05, 0.25, 0.0]
    p = torch.tensor(shares).expand(draws, -1)
    ids = draw(p, [noise_key(i, DRAFT, 3) for i in range(draws)]).tolist()
    kept = [i for i, share in enumerate(shares) if share]
    assert set(ids) == set(kept)
    assert chi_square([ids.count(i) for i in kept], [draws * shares[i] for i in kept]) < critical(3)
    assert draw(2 * p[:99], [noise_key(i, DRAFT, 3) for i in range(99)]).tolist() == ids[:99]


def test_coins_are_uniform_and_each_is_of_its_own_key_and_id():
    count = 20_000
    keys = [noise_key(7, ACCEPT, i) for i in range(count)]
    coins = uniform(keys, [i % 5 for i in range(count)])
    assert 0 < min(coins) and max(coins) < 1
    assert_uniform((torch.tensor(coins) * 64).long(), 64)
    for i in (0, 3, 99):
        key, token = torch.tensor([[keys[i]]], dtype=torch.int32), torch.tensor([[i % 5]])
        assert coins[i] == (noise_bits(key, token).item() + 2**31 + 0.5) / 2**32
        assert uniform([keys[i]], [i % 5]) == [coins[i]] != uniform([keys[i]], [i % 5 + 1])


def test_a_rows_domain_is_what_its_noise_is_for():
    logits = torch.zeros(64, 500)
    drawn = {
        domain: sample(logits, [Row(params(), 5, i, domain=domain) for i in range(64)])[0]
        for domain in (TARGET, DRAFT)
    }
    assert sum(a == b for a, b in zip(*drawn.values())) < 3
    assert drawn[TARGET] == sample(logits, [Row(params(), 5, i) for i in range(64)])[0]
    keys = [noise_key(5, DRAFT, i) for i in range(64)]
    assert drawn[DRAFT] == draw(torch.full((64, 500), 1 / 500), keys).tolist()


def splitmix(values):
    """The finaliser written again from its paper: add the golden gamma, then mix 30 27 31."""
    state, all_ones = 0, 2**64 - 1
    for value in values:
        state = state + value + 0x9E3779B97F4A7C15 & all_ones
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & all_ones
        state = (state ^ state >> 27) * 0x94D049BB133111EB & all_ones
        state ^= state >> 31
    return state


def lowbias(x):
    x ^= x >> 16
    x = x * 0x7FEB352D % 2**32
    x ^= x >> 15
    x = x * 0x846CA68B % 2**32
    return x ^ x >> 16


def test_noise_is_that_of_the_published_mixers_in_exact_integers():
    assert mix(0) == 0xE220A8397B1DCDAF  # splitmix64's first output from state 0
    draw = random.Random(0)
    for _ in range(300):
        seed, domain, position = draw.getrandbits(64), draw.randrange(4), draw.randrange(10**6)
        assert mix(seed, domain, position) == splitmix((seed, domain, position))
        key = noise_key(seed, domain, position)
        token = draw.randrange(2**18)
        bits = noise_bits(torch.tensor([[key]], dtype=torch.int32), torch.tensor([[token]])).item()
        low, high = key[0] % 2**32, key[1] % 2**32
        assert bits % 2**32 == lowbias((lowbias(token) * (high | 1) + low) % 2**32)


def test_gumbel_is_minus_ln_minus_ln_of_a_uniform_within_its_bounds():
    keys = torch.tensor([[noise_key(1, TARGET, 1)]], dtype=torch.int32)
    ids = torch.arange(100_000)[None]
    uniform = (noise_bits(keys, ids).long() % 2**32 ^ 2**31).double() / 2**32
    found = gumbel(keys, ids)
    assert found.dtype == torch.float64
    assert found.min() > -3.2 and found.max() < 22.9
    expected = -(-(uniform + 2.0**-33).log()).log()
    assert torch.allclose(found, expected, atol=1e-9)
    assert abs(float(found.mean()) - 0.5772) < 0.02  # Euler's constant


# ---------------------------------------------------------------- by property


def bits_of(seeds, domains, positions, ids):
    """noise_bits as unsigned numbers: a row for each (seed, domain, position)."""
    keys = [noise_key(s, d, p) for s in seeds for d in domains for p in positions]
    return noise_bits(torch.tensor(keys, dtype=torch.int32)[:, None], ids[None]).long() % 2**32


def assert_uniform(values, cells):
    counts = torch.bincount(values.flatten(), minlength=cells).double()
    each = counts.sum() / cells
    assert float(((counts - each) ** 2 / each).sum()) < critical(cells - 1)


def test_noise_is_uniform_in_its_high_and_in_its_low_bits():
    many_ids = bits_of([0], [TARGET], range(4), torch.arange(16_384))
    many_rows = bits_of([3], [TARGET], range(16_384), torch.arange(4))
    many_seeds = bits_of(range(16_384), [DRAFT], [9], torch.arange(4))
    for bits in (many_ids, many_rows, many_seeds):
        for shift in (24, 16, 8, 0):
            assert_uniform(bits >> shift & 255, 256)


def test_noise_of_neighbouring_ids_positions_seeds_and_domains_is_independent():
    """Their top three bits, and their bottom three, as an 8 x 8 table; and the correlation,
    which is within 5 standard deviations of 0."""
    ids = torch.arange(4096)
    plain = bits_of([5], [TARGET], range(16), ids)
    neighbours = {
        "id": bits_of([5], [TARGET], range(16), ids + 1),
        "position": bits_of([5], [TARGET], range(1, 17), ids),
        "seed": bits_of([6], [TARGET], range(16), ids),
        "draft": bits_of([5], [DRAFT], range(16), ids),
        "accept": bits_of([5], [ACCEPT], range(16), ids),
        "residual": bits_of([5], [RESIDUAL], range(16), ids),
        "sample": bits_of([sample_seed(5, 1)], [TARGET], range(16), ids),
        "opposite seed": bits_of([-5], [TARGET], range(16), ids),
    }
    for name, other in neighbours.items():
        for shift in (29, 0):
            assert_uniform((plain >> shift & 7) * 8 + (other >> shift & 7), 64)
        pair = torch.stack((plain.flatten(), other.flatten())).double()
        correlation = float(pair.corrcoef()[0, 1])
        assert abs(correlation) < 5 / math.sqrt(plain.numel()), name


def test_each_of_seed_domain_position_and_id_changes_the_noise_and_nothing_else_does():
    ids = torch.arange(64)
    seen = set()
    for seed in (0, 1, -1, 2**31, 2**63, 2**64 - 2):
        for domain in (TARGET, DRAFT, ACCEPT, RESIDUAL):
            for position in (0, 1, 2, 100_000):
                seen |= set(bits_of([seed], [domain], [position], ids)[0].tolist())
    assert len(seen) == 6 * 4 * 4 * 64
    again = bits_of([1], [TARGET], [7], ids.flip(0)).flip(1)
    assert torch.equal(again, bits_of([1], [TARGET], [7], ids))  # not the place of an id


def test_seeds_may_be_negative_and_longer_than_64_bits():
    for seed in (-1, -(2**63), 2**64 + 3, 3**100, -(3**100)):
        assert 0 <= mix(seed) < 2**64
        key = noise_key(seed, TARGET, 5)
        assert all(-(2**31) <= half < 2**31 for half in key)
        assert one([0.0] * 50, [1, 2], 2, seed=seed)[0] == one([0.0] * 50, [3, 4], 2, seed=seed)[0]
    assert noise_key(2**64 + 3, TARGET, 5) == noise_key(3, TARGET, 5)  # counted modulo 2^64
    assert noise_key(-1, TARGET, 5) != noise_key(1, TARGET, 5)


def some_rows(count, vocab, seed):
    """Rows of every kind next to each other: logits (R, V) and rows."""
    draw = random.Random(seed)
    logits = torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed)) * 3
    rows = []
    for _ in range(count):
        history = [draw.randrange(vocab) for _ in range(draw.randrange(1, 30))]
        mask = draw.choice([None, None, words(draw.sample(range(vocab), vocab // 2), vocab)])
        p = params(
            temperature=draw.choice([0, 0.3, 1.0, 2.0]),
            top_k=draw.choice([0, 0, 1, 5, 40]),
            top_p=draw.choice([1.0, 1.0, 0.9, 0.3]),
            min_p=draw.choice([0.0, 0.0, 0.15]),
            repetition_penalty=draw.choice([1.0, 1.0, 1.3]),
            presence_penalty=draw.choice([0.0, 0.5]),
            frequency_penalty=draw.choice([0.0, -0.2]),
            logit_bias=draw.choice([None, {3: 2.0}]),
            logprobs=draw.choice([None, 0, 3]),
        )
        rows.append(
            Row(p, draw.randrange(10**6), len(history), history, mask, draw.randrange(len(history)))
        )
    return logits, rows


def test_a_seeded_row_draws_the_same_alone_in_a_batch_and_in_any_order():
    for seed in range(4):
        logits, rows = some_rows(60, 70, seed)
        together, logprobs, took = sample(logits, rows)
        alone = [sample(logits[i : i + 1], rows[i : i + 1]) for i in range(60)]
        assert together == [ids[0] for ids, *_ in alone]
        for i, (_, found, share) in enumerate(alone):
            assert (share[0] is None) == (took[i] is None) == (rows[i].mask is None)
            assert share[0] is None or share[0] == pytest.approx(took[i], abs=1e-6)
            assert (found[0] is None) == (logprobs[i] is None)
            assert found[0] is None or found[0].logprob == pytest.approx(logprobs[i].logprob)
        order = random.Random(seed).sample(range(60), 60)
        shuffled, *_ = sample(logits[order], [rows[i] for i in order])
        assert shuffled == [together[i] for i in order]


def test_the_same_seed_draws_the_same_whatever_was_drawn_before():
    logits, rows = some_rows(20, 70, 9)
    first, *_ = sample(logits, rows)
    sample(*some_rows(50, 70, 10))
    torch.manual_seed(123)
    assert sample(logits, rows)[0] == first


def test_the_draw_does_not_depend_on_the_ids_before_or_on_where_the_prompt_ends():
    logits = torch.zeros(1, 1000)
    drawn = {
        sample(logits, [Row(params(), 3, len(history), history, prompt_tokens=prompt_tokens)])[0][0]
        for history, prompt_tokens in (([1] * 9, 9), ([2] * 9, 4), (range(9), 1), ([5] * 9, 0))
    }
    assert len(drawn) == 1


def test_sampling_leaves_the_logits_as_they_were():
    logits, rows = some_rows(60, 70, 2)
    before = logits.clone()
    sample(logits, rows)
    assert torch.equal(logits, before)


def test_bfloat16_logits_draw_as_their_float32_copy():
    logits, rows = some_rows(60, 70, 3)
    logits = logits.bfloat16()
    assert sample(logits, rows)[0] == sample(logits.float(), rows)[0]


def test_a_masked_id_is_never_drawn_in_a_million_draws():
    """The masked ids have by far the largest logits, the allowed ones are rare and equal."""
    allowed = words([1, 4, 33], 40)
    logits = torch.full((40,), 50.0)
    logits[[1, 4, 33]] = -50.0
    bits = torch.arange(32, dtype=torch.int32)
    scores = logits.masked_fill(~(allowed[:, None] >> bits & 1).bool().flatten()[:40], -torch.inf)
    p = params(temperature=5.0)
    seen = set()
    for start in range(0, 1_000_000, 50_000):
        rows = [Row(p, start + i, 0) for i in range(50_000)]
        seen |= set(_draw(scores.expand(50_000, -1), rows).tolist())
    assert seen == {1, 4, 33}
    rows = [Row(params(top_p=0.9), 1, i, mask=allowed) for i in range(2000)]
    assert set(sample(logits.expand(2000, -1), rows)[0]) == {1, 4, 33}


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
def test_a_row_that_is_not_finite_gives_none_and_the_others_draw_as_without_it(bad):
    for greedy in (True, False):
        logits, rows = some_rows(30, 70, 4)
        if greedy:
            rows = [Row(params(temperature=0), 1, 1, [0], prompt_tokens=1) for _ in rows]
        expected, *_ = sample(logits, rows)
        for i in (0, 13, 29):
            logits[i, 5] = bad
            rows[i] = Row(
                params(temperature=rows[i].params.temperature, logprobs=1),
                1,
                1,
                [0],
                prompt_tokens=1,
            )
            expected[i] = None
        ids, logprobs, _ = sample(logits, rows)
        assert ids == expected
        assert logprobs[0] is logprobs[13] is logprobs[29] is None
    assert sample(torch.full((2, 5), bad), [Row(params(), 1, 1, [0], prompt_tokens=1)] * 2)[0] == [
        None,
        None,
    ]


def test_a_row_whose_ids_are_all_masked_gives_none_and_the_others_draw_as_without_it():
    logits, rows = some_rows(30, 70, 5)
    expected, *_ = sample(logits, rows)
    for i, temperature in ((0, 0), (17, 1.0)):
        rows[i] = Row(params(temperature=temperature, top_k=3), 1, 1, [0], words([], 70), 1)
        expected[i] = None
    assert sample(logits, rows)[0] == expected


def test_logits_of_minus_infinity_are_never_drawn():
    logits = torch.full((500, 6), -torch.inf)
    logits[:, 2] = 0.0
    logits[:, 4] = 0.5
    for fields in ({}, {"top_k": 4}, {"top_p": 0.999}, {"min_p": 0.01}, {"temperature": 50.0}):
        ids, *_ = sample(logits, [Row(params(**fields), 1, i) for i in range(500)])
        assert set(ids) == {2, 4}, f"{fields}"


# ---------------------------------------------------------------- the door

REFUSED = [
    ("max_tokens", 0, "max_tokens 0 is not between"),
    ("max_tokens", 2.5, "max_tokens 2.5 is not an integer"),
    ("max_tokens", True, "max_tokens True is not an integer"),
    ("temperature", -0.1, "temperature -0.1 is not between 0 and"),
    ("temperature", math.nan, "temperature nan"),
    ("temperature", "1", "temperature '1' is not a number"),
    ("top_k", -2, "top_k -2 is not between -1"),
    ("top_k", 1.0, "top_k 1.0 is not an integer"),
    ("top_p", 0, "top_p 0 is not between"),
    ("top_p", 1.1, "top_p 1.1 is not between"),
    ("top_p", False, "top_p False is not a number"),
    ("min_p", -0.5, "min_p -0.5 is not between 0 and 1"),
    ("min_p", 1.5, "min_p 1.5 is not between 0 and 1"),
    ("repetition_penalty", 0, "repetition_penalty 0 is not between"),
    ("repetition_penalty", -1.0, "repetition_penalty -1.0"),
    ("presence_penalty", math.nan, "presence_penalty nan"),
    ("presence_penalty", "a", "presence_penalty 'a' is not a number"),
    ("frequency_penalty", [1], r"frequency_penalty \[1\] is not a number"),
    ("logprobs", -1, "logprobs -1 is not between 0 and 1000"),
    ("logprobs", 1001, "logprobs 1001 is not between 0 and 1000"),
    ("n", 0, "n 0 is not between 1"),
    ("n", 1.5, "n 1.5 is not an integer"),
    ("seed", 1.5, "seed 1.5 is not an integer"),
    ("seed", "7", "seed '7' is not an integer"),
    ("stop", "", "stop .*non-empty"),
    ("stop", ["a", ""], "stop .*non-empty"),
    ("stop", [3], "stop .*non-empty string"),
    ("logit_bias", {"a": 1.0}, "logit_bias 'a'"),
    ("logit_bias", {1: math.inf}, "logit_bias 1: inf is not an id and a number up to 1e30"),
    ("logit_bias", {1: math.nan}, "logit_bias 1: nan"),
]


@pytest.mark.parametrize("name, value, message", REFUSED)
def test_a_value_out_of_range_is_refused_by_name(name, value, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name, value", [
    ("max_tokens", 1), ("temperature", 0), ("temperature", 100), ("top_k", -1), ("top_k", 0),
    ("top_k", 10**9), ("top_p", 1), ("top_p", 1e-6), ("min_p", 0), ("min_p", 1), ("logprobs", 0),
    ("logprobs", 1000), ("seed", 0), ("seed", -(10**30)), ("seed", 10**30), ("n", 64),
    ("repetition_penalty", 0.5), ("presence_penalty", -2), ("logit_bias", {}), ("stop", []),
    ("logit_bias", {0: -100}),
])  # fmt: skip
def test_a_value_at_the_edge_of_its_range_is_accepted(name, value):
    found = getattr(SamplingParams(**{name: value}), name)
    assert found == (tuple(value) if name == "stop" else value)


def test_an_unknown_field_is_refused():
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1)


def test_a_stop_string_alone_is_a_tuple_of_one():
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop_token_ids=[1, 2]).stop_token_ids == (1, 2)


def test_unset_fields_come_from_the_generation_config_then_have_no_effect():
    config = {"temperature": 0.2, "top_p": 0.9, "max_new_tokens": 7, "do_sample": True}
    filled = SamplingParams().with_defaults(config)
    assert (filled.temperature, filled.top_p) == (0.2, 0.9)
    assert (filled.top_k, filled.min_p, filled.repetition_penalty) == (0, 0.0, 1.0)
    assert filled.max_tokens == 256
    mine = SamplingParams(temperature=0, top_p=1.0, top_k=0, seed=3, n=2, stop="x")
    kept = mine.with_defaults({**config, "top_k": 50, "min_p": 0.1, "repetition_penalty": 1.1})
    assert (kept.temperature, kept.top_p, kept.top_k) == (0, 1.0, 0)  # 0 is set, not unset
    assert (kept.min_p, kept.repetition_penalty) == (0.1, 1.1)
    assert (kept.seed, kept.n, kept.stop) == (3, 2, ("x",))
    assert SamplingParams().with_defaults({"top_k": None}).top_k == 0
    assert SamplingParams().with_defaults({}).temperature == 1.0


def test_a_generation_config_out_of_range_is_refused_by_name():
    with pytest.raises(ValueError, match="top_p 7"):
        SamplingParams().with_defaults({"top_p": 7})


def test_as_many_rows_as_logits_are_needed():
    with pytest.raises(AssertionError, match="1 rows for 2"):
        sample(torch.zeros(2, 3), [Row(params(), 1, 1, [0], prompt_tokens=1)])


# ---------------------------------------------------------------- regressions


@pytest.mark.parametrize("temperature", [1e-3, 1e-4, 1e-30, 1e-38, 1e-45, 1e-300])
def test_a_tiny_temperature_draws_the_best_id(temperature):
    """The score to reach was rounded at the size of score / temperature; beyond 32,768 the best
    id itself could miss it, and a row without contenders drew id 0, also where 0 was masked, or
    with a filter searched for ever. Below 1e-37 the quotient overflowed: IndexError."""
    logits = torch.full((2000, 8), -5.0)
    logits[:, 3] = 40.0
    rows = [Row(params(temperature=temperature), 1, i) for i in range(2000)]
    assert set(sample(logits, rows)[0]) == {3}


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
def test_a_filtered_row_that_is_not_finite_ends(bad):
    """Its scores count as equal, its bad id as the best, which the filters may leave out when it
    is not the first of equals: the search for a winner that is kept never ended."""
    logits = torch.zeros(200, 50)
    logits[:, 7] = bad
    filters = ({"top_k": 1}, {"top_p": 0.01}, {"top_k": 5, "min_p": 0.5})
    rows = [Row(params(**filters[i % 3]), 1, i) for i in range(200)]
    assert sample(logits, rows)[0] == [None] * 200


@pytest.mark.parametrize("name, value", [
    ("json_schema", 5), ("json_schema", ["a"]), ("regex", 5), ("regex", b"a"), ("choice", "a"),
    ("choice", {"a": 1}), ("choice", ["a", 1]), ("grammar", {}), ("think_end", 1.5),
    ("think_end", True), ("think_end", "</think>"), ("json_lenient", 1),
    ("json_whitespace", ["any"]), ("json_whitespace", None),
], ids=str)  # fmt: skip
def test_what_is_no_grammar_is_a_value_error_that_names_it(name, value):
    with pytest.raises(ValueError, match=f"{name} .*"):
        SamplingParams(**{name: value})


def test_a_text_follows_one_grammar_at_most():
    with pytest.raises(ValueError, match="json_schema and choice: a text can follow one of them"):
        SamplingParams(json_schema=True, choice=["a"])
    assert SamplingParams(json_schema=False).constraint == {"json_schema": False}
    assert SamplingParams().with_defaults({}).constraint == {}
    kept = SamplingParams(regex="", think_end=3).with_defaults({"top_k": 2})
    assert kept.constraint == {"regex": ""} and kept.think_end == 3


@pytest.mark.parametrize("name, value", [
    ("temperature", math.inf), ("presence_penalty", math.inf), ("frequency_penalty", -math.inf),
    ("repetition_penalty", math.inf), ("logit_bias", {1: "a"}), ("logit_bias", [1]), ("stop", 5),
    ("stop_token_ids", 5), ("stop_token_ids", ["a"]), ("n", None), ("max_tokens", None),
    ("logit_bias", {-1: 1.0}),
], ids=str)  # fmt: skip
def test_what_no_row_could_be_sampled_with_is_a_value_error(name, value):
    """Infinite values were accepted, turned masked scores into NaN and failed the whole batch;
    wrong types raised TypeError or AttributeError, which one line of a file would not survive."""
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})
