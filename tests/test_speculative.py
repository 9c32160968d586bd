"""speculative.py by itself: guesses verified, by every outcome of the coins; who guesses; what pays.

With the engine around it: test_speculation.py. Chi-squares are one-sided at 1e-6, seeds fixed.
"""

import math
import random
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import tiny
import torch

import kv_cache
import model
import speculative
from sample import (
    ACCEPT,
    DRAFT,
    RESIDUAL,
    TARGET,
    Row,
    SamplingParams,
    distribution,
    draw,
    noise_key,
    sample,
    uniform,
)
from speculative import Draft, agreed, believed, chance, residual, verify

torch.set_num_threads(1)

# ================================================================ verification


def params(**fields):
    return SamplingParams(**fields).with_defaults({})


def peaks(*ids, vocab=10):
    """Logits (R, V) of rows that draw just these ids."""
    logits = torch.zeros(len(ids), vocab)
    logits[range(len(ids)), ids] = 50.0
    return logits


def rows_of(count, seed=1, start=5, **fields):
    """Rows at neighbouring positions."""
    return [Row(params(**fields), seed, start + j) for j in range(count)]


def ids_of(came):
    return [[id for id, *_ in own] for own in came]


def words(allowed):
    """A mask of up to 31 ids."""
    return torch.tensor([sum(1 << i for i in allowed)], dtype=torch.int32)


# ---------------------------------------------------------------- by hand


@pytest.mark.parametrize("rule", speculative.RULES)
@pytest.mark.parametrize("temperature", [0, 1])
def test_the_first_guess_that_is_not_drawn_is_replaced_and_what_follows_it_goes(rule, temperature):
    rows = rows_of(3, temperature=temperature)
    for drawn, ids, came in (
        ((7, 9, 4), [7, 8], [7, 9]),
        ((6, 8, 4), [7, 8], [6]),
        ((7, 8, 4), [7, 8], [7, 8, 4]),
    ):
        certain = torch.nn.functional.one_hot(torch.tensor(ids), 10).double()
        for draft in (Draft(ids), Draft(ids, certain)):
            assert ids_of(verify(peaks(*drawn), rows, [draft], rule)) == [came]


def test_agreed_counts_up_to_the_first_difference():
    assert agreed([7, 8], [7, 9, 4]) == 1
    assert agreed([7, 8], [7, 8, 4]) == 2
    assert agreed([7, 8], [6, 8]) == 0
    assert agreed([7, 8], [7]) == 1  # nothing is known of the rest
    assert agreed([], [7]) == agreed([], []) == 0
    assert agreed([7], [None]) == 0


def test_a_guess_stays_as_often_as_p_has_of_it_what_q_has():
    p, q = torch.tensor([0.5, 0.3, 0.2, 0.0, 0.4, 0.0]), torch.tensor([0.2, 0.6, 0.2, 0.1, 0, 0])
    assert chance(p, q).tolist() == pytest.approx([1, 0.5, 1, 0, 1, 0])


def test_what_p_has_more_than_q_is_a_distribution_and_p_itself_where_that_is_nothing():
    p = torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2], [0.5, 0.3, 0.2], [0.0, 0.0, 0.0]])
    q = torch.tensor([[0.3, 0.6, 0.1], [0.5, 0.3, 0.2], [0.0, 0.0, 0.0], [0.2, 0.3, 0.5]])
    expected = [[2 / 3, 0, 1 / 3], [0.5, 0.3, 0.2], [0.5, 0.3, 0.2], [0, 0, 0]]
    assert torch.allclose(residual(p, q), torch.tensor(expected))


def test_a_belief_that_cannot_be_true_is_as_if_the_guess_had_been_certain():
    nan, inf = math.nan, math.inf
    fine = [0.25, 0.75, 0, 0]
    for q, read in (
        (fine, fine),
        ([0.2, 0.8], [0.2, 0.8, 0, 0]),  # of a smaller vocabulary
        ([0.1, 0.3, 0.2, 0.2, 0.15, 0.05], [0.1, 0.3, 0.2, 0.2]),  # of a larger one
        ([nan] * 4, None),
        ([0.25, 0.75, 0, nan], None),
        ([inf, 0.5, 0, 0], None),
        ([0, 0, 0, 0], None),
        ([0.5, 1.5, 0, 0], None),  # twice too much
        ([0.1, 0.3, 0, 0], None),
        ([1.25, 0.75, -1, 0], None),
        ([1, 0, 0, 0], None),  # then the guess could not have come
    ):
        found = believed(Draft([1], torch.tensor([q])), 4, "cpu")
        assert torch.allclose(found.float(), torch.tensor([read or [0.0, 1, 0, 0]])), q
    assert believed(Draft([5], torch.tensor([fine])), 4, "cpu").tolist() == [[0, 0, 0, 0]]
    wide = torch.tensor([[0.1, 0.3, 0.2, 0.2, 0.15, 0.05]])
    assert torch.equal(believed(Draft([5], wide), 4, "cpu"), wide[:, :4].double())


@pytest.mark.parametrize("rule", speculative.RULES)
def test_guesses_outside_the_vocabulary_never_stay(rule):
    """Not even where the row would be indexed from its end by a negative one."""
    for outside in (-1, -10, 10, 11, 2**40):
        for beliefs in (None, torch.full((2, 10), 0.1), torch.full((2, 12), 1 / 12)):
            draft = Draft([9, outside], beliefs)
            came = verify(peaks(9, 9, 3), rows_of(3), [draft], rule)
            assert ids_of(came) == [[9, 9]]


@pytest.mark.parametrize("rule", speculative.RULES)
@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
def test_a_row_that_nothing_can_be_drawn_from_is_left_to_the_next_step(rule, temperature, bad):
    beliefs = torch.full((2, 10), 0.05)
    beliefs[:, 7] = 0.55
    for broken, came in ((0, [None]), (1, [7]), (2, [7, 7])):
        logits = peaks(7, 7, 7)
        logits[broken] = bad
        rows = [*rows_of(3, temperature=temperature), *rows_of(1)]
        for draft in (Draft([7, 7]), Draft([7, 7], beliefs)):
            found = verify(torch.cat((logits, peaks(4))), rows, [draft, Draft()], rule)
            assert ids_of(found) == [came, [4]]


@pytest.mark.parametrize("rule", speculative.RULES)
def test_logprobs_and_what_masks_took_are_of_the_row_that_verified_the_guess(rule):
    """Of the raw row, only where asked for; three rows of [1 2 5], [5 1 2] and [2 5 1] eighths."""
    logits = torch.tensor([[1.0, 2, 5], [5, 1, 2], [2, 5, 1]]).log()
    masks = [words([1, 2]), words([0, 1]), words([2])]
    beliefs = torch.tensor([[0, 0, 1.0], [1, 0, 0]])
    for told in (None, beliefs):
        asked = [
            Row(params(top_k=1, logprobs=1), 3, 4 + j, mask=mask) for j, mask in enumerate(masks)
        ]
        masked = [Row(params(), 3, 9 + j, mask=words([0, 1, 2])) for j in range(2)]
        everyone = torch.cat((logits[1:], logits, logits[:1]))
        drafts = [Draft([1], None if told is None else told[:1]), Draft([2, 0], told), Draft()]
        first, own, last = verify(everyone, [*masked, *asked, Row(params(), 3, 9)], drafts, rule)
        assert [id for id, *_ in own] == [2, 0, 2]
        assert [x.id for _, x, _ in own] == [2, 0, 2]
        assert [x.logprob for _, x, _ in own] == pytest.approx(torch.tensor([5, 5, 1]).div(8).log())
        assert [x.top[0][0] for _, x, _ in own] == [2, 0, 1]
        assert [x[0] for _, _, x in own] == pytest.approx([1 / 8, 2 / 8, 7 / 8])
        assert [x[1] for _, _, x in own] == [False, False, True]
        assert all(x is None and took[0] == 0 for _, x, took in first)
        assert last[0][1] is last[0][2] is None


def test_a_guess_stays_if_its_coin_falls_below_its_chance():
    """Its own coin: of its seed, position and id; what takes its place has another noise."""
    law, q = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.4, 0.3, 0.2, 0.1])
    seen = set()
    for seed in range(80):
        ids = [seed % 4, seed // 4 % 4]
        rows = rows_of(3, seed)
        coins = uniform([noise_key(seed, ACCEPT, row.position) for row in rows[:2]], ids)
        goes = [coin >= min(1, law[id] / q[id]) for coin, id in zip(coins, ids)]
        n = [*goes, True].index(True)
        left = (law - q).clamp(min=0) if n < 2 else law
        expected = int(draw(left[None], [noise_key(seed, RESIDUAL, 5 + n)]))
        found = verify(law.log().expand(3, 4), rows, [Draft(ids, q.expand(2, 4))], "reject")
        assert ids_of(found) == [[*ids[:n], expected]]
        seen.add(n)
    assert seen == {0, 1, 2}


def test_a_drafter_that_believes_what_the_target_does_is_always_right_under_reject():
    """And under "sample" only by chance, one time in ten, unless it draws by the same noise."""
    logits, count = torch.zeros(3, 10), 300
    rows = [row for seed in range(count) for row in rows_of(3, seed)]
    p, _ = distribution(logits, rows[:3])
    right = {}
    for domain in (DRAFT, TARGET):
        keys = [noise_key(row.seed, domain, row.position) for row in rows]
        ids = draw(p[:1].expand(3 * count, -1), keys).tolist()
        drafts = [Draft(ids[3 * i : 3 * i + 2], p[:2]) for i in range(count)]
        for rule in speculative.RULES:
            came = verify(logits.repeat(count, 1), rows, drafts, rule)
            right[rule, domain] = sum(len(own) - 1 for own in came) / (2 * count)
    assert right["reject", DRAFT] == right["sample", TARGET] == 1
    assert right["sample", DRAFT] < 0.15


def test_rows_are_as_many_as_the_drafts_need():
    with pytest.raises(AssertionError, match="2 rows for drafts of 3"):
        verify(peaks(1, 2), rows_of(2), [Draft([1, 2])])


def test_a_draft_is_cut_with_its_beliefs():
    draft = Draft([1, 2, 3], torch.eye(3), kind=4).cut(2)
    assert (draft.ids, draft.beliefs.tolist(), draft.kind) == ([1, 2], torch.eye(3)[:2].tolist(), 4)
    assert Draft([1, 2]).cut(1) == Draft([1]) and Draft([1, 2]).cut(9) == Draft([1, 2])


# ---------------------------------------------------------------- the law, by enumeration
#
# A target of a few tokens whose next one depends on all before, a drafter with a law of its own,
# and instead of noise every outcome: each draft with its chance, each number of guesses that stay
# with the chance of such coins, each token with that of its law. `verify` decides all of it, with
# coins put just below and just above where they have to matter. Over several rounds the joint law
# of the first three tokens has to be the target's own.


def law_of(logits, p, history=(), prompt_tokens=0, allowed=None):
    """What should be drawn from a row, in plain Python: a list of probabilities."""
    scores = list(logits)
    for i in set(history):
        penalty = p.repetition_penalty
        scores[i] = scores[i] / penalty if scores[i] > 0 else scores[i] * penalty
    output = list(history[prompt_tokens:])
    for i in set(output):
        scores[i] -= p.presence_penalty + p.frequency_penalty * output.count(i)
    for i, bias in (p.logit_bias or {}).items():
        scores[i] += bias
    ids = [i for i in range(len(scores)) if allowed is None or i in allowed]
    ids.sort(key=lambda i: (-scores[i], i))
    weights = {i: math.exp((scores[i] - scores[ids[0]]) / p.temperature) for i in ids}
    if p.top_k > 0:
        ids = ids[: p.top_k]
    total, mass, kept = sum(weights[i] for i in ids), 0.0, []
    for i in ids:
        if mass < p.top_p * total and weights[i] >= p.min_p:
            kept.append(i)
        mass += weights[i]
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(scores))]


class World:
    """A target and a drafter of V tokens after a prompt of two.

    Logits are multiples of 1/64, so that penalties by powers of two are exact in float32.
    """

    def __init__(self, V, k, drafter, fields, masked=False, seed=0):
        self.V, self.k, self.drafter, self.masked = V, k, drafter, masked
        self.params = params(**fields)
        draw = random.Random(seed)
        self.target, self.own = (
            {key: [draw.randrange(-128, 128) / 64 for _ in range(V + 2)] for key in range(5 * V)}
            for _ in range(2)
        )
        self.laws, self.beliefs = {}, {}

    def key(self, prefix):
        return (prefix[-1] if prefix else 0) + self.V * (len(prefix) % 5)

    def row(self, prefix, seed=0, domain=TARGET):
        allowed = self.allowed(prefix)
        mask = None if allowed is None else words(allowed)
        history = [0, 1, *prefix]
        return Row(self.params, seed, len(history), history, mask, 2, domain)

    def logits(self, prefix):
        return self.target[self.key(prefix)][: self.V]

    def allowed(self, prefix):
        return {i for i in range(self.V) if (i + self.key(prefix)) % 3} if self.masked else None

    def law(self, prefix):
        if prefix not in self.laws:
            rest = ([0, 1, *prefix], 2, self.allowed(prefix))
            self.laws[prefix] = law_of(self.logits(prefix), self.params, *rest)
        return self.laws[prefix]

    def belief(self, prefix):
        """What the drafter draws the token after a prefix from: hotter, and of its own."""
        key = self.key(prefix)
        if key not in self.beliefs:
            width = {"narrow": self.V - 1, "wide": self.V + 2}.get(self.drafter, self.V)
            self.beliefs[key] = law_of(self.own[key][:width], params(temperature=1.5))
        return self.beliefs[key]

    def drafts(self, prefix):
        """Each draft after a prefix: (its chance, the Draft, what its beliefs should count as)."""
        k = len(prefix) % (self.k + 1) if self.drafter == "sometimes none" else self.k
        grown = [((), 1.0)]
        for _ in range(k):
            grown = [
                (ids + more, share * chance)
                for ids, share in grown
                for more, chance in self.guesses(prefix, ids)
            ]
        for ids, share in grown:
            laws = [self.belief(self.seen(prefix + ids[:j])) for j in range(len(ids))]
            certain = [[float(i == id) for i in range(self.V)] for id in ids]
            told = read = laws
            if self.drafter in ("certain", "said to be certain"):
                told = read = certain
            if self.drafter == "says another law":  # it draws from one and tells of a colder one
                told = read = [[x**3 / sum(y**3 for y in law) for x in law] for law in laws]
            if self.drafter == "broken":
                told, read = [[math.nan] * self.V for _ in ids], certain
            told = torch.tensor(told, dtype=torch.float64)
            yield share, Draft(list(ids), told), read

    def seen(self, prefix):
        return tuple(min(id, self.V - 1) for id in prefix)  # a drafter's own ids are its own affair

    def guesses(self, prefix, ids):
        """The next guess and its chance; none more after one that ends a draft, and stays in it."""
        if ids and (ids[-1] >= self.V or (self.drafter == "ends early" and ids[-1] in (0, 2))):
            return [((), 1.0)]
        if self.drafter == "drops what it looked at":
            laws = self.belief(prefix + ids)
            return [((i,) if i not in (0, 2) else (), x) for i, x in enumerate(laws)]
        if self.drafter == "certain":
            return [((self.key(prefix + ids) * 7 % self.V,), 1.0)]
        return [((i,), x) for i, x in enumerate(self.belief(prefix + ids)) if x > 0]


def outcomes(world, prefixes, monkeypatch):
    """What one round makes of each prefix: {prefix: {the ids that come: chance}}."""
    logits, rows, drafts, coins, cases = [], [], [], [], []
    for prefix in prefixes:
        for share, draft, read in world.drafts(prefix):
            before = [prefix + tuple(draft.ids[:j]) for j in range(len(draft.ids) + 1)]
            limits = [
                min(1.0, world.law(at)[id] / q[id]) if id < world.V else 0.0
                for at, id, q in zip(before, draft.ids, read)
            ]
            for n in range(len(limits) + 1):
                weight = share * math.prod(limits[:n])
                weight *= 1 - limits[n] if n < len(limits) else 1
                if weight == 0:  # no coin is that large, or that small: the smallest is below
                    continue
                own = [limit * (1 - 1e-12) for limit in limits[:n]]
                own += [max(limit * (1 + 1e-12), 2.0**-33) for limit in limits[n:]]
                cases.append((prefix, tuple(draft.ids[:n]), weight))
                drafts.append(draft)
                coins += [*own, 0.5] if draft.ids else []
                at = [world.seen(x) for x in before]  # what follows an id outside is not looked at
                logits += [world.logits(x) for x in at]
                rows += [world.row(x) for x in at]
    laws = {True: [], False: []}  # that tokens are drawn by, after a draft and without one

    def no_noise(probabilities, keys):
        laws[True] += probabilities.tolist()
        return torch.zeros(len(keys), dtype=torch.int64)

    def no_sample(logits, rows):
        laws[False] += distribution(logits, rows)[0].tolist()
        return [0] * len(rows), [None] * len(rows), [None] * len(rows)

    monkeypatch.setattr(speculative, "uniform", lambda keys, ids: coins)
    monkeypatch.setattr(speculative, "draw", no_noise)
    monkeypatch.setattr(speculative, "sample", no_sample)
    came = verify(torch.tensor(logits), rows, drafts, "reject")
    monkeypatch.undo()
    result = {prefix: defaultdict(float) for prefix in prefixes}
    laws = {how: iter(own) for how, own in laws.items()}
    for (prefix, stay, weight), draft, own in zip(cases, drafts, came):
        assert tuple(id for id, *_ in own) == (*stay, 0)
        law = next(laws[bool(draft.ids)])
        assert sum(law) == pytest.approx(1, abs=1e-12)
        for id, x in enumerate(law):
            result[prefix][(*stay, id)] += weight * x
    return result


def joint(world, length, monkeypatch):
    """The law of the first tokens, over as many rounds as they take, and as it should be."""
    prefixes = [p for n in range(length) for p in product(range(world.V), repeat=n)]
    rounds = outcomes(world, prefixes, monkeypatch)
    found, expected = defaultdict(float), defaultdict(float)
    todo = {(): 1.0}
    while todo:
        grown = defaultdict(float)
        for prefix, weight in todo.items():
            for ids, x in rounds[prefix].items():
                whole = prefix + ids
                if x and len(whole) >= length:
                    found[whole[:length]] += weight * x
                elif x:
                    grown[whole] += weight * x
        todo = grown
    for ids in product(range(world.V), repeat=length):
        expected[ids] = math.prod(world.law(ids[:j])[ids[j]] for j in range(length))
    return found, expected


SETTINGS = {
    "plain": {},
    "top_p": {"temperature": 0.75, "top_p": 0.85},
    "top_k": {"temperature": 1.5, "top_k": 2},
    "min_p": {"temperature": 0.5, "min_p": 0.2},
    "penalties": {"repetition_penalty": 2.0, "presence_penalty": 0.5, "frequency_penalty": 0.25},
    "all": {
        "temperature": 1.25, "top_k": 3, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 0.5,
        "frequency_penalty": 1.0, "logit_bias": {1: 0.75},
    },
    "masked": {"top_p": 0.9},
}  # fmt: skip
DRAFTERS = [
    "own", "certain", "said to be certain", "ends early", "sometimes none", "broken", "narrow",
    "wide",
]  # fmt: skip


def test_a_drafter_that_breaks_the_rules_is_seen(monkeypatch):
    """A control: one that looks at a guess and then drops it, and one that drew from another law
    than it tells of. Nothing in a verification could make up for that."""
    for drafter in ("drops what it looked at", "says another law"):
        found, expected = joint(World(4, 1, drafter, {}), 3, monkeypatch)
        assert sum(found.values()) == pytest.approx(1)
        assert sum(abs(found[ids] - expected[ids]) for ids in expected) / 2 > 0.01, drafter


def assert_exact(V, k, drafter, setting, monkeypatch, seed=0):
    world = World(V, k, drafter, SETTINGS[setting], setting == "masked", seed)
    found, expected = joint(world, 3, monkeypatch)
    assert set(x for x in found if found[x]) == set(x for x in expected if expected[x])
    for ids in expected:
        assert found[ids] == pytest.approx(expected[ids], abs=1e-12), ids


@pytest.mark.parametrize(
    "setting, drafter", [*zip([*SETTINGS, "top_p"], DRAFTERS), ("masked", "own")]
)
def test_the_law_of_three_tokens_is_exact(setting, drafter, monkeypatch):
    assert_exact(4, 2, drafter, setting, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_law_of_three_tokens_is_exact_in_every_setting(setting, drafter, monkeypatch):
    assert_exact(4, 2, drafter, setting, monkeypatch, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("V, k", [(6, 2), (4, 3)])
@pytest.mark.parametrize("setting, drafter", [("top_p", "own"), ("all", "ends early")])
def test_the_law_of_three_tokens_is_exact_for_more(V, k, setting, drafter, monkeypatch):
    assert_exact(V, k, drafter, setting, monkeypatch, seed=2)


# ---------------------------------------------------------------- the same tokens


class Talk:
    """Requests of every kind, whose logits, masks and guesses depend on all that came before."""

    V = 24

    def __init__(self, count, seed, **fields):
        draw = random.Random(seed)
        self.table = torch.randn(997, self.V, generator=torch.Generator().manual_seed(seed)) * 3
        self.begun = [draw.sample(range(self.V), draw.randrange(1, 6)) for _ in range(count)]
        self.params = []
        for i in range(count):
            kind = {
                "temperature": draw.choice([0, 0.5, 1.0, 2.0]),
                "top_k": draw.choice([0, 0, 5]),
                "top_p": draw.choice([1.0, 0.9]),
                "min_p": draw.choice([0.0, 0.0, 0.1]),
                "repetition_penalty": draw.choice([1.0, 1.3]),
                "frequency_penalty": draw.choice([0.0, 0.5]),
                "logit_bias": draw.choice([None, {3: 2.0}]),
                "logprobs": draw.choice([None, 2]),
            }
            self.params.append(params(**kind | fields))

    def state(self, i, tokens):
        return hash((i, *tokens)) % 997

    def row(self, i, tokens, domain=TARGET):
        at = self.state(i, tokens)
        mask = words([x for x in range(self.V) if (x + at) % 3]) if i % 3 == 0 else None
        return Row(self.params[i], 100 + i, len(tokens), tokens, mask, len(self.begun[i]), domain)

    def plain(self, count):
        """Without guesses: for each request (id, logprobs, took) of so many tokens."""
        texts, said = [list(x) for x in self.begun], [[] for _ in self.begun]
        for _ in range(count):
            logits = self.table[[self.state(i, x) for i, x in enumerate(texts)]]
            drawn = sample(logits, [self.row(i, x) for i, x in enumerate(texts)])
            for i, one in enumerate(zip(*drawn)):
                texts[i].append(one[0])
                said[i].append(one)
        return said

    def guessed(self, count, rule, guess):
        """The same with drafts by guess(request, its tokens), each round in another order."""
        said, order, accepted = [[] for _ in self.begun], random.Random(1), 0
        while any(len(own) < count for own in said):
            mine = [i for i, own in enumerate(said) if len(own) < count]
            order.shuffle(mine)
            texts = [self.begun[i] + [id for id, *_ in said[i]] for i in mine]
            drafts = [guess(i, text) for i, text in zip(mine, texts)]
            before = [
                (i, text + draft.ids[:j])
                for i, text, draft in zip(mine, texts, drafts)
                for j in range(1 + len(draft.ids))
            ]
            logits = self.table[[self.state(i, text) for i, text in before]]
            came = verify(logits, [self.row(i, text) for i, text in before], drafts, rule)
            for i, own in zip(mine, came):
                said[i] += own
                accepted += len(own) - 1
        return [own[:count] for own in said], accepted


def assert_alike(found, expected):
    for own, plain in zip(found, expected):
        assert [id for id, *_ in own] == [id for id, *_ in plain]
        for (_, logprob, took), (_, plain_logprob, plain_took) in zip(own, plain):
            assert (logprob and logprob.id) == (plain_logprob and plain_logprob.id)
            assert (logprob and logprob.top) == (plain_logprob and plain_logprob.top)
            assert took == (plain_took and pytest.approx(plain_took, abs=1e-6))


@pytest.mark.parametrize(
    "rule, fields", [("sample", {}), ("reject", {}), ("reject", {"temperature": 0})]
)
def test_guesses_or_none_the_same_seed_draws_the_same_tokens(rule, fields):
    """By both rules, where guesses are certain; at temperature 0 whatever is said of them."""
    talk, draw = Talk(60, 3, **fields), random.Random(2)
    expected = talk.plain(12)

    def guess(i, text):
        right = [id for id, *_ in expected[i][len(text) - len(talk.begun[i]) :]]
        ids = [id if draw.random() < 0.7 else draw.randrange(talk.V) for id in right]
        ids = ids[: draw.randrange(5)]
        beliefs = torch.rand(len(ids), talk.V).softmax(-1) if fields else None
        return Draft(ids, beliefs)

    found, accepted = talk.guessed(12, rule, guess)
    assert_alike(found, expected)
    assert accepted > 200

    def wrong_guess(i, text):
        at = len(text) - len(talk.begun[i])
        return Draft([(expected[i][at][0] + 1) % talk.V] * (i % 3))

    wrong = talk.guessed(3, rule, wrong_guess)
    assert_alike(wrong[0], [own[:3] for own in expected])
    assert wrong[1] == 0


def test_who_has_no_draft_draws_as_without_guesses_and_no_neighbour_matters():
    """Under "reject", drafts with beliefs, certain ones and none in one batch, in any order."""
    talk, draw = Talk(40, 5), random.Random(4)
    drafts = []
    for i in range(40):
        ids = [draw.randrange(talk.V) for _ in range(i % 4)]
        drafts.append(Draft(ids, torch.rand(len(ids), talk.V).softmax(-1) if i % 3 else None))
    texts = [
        [(i, talk.begun[i] + draft.ids[:j]) for j in range(1 + len(draft.ids))]
        for i, draft in enumerate(drafts)
    ]

    def verified(order):
        rows = [talk.row(i, text) for x in order for i, text in texts[x]]
        logits = talk.table[[talk.state(i, text) for x in order for i, text in texts[x]]]
        return dict(zip(order, ids_of(verify(logits, rows, [drafts[x] for x in order], "reject"))))

    together = verified(list(range(40)))
    assert verified(draw.sample(range(40), 40)) == together
    assert {i: own for x in range(40) for i, own in verified([x]).items()} == together
    plain = talk.plain(1)
    assert all(together[i] == [plain[i][0][0]] for i in range(0, 40, 4))


# ---------------------------------------------------------------- the law, by drawing


def critical(df):
    """The chi-square value exceeded with probability 1e-6 (Wilson and Hilferty 1931)."""
    return df * (1 - 2 / (9 * df) + 4.7534 * math.sqrt(2 / (9 * df))) ** 3


@pytest.mark.parametrize("rule", speculative.RULES)
@pytest.mark.parametrize("count", [2000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_pairs_of_tokens_follow_the_targets_law(rule, count):
    """Drafts of two by the drafter's own noise, until each request has two tokens."""
    world = World(5, 2, "own", {"temperature": 0.75, "top_p": 0.9}, seed=3)
    texts = [()] * count
    while todo := [i for i, text in enumerate(texts) if len(text) < 2]:
        drafts, laws = [()] * count, [[] for _ in range(count)]
        for _ in range(2):
            q = [world.belief(texts[i] + drafts[i]) for i in todo]
            where = [2 + len(texts[i] + drafts[i]) for i in todo]
            keys = [noise_key(i, DRAFT, at) for i, at in zip(todo, where)]
            for i, law, id in zip(todo, q, draw(torch.tensor(q), keys).tolist()):
                laws[i].append(law)
                drafts[i] += (id,)
        before = [(i, texts[i] + drafts[i][:j]) for i in todo for j in range(3)]
        came = verify(
            torch.tensor([world.logits(text) for _, text in before]),
            [world.row(text, seed=i) for i, text in before],
            [Draft(list(drafts[i]), torch.tensor(laws[i])) for i in todo],
            rule,
        )
        for i, own in zip(todo, ids_of(came)):
            texts[i] += tuple(own)
    counts = defaultdict(int)
    for text in texts:
        counts[text[:2]] += 1
    expected = {
        (a, b): count * world.law(())[a] * world.law((a,))[b] for a in range(5) for b in range(5)
    }
    expected = {pair: x for pair, x in expected.items() if x}
    assert set(counts) == set(expected) and min(expected.values()) >= 5
    found = sum((counts[pair] - x) ** 2 / x for pair, x in expected.items())
    assert found < critical(len(expected) - 1)


# ---------------------------------------------------------------- EAGLE-3

EAGLE_WIDE, EAGLE_VOCAB = 32, 96  # of the target, as `tiny.eagle` has them


@cache
def eagle_target(layers: int = 7) -> model.Model:
    """A target of enough layers to read three of them."""
    config = {
        "model_type": "llama", "num_hidden_layers": layers, "hidden_size": EAGLE_WIDE,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64,
        "vocab_size": EAGLE_VOCAB, "max_position_embeddings": 256,
    }  # fmt: skip
    checkpoint = model.random(model.Config.from_hf(config), 3)
    target = model.Model(checkpoint.config, checkpoint.tensors)
    target.tensors = checkpoint.tensors
    return target


def eagle(folder, fields: dict, tensors: dict, target=None, slots: int = 4) -> speculative.Eagle:
    """The head in a folder, with every row it scores in `scored`."""
    found = speculative.drafter(
        f"eagle:{tiny.written(folder, fields, tensors)}", target or eagle_target(), None
    )
    found.open(slots, 64)
    tiny.garbage(found.cache)
    score, found.scored = found.score, []
    found.score = lambda x: found.scored.append(score(x)) or found.scored[-1]
    return found


@dataclass(eq=False)
class Reading:
    tokens: list


def eagle_tokens(n: int, seed: int = 0) -> list[int]:
    return torch.randint(EAGLE_VOCAB, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def eagle_norm(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def eagle_turned(x, positions, theta, factor=1.0):
    """Each pair (j, j + d / 2) of x (T, H, d) turned by its angle: as a product of complex
    numbers."""
    half = x.shape[-1] // 2
    speeds = torch.tensor([theta ** (-j / half) / factor for j in range(half)]).double()
    turn = torch.polar(torch.ones(len(x), half).double(), positions.double()[:, None] * speeds)
    z = torch.complex(x[..., :half], x[..., half:]) * turn[:, None]
    return torch.cat((z.real, z.imag), -1)


def seen_before(q, k, v):
    """Causal attention of q (T, H, d) to k, v (T, G, d), whole matrices."""
    T, H, d = q.shape
    k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) / d**0.5
    scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).reshape(T, -1)


def eagle_streams(target, tokens) -> list:
    """The residual stream entering each layer of a Llama, and after the last: by itself."""
    T = {name: x.double() for name, x in target.tensors.items()}
    x, positions = T["model.embed_tokens.weight"][tokens], torch.arange(len(tokens))
    found = [x]
    for i in range(len(target.layers)):
        p = f"model.layers.{i}."
        y = eagle_norm(x, T[p + "input_layernorm.weight"], 1e-6)
        q, k, v = (y @ T[f"{p}self_attn.{n}_proj.weight"].T for n in "qkv")
        q, k, v = (z.unflatten(-1, (-1, 8)) for z in (q, k, v))
        q, k = (eagle_turned(z, positions, 1e4) for z in (q, k))
        x = x + seen_before(q, k, v) @ T[p + "self_attn.o_proj.weight"].T
        y = eagle_norm(x, T[p + "post_attention_layernorm.weight"], 1e-6)
        gate, up = (y @ T[f"{p}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        x = x + (torch.nn.functional.silu(gate) * up) @ T[p + "mlp.down_proj.weight"].T
        found.append(x)
    return found


class SlowEagle:
    """EAGLE-3 by itself: every row again for each guess."""

    def __init__(self, fields, tensors, embedding=None):
        self.fields, self.T = fields, {k: v.double() for k, v in tensors.items()}
        self.eps, self.theta = fields["rms_norm_eps"], fields["rope_theta"]
        self.embedding = self.T.get("embed_tokens.weight", embedding)
        ids = torch.arange(len(tensors["lm_head.weight"]))
        self.ids = ids + tensors["d2t"] if "d2t" in tensors else ids

    def linear(self, x, name):
        y = x @ self.T[f"{name}.weight"].T
        return y + self.T[f"{name}.bias"] if f"{name}.bias" in self.T else y

    def norm(self, x, name):
        return eagle_norm(x, self.T[f"{name}.weight"], self.eps)

    def fused(self, parts):
        if self.fields.get("fc_norm"):
            parts = [self.norm(x, f"fc_norm.{i}") for i, x in enumerate(parts)]
        x = torch.cat(parts, -1)
        return self.linear(self.norm(x, "input_norm") if "input_norm.weight" in self.T else x, "fc")

    def layer(self, g, tokens, base):
        """State to go on from, and logits of all V: of g (T, D), of positions from base on."""
        token = self.norm(self.embedding[tokens], "midlayer.input_layernorm")
        hidden = self.norm(g, "midlayer.hidden_norm")
        both = torch.cat((token, hidden), -1)
        d = self.fields.get("head_dim", g.shape[1] // self.fields["num_attention_heads"])
        q, k, v = (
            self.linear(both, f"midlayer.self_attn.{n}_proj").unflatten(-1, (-1, d)) for n in "qkv"
        )
        if "midlayer.self_attn.q_norm.weight" in self.T:
            q, k = (self.norm(x, f"midlayer.self_attn.{n}_norm") for x, n in ((q, "q"), (k, "k")))
        at = torch.arange(base, base + len(g))
        factor = (self.fields.get("rope_scaling") or {}).get("factor", 1.0)
        q, k = (eagle_turned(x, at, self.theta, factor) for x in (q, k))
        y = hidden if self.fields.get("norm_before_residual") else g
        y = y + self.linear(seen_before(q, k, v), "midlayer.self_attn.o_proj")
        x = self.norm(y, "midlayer.post_attention_layernorm")
        x = torch.nn.functional.silu(self.linear(x, "midlayer.mlp.gate_proj")) * self.linear(
            x, "midlayer.mlp.up_proj"
        )
        z = y + self.linear(x, "midlayer.mlp.down_proj")
        out = self.norm(z, "norm")
        logits = torch.full((len(g), self.fields["vocab_size"]), -torch.inf).double()
        logits[:, self.ids] = self.linear(out, "lm_head")
        return out if self.fields.get("norm_output") else z, logits

    def chain(self, parts, tokens, count, base=0):
        """Most likely guesses and their logits, after true parts (n, W) and tokens 1 .. n."""
        g, tokens, ids, rows = self.fused(parts), list(tokens), [], []
        for _ in range(count):
            state, logits = self.layer(g, tokens, base)
            rows.append(logits[-1])
            ids.append(int(logits[-1].argmax()))
            g, tokens = torch.cat((g, state[-1:])), [*tokens, ids[-1]]
        return ids, torch.stack(rows)


def most_likely(request, guesses):
    place = len(request.tokens) + len(guesses)
    return Row(SamplingParams(temperature=0.0), 0, place, request.tokens + guesses)


def eagle_parts(target, tokens, taps) -> list:
    """What the model's own pass leaves after these layers."""
    rows = kv_cache.ContiguousCache(target.config.specs, 1, 128)
    step = rows.prepare([(tiny.request(tokens), len(tokens))])
    return target(step.tokens, step.positions, step, taps)[1]


def eagle_learns(drafter, request, start: int, end: int, target=None):
    """Let it learn positions start .. end - 1 of a request."""
    parts = eagle_parts(target or eagle_target(), request.tokens[:end], drafter.taps)
    drafter.learn(request, start, [x[start:end] for x in parts])


def eagle_close(found, wanted, atol=2e-4):
    """Equal, also in what is -inf."""
    assert torch.equal(found.isinf(), wanted.isinf())
    where = wanted.isfinite()
    assert torch.allclose(found[where].double(), wanted[where], atol=atol, rtol=1e-4)


EAGLE_VARIANTS = {
    "plain": {},
    "normed_residual": {"norm_before_residual": True},
    "normed_output": {"norm_output": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True, "norm_output": True},
    "own_embedding": {"own": True, "hidden_size": 24, "target_hidden_size": EAGLE_WIDE},
    "whole_vocabulary": {"draft_vocab_size": None},
    "bias": {"attention_bias": True, "mlp_bias": True},
    "heads": {"head_dim": 6, "num_attention_heads": 6, "num_key_value_heads": 3},
    "rope": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_theta": 50.0},
    "two_layers": {"eagle_aux_hidden_state_layer_ids": [3, 7]},
    "layers_left": {"eagle_aux_hidden_state_layer_ids": [1, 2, 5]},
}
EAGLE_ENTERED = {"two_layers": [3, 7], "layers_left": [2, 3, 6]}  # the others: 2, 7 // 2 and 7 - 3


@pytest.mark.parametrize("variant", EAGLE_VARIANTS)
def test_eagle_is_a_slow_one_of_the_streams_that_enter_its_layers(tmp_path, variant):
    fields, tensors = tiny.eagle(**EAGLE_VARIANTS[variant])
    drafter, tokens = eagle(tmp_path, fields, tensors), eagle_tokens(12)
    # the reference reads a pass of its own: a wrong layer, or a wrong row of it, would show
    parts = [
        eagle_streams(eagle_target(), tokens[:-1])[i] for i in EAGLE_ENTERED.get(variant, [2, 3, 4])
    ]
    slow = SlowEagle(fields, tensors, eagle_target().embedding.double())
    request = Reading(tokens)
    eagle_learns(drafter, request, 0, 11)
    # all true pairs: feature i with token i + 1
    held = drafter.held[request]
    step = drafter.prepare([(held, tokens[1:])])
    states, x = drafter.run(drafter.fuse(held.features[0]), step.tokens, step)
    wanted, logits = slow.layer(slow.fused(parts), tokens[1:], 0)
    eagle_close(states, wanted)
    eagle_close(drafter.score(x), logits)
    # and three guesses after them
    held.computed = 0
    drafter.scored.clear()
    (draft,) = drafter.propose([request], [3], most_likely)
    ids, rows = slow.chain(parts, tokens[1:], 3)
    assert draft.ids == ids and draft.beliefs is None
    eagle_close(torch.cat(drafter.scored), rows)


@pytest.mark.parametrize("wrong", [0, 1, 2])
@pytest.mark.parametrize("by", [-1, 1])
def test_eagle_of_another_layer_would_show(tmp_path, wrong, by):
    fields, tensors = tiny.eagle()
    drafter, tokens = eagle(tmp_path, fields, tensors), eagle_tokens(12)
    request, entered = Reading(tokens), [2, 3, 4]
    eagle_learns(drafter, request, 0, 11)
    drafter.propose([request], [1], most_likely)
    entered[wrong] += by
    parts = [eagle_streams(eagle_target(), tokens[:-1])[i] for i in entered]
    slow = SlowEagle(fields, tensors, eagle_target().embedding.double())
    _, rows = slow.chain(parts, tokens[1:], 1)
    known = rows.isfinite()
    assert (drafter.scored[-1][known] - rows[known]).abs().max() > 0.5


@pytest.mark.parametrize("style", ["layers.0.", "model.", "speculators", "nested_ids"])
def test_eagle_by_its_other_names(tmp_path, style):
    own = style == "speculators"
    ids = {"eagle_aux_hidden_state_layer_ids": [2, 5, 6]} if style == "nested_ids" else {}
    fields, tensors = tiny.eagle(own=own, norm_before_residual=own or None, **ids)
    (tmp_path / "plain").mkdir()
    wanted = eagle(tmp_path / "plain", fields, tensors)
    if style == "nested_ids":
        fields["eagle_config"] = ids
        del fields["eagle_aux_hidden_state_layer_ids"]
    if style == "speculators":  # its norm_before_residual is true where nothing is said
        apart = ("draft_vocab_size", "norm_before_residual", "architectures")
        layer = {name: value for name, value in fields.items() if name not in apart}
        fields = {
            "speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"],
            "draft_vocab_size": 40, "transformer_layer_config": layer, "target_hidden_size": None,
        }  # fmt: skip
    if style == "model.":
        tensors = {f"model.{name}": x for name, x in tensors.items()}
    elif style != "nested_ids":
        tensors = {name.replace("midlayer.", "layers.0."): x for name, x in tensors.items()}
    (tmp_path / "other").mkdir()
    found = eagle(tmp_path / "other", fields, tensors)
    assert found.taps == wanted.taps == ((1, 4, 5) if ids else (1, 2, 3))
    request = Reading(eagle_tokens(9))
    for one in (found, wanted):
        eagle_learns(one, request, 0, 8)
    drafts = [one.propose([request], [3], most_likely)[0].ids for one in (found, wanted)]
    assert drafts[0] == drafts[1]
    assert torch.equal(torch.cat(found.scored), torch.cat(wanted.scored))


def test_eagle_whose_layer_norms_its_heads(tmp_path):
    fields, tensors = tiny.eagle(model_type="qwen3", head_dim=8)
    for name in "qk":
        tensors[f"midlayer.self_attn.{name}_norm.weight"] = torch.linspace(0.5, 1.5, 8)
    drafter, tokens = eagle(tmp_path, fields, tensors), eagle_tokens(8)
    request = Reading(tokens)
    eagle_learns(drafter, request, 0, 7)
    (draft,) = drafter.propose([request], [2], most_likely)
    parts = [eagle_streams(eagle_target(), tokens[:-1])[i] for i in (2, 3, 4)]
    ids, rows = SlowEagle(fields, tensors, eagle_target().embedding.double()).chain(
        parts, tokens[1:], 2
    )
    assert draft.ids == ids
    eagle_close(torch.cat(drafter.scored), rows)


def test_eagle_in_a_batch_is_eagle_alone(tmp_path):
    fields, tensors = tiny.eagle(norm_output=True)
    texts = [Reading(eagle_tokens(n, seed=n)) for n in (3, 11, 6)]
    together = eagle(tmp_path, fields, tensors)
    for text in texts:
        eagle_learns(together, text, 0, len(text.tokens) - 1)
    drafts = together.propose(texts, [3, 1, 4], most_likely)
    assert [len(draft.ids) for draft in drafts] == [3, 1, 4]
    rows = [[logits[i] for logits in together.scored[:1]] for i in range(3)]
    rows[0] += [together.scored[1][0], together.scored[2][0]]
    rows[2] += [together.scored[1][1], together.scored[2][1], together.scored[3][0]]
    for text, draft, own in zip(texts, drafts, rows):
        alone = eagle(tmp_path, fields, tensors)
        eagle_learns(alone, text, 0, len(text.tokens) - 1)
        assert alone.propose([text], [len(draft.ids)], most_likely)[0].ids == draft.ids
        eagle_close(torch.stack(own), torch.cat(alone.scored).double())


@pytest.mark.parametrize("ends", [(1, 2, 3, 13), (5, 9, 13), (12, 13)])
def test_eagle_learns_in_pieces_what_it_learns_at_once(tmp_path, ends):
    fields, tensors = tiny.eagle()
    request = Reading(eagle_tokens(14))
    whole, pieces = (eagle(tmp_path, fields, tensors) for _ in range(2))
    pieces.CHUNK = 1  # each piece goes into the cache by itself
    eagle_learns(whole, request, 0, 13)
    start = 0
    for end in ends:
        pieces.keep([request])
        eagle_learns(pieces, request, start, end)
        start = end
    assert pieces.held[request].computed >= ends[-2] - 1  # the last of each piece may wait
    drafts = [one.propose([request], [3], most_likely)[0].ids for one in (whole, pieces)]
    assert drafts[0] == drafts[1]
    eagle_close(torch.cat(pieces.scored), torch.cat(whole.scored).double())


@pytest.mark.parametrize("came", [0, 1, 2, 3])
def test_eagle_after_guesses_were_refused_is_as_if_there_had_been_none(tmp_path, came):
    fields, tensors = tiny.eagle()
    request = Reading(eagle_tokens(9))
    drafter, fresh = (eagle(tmp_path, fields, tensors) for _ in range(2))
    eagle_learns(drafter, request, 0, 8)
    (draft,) = drafter.propose([request], [3], most_likely)
    request.tokens += [*draft.ids[:came], 95 - draft.ids[came] if came < 3 else 7]
    eagle_learns(drafter, request, 8, 9 + came)
    eagle_learns(fresh, request, 0, 9 + came)
    drafter.scored.clear()
    drafts = [one.propose([request], [4], most_likely)[0].ids for one in (drafter, fresh)]
    assert drafts[0] == drafts[1]
    eagle_close(torch.cat(drafter.scored), torch.cat(fresh.scored).double())


@pytest.mark.parametrize("base", [1, 6])
def test_eagle_that_knows_nothing_of_the_beginning(tmp_path, base):
    fields, tensors = tiny.eagle()
    drafter, tokens = eagle(tmp_path, fields, tensors), eagle_tokens(12)
    request = Reading(tokens)
    eagle_learns(drafter, request, base, 11)
    (draft,) = drafter.propose([request], [3], most_likely)
    parts = [eagle_streams(eagle_target(), tokens[:-1])[i][base:] for i in (2, 3, 4)]
    slow = SlowEagle(fields, tensors, eagle_target().embedding.double())
    ids, rows = slow.chain(parts, tokens[base + 1 :], 3, base)
    assert draft.ids == ids
    eagle_close(torch.cat(drafter.scored), rows)


def test_eagle_guesses_ids_of_the_target_and_believes_in_no_other(tmp_path):
    fields, tensors = tiny.eagle(draft_vocab_size=5)
    drafter, request = eagle(tmp_path, fields, tensors), Reading(eagle_tokens(9))
    known = tensors["t2d"].nonzero()[:, 0]
    assert drafter.ids.tolist() == known.tolist() and tensors["d2t"].max() > 0
    eagle_learns(drafter, request, 0, 8)

    def rows(request, guesses):
        place = len(request.tokens) + len(guesses)
        params = SamplingParams(temperature=2.0, repetition_penalty=1.3, presence_penalty=0.5)
        params = params.with_defaults({})
        return Row(params, 5, place, request.tokens + guesses, None, 3, DRAFT)

    (draft,) = drafter.propose([request], [6], rows)
    assert len(draft.ids) == 6 and set(draft.ids) <= set(known.tolist())
    assert len(set(draft.ids)) > 1
    outside = torch.ones(EAGLE_VOCAB).index_fill(0, known, 0).bool()
    assert draft.beliefs.shape == (6, EAGLE_VOCAB) and (draft.beliefs[:, outside] == 0).all()
    assert torch.allclose(draft.beliefs.sum(1), torch.ones(6).double())
    assert (draft.beliefs[:, known] > 0).all()


def eagle_edited(tensors: dict, **changes) -> dict:
    """Tensors with some replaced, or, None, taken away."""
    changes = {name.replace("__", "."): x for name, x in changes.items()}
    return {name: x for name, x in (tensors | changes).items() if x is not None}


EAGLE_DOOR = {
    "fc": (
        lambda f, t: (f, eagle_edited(t, fc__weight=torch.zeros(EAGLE_WIDE, 64))),
        "fc.weight reads 64 numbers of a token, but 3 layers of the target have 96",
    ),
    "fc_rows": (
        lambda f, t: (f, eagle_edited(t, fc__weight=torch.zeros(8, 96))),
        r"fc.weight is \[8, 96\], config.json makes it \[32, 96\]",
    ),
    "vocabulary": (
        lambda f, t: (f | {"vocab_size": 95}, eagle_edited(t, t2d=t["t2d"][:95])),
        "vocab_size 95, but the target has 96 ids",
    ),
    "target": (
        lambda f, t: (f | {"target_hidden_size": 4096}, t), "target_hidden_size 4096, not 32",
    ),
    "missing": (
        lambda f, t: (f, eagle_edited(t, norm__weight=None)), "the checkpoint has no tensor norm.weight",
    ),
    "hidden_norm": (
        lambda f, t: (f, eagle_edited(t, midlayer__hidden_norm__weight=None)), "no tensor .*hidden_norm",
    ),
    "left": (
        lambda f, t: (f, eagle_edited(t, fc__bias=torch.zeros(EAGLE_WIDE))),
        "tensors that the model does not use: fc.bias",
    ),
    "shape": (
        lambda f, t: (f, eagle_edited(t, midlayer__self_attn__q_proj__weight=torch.zeros(EAGLE_WIDE, EAGLE_WIDE))),
        r"q_proj.weight is \[32, 32\], config.json makes it \[32, 64\]",
    ),
    "twice": (
        lambda f, t: (f, t | {"layers.0.hidden_norm.weight": torch.ones(EAGLE_WIDE)}),
        "tensors of the same layer by two names",
    ),
    "d2t": (lambda f, t: (f, eagle_edited(t, d2t=None)), "no tensor d2t"),
    "d2t_same": (
        lambda f, t: (f, eagle_edited(t, d2t=-torch.arange(40))),
        "d2t does not lead to 40 different ids below 96",
    ),
    "d2t_beyond": (
        lambda f, t: (f, eagle_edited(t, d2t=t["d2t"] + 90)), "40 different ids below 96",
    ),
    "d2t_below": (
        lambda f, t: (f, eagle_edited(t, d2t=t["d2t"] - 90)), "40 different ids below 96",
    ),
    "t2d": (
        lambda f, t: (f, eagle_edited(t, t2d=t["t2d"].roll(1))), "t2d does not mark the ids",
    ),
    "t2d_more": (
        lambda f, t: (f, eagle_edited(t, t2d=torch.ones(EAGLE_VOCAB, dtype=torch.bool))), "t2d does not mark",
    ),
    "both_norms": (
        lambda f, t: (f | {"fc_norm": True, "norm_before_fc": True}, t),
        "fc_norm and norm_before_fc: only one",
    ),
    "flag": (lambda f, t: (f | {"norm_output": "yes"}, t), "norm_output is 'yes', neither true"),
    "rope": (
        lambda f, t: (f | {"rope_scaling": {"rope_type": "longrope"}}, t),
        "rope scaling 'longrope' is not one of",
    ),
    "embedding": (
        lambda f, t: tiny.eagle(hidden_size=24), "no embed_tokens, and the target's is 32 wide, not 24",
    ),
    "ids": (
        lambda f, t: (f | {"eagle_aux_hidden_state_layer_ids": [2, 5, 8]}, t),
        r"layer_ids \[2, 5, 8\]: not ascending, of the target's 7 layers",
    ),
    "ids_order": (
        lambda f, t: (f | {"eagle_aux_hidden_state_layer_ids": [2, 5, 4]}, t), "not ascending",
    ),
    "ids_same": (
        lambda f, t: (f | {"eagle_aux_hidden_state_layer_ids": [2, 4, 4]}, t), "not ascending",
    ),
    "ids_embedding": (
        lambda f, t: (f | {"eagle_aux_hidden_state_layer_ids": [0, 3, 4]}, t), "not ascending",
    ),
    "ids_left": (
        lambda f, t: (f | {"eagle_aux_hidden_state_layer_ids": [1, 3, 7]}, t), "not ascending",
    ),
    "ids_words": (
        lambda f, t: (f | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": "low"}}, t),
        "low: not a list of layers",
    ),
    "config": (
        lambda f, t: (f | {"eagle_config": ["low"]}, t), "config.json is malformed",
    ),
    "layers": (lambda f, t: (f | {"num_hidden_layers": 2}, t), "num_hidden_layers 2: EAGLE-3 has"),
    "family": (
        lambda f, t: (f | {"model_type": "deepseek_v3"}, t),
        "model_type 'deepseek_v3' of its layer is not one of llama, mistral, qwen2, qwen3",
    ),
    "last": (
        lambda f, t: (f | {"eagle_config": {"use_aux_hidden_state": False}}, t),
        "use_aux_hidden_state false: it reads the last layer alone",
    ),
    "p_eagle": (
        lambda f, t: (f, t | {"mask_hidden": torch.zeros(1, 96)}), "a P-EAGLE head",
    ),
    "p_eagle_kind": (
        lambda f, t: (f | {"speculators_model_type": "peagle"}, t), "a P-EAGLE head",
    ),
    "p_eagle_flag": (lambda f, t: (f | {"parallel_drafting": True}, t), "a P-EAGLE head"),
}  # fmt: skip


@pytest.mark.parametrize("what", EAGLE_DOOR)
def test_eagle_refuses_by_name(tmp_path, what):
    change, said = EAGLE_DOOR[what]
    path = tiny.written(tmp_path, *change(*tiny.eagle()))
    with pytest.raises(ValueError, match=f"(?s){path}.*{said}"):
        speculative.drafter(f"eagle:{path}", eagle_target(), None)


def test_eagle_of_an_older_kind_or_of_no_kind_is_refused_by_name(tmp_path):
    fields, tensors = tiny.eagle(architectures=["LlamaForCausalLM"], draft_vocab_size=None)
    first = {n.replace("midlayer.", "layers.0."): x for n, x in tensors.items()}
    del first["layers.0.hidden_norm.weight"], first["layers.0.input_layernorm.weight"]
    first["fc.weight"] = torch.zeros(EAGLE_WIDE, 2 * EAGLE_WIDE)
    path = tiny.written(tmp_path, fields, first)
    with pytest.raises(ValueError, match="an EAGLE-1 or EAGLE-2 head, of the last layer alone"):
        speculative.drafter(f"eagle:{path}", eagle_target(), None)
    path = tiny.written(tmp_path, fields | {"architectures": ["EagleLlamaForCausalLM"]}, {})
    with pytest.raises(ValueError, match="an EAGLE-1 or EAGLE-2 head"):
        speculative.drafter(f"eagle:{path}", eagle_target(), None)
    flash = {"fc.weight": first["fc.weight"], "hidden_norm.weight": torch.ones(EAGLE_WIDE)}
    path = tiny.written(tmp_path, fields | {"architectures": ["DFlashDraftModel"]}, flash)
    with pytest.raises(ValueError, match=r"architectures \['DFlashDraftModel'\]: not an EAGLE-3"):
        speculative.drafter(f"eagle:{path}", eagle_target(), None)
    # by its tensors alone, as the first of these were published
    path = tiny.written(tmp_path, fields, tensors)
    assert isinstance(speculative.drafter(f"eagle:{path}", eagle_target(), None), speculative.Eagle)


def test_eagle_of_a_target_with_too_few_layers_must_say_which(tmp_path):
    path = tiny.written(tmp_path, *tiny.eagle())
    with pytest.raises(ValueError, match=r"so \[2, 2, 1\]: not ascending, of the target's 4 lay"):
        speculative.drafter(f"eagle:{path}", eagle_target(4), None)
    path = tiny.written(tmp_path, *tiny.eagle(eagle_aux_hidden_state_layer_ids=[2, 3, 4]))
    assert speculative.drafter(f"eagle:{path}", eagle_target(4), None).taps == (1, 2, 3)


def test_eagle_that_is_not_there_or_not_whole(tmp_path):
    with pytest.raises(ValueError, match="no config.json, so not a model folder"):
        speculative.drafter(f"eagle:{tmp_path}", eagle_target(), None)
    path = tiny.written(tmp_path, *tiny.eagle())
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-7])
    with pytest.raises(ValueError, match="truncated or not safetensors"):
        speculative.drafter(f"eagle:{path}", eagle_target(), None)
    with pytest.raises(ValueError, match="'eagle' is not ngram or .*eagle:PATH"):
        speculative.drafter("eagle", eagle_target(), None)


def test_eagle_in_16_bits(tmp_path):
    """A head is run in the target's numbers, whatever its own are."""
    fields, tensors = tiny.eagle()
    small = {name: x.half() if x.is_floating_point() else x for name, x in tensors.items()}
    path = tiny.written(tmp_path, fields, small)
    drafter = speculative.drafter(f"eagle:{path}", eagle_target(), None)
    assert drafter.fc.data.dtype == drafter.mlp_norm.dtype == torch.float32


# ---------------------------------------------------------------- what followed the last time


class Asking:
    """What a drafter sees of a request."""

    def __init__(self, tokens):
        self.tokens = list(tokens)


def looked_up(tokens, count=4, **settings):
    [draft] = speculative.NGram(**settings).propose([Asking(tokens)], [count], None)
    return draft.ids, draft.kind


def test_an_n_gram_copies_what_followed_it():
    assert looked_up([5, 6, 7, 8, 9, 5, 6]) == ([7, 8, 9, 5], 2)
    assert looked_up([5, 6, 7, 8, 9, 5, 6], 2) == ([7, 8], 2)


def test_the_longest_match_wins_though_a_shorter_one_is_nearer():
    assert looked_up([1, 2, 7, 9, 2, 8, 1, 2], 1) == ([7], 2)


def test_of_equally_long_matches_the_last_one_wins():
    assert looked_up([1, 2, 7, 1, 2, 8, 1, 2], 1) == ([8], 2)
    four = [1, 2, 3, 4]  # the first match is six long, and both count as four
    assert looked_up([6, 5, *four, 7, *four, 8, 6, 5, *four], 1) == ([8], 4)


def test_what_runs_into_itself_goes_on_and_on():
    assert looked_up([3, 1, 1], 3) == ([1, 1, 1], 1)
    assert looked_up([9, 4, 5, 6, 4, 5, 6, 4], 7) == ([5, 6, 4, 5, 6, 4, 5], 4)


def test_where_nothing_is_alike_there_is_no_guess():
    for tokens in ([7], [1, 2, 3], [1, 1, 2]):
        assert looked_up(tokens) == ([], 0)


def test_one_token_alike_is_enough_unless_more_are_asked_for():
    assert looked_up([1, 2, 3, 1], 1) == ([2], 1)
    assert looked_up([1, 2, 3, 1], 1, shortest=2) == ([], 0)
    assert looked_up([1, 2, 3, 1, 2], 1, shortest=2) == ([3], 2)


def test_how_much_is_alike_says_what_a_guess_is_worth():
    kinds = []
    for n in range(1, 40):
        alike = list(range(100, 100 + n))
        kinds.append(looked_up([1, *alike, 2, *alike], 1)[1])
    assert kinds == [1, 2, 3, 4, *[5] * 4, *[9] * 8, *[17] * 23]
    assert speculative.NGram().prior(0) == 0  # no match
    rates = [speculative.NGram().prior(kind) for kind in sorted(set(kinds))]
    assert rates == sorted(set(rates)) and 0 < rates[0] and rates[-1] < 1


def slowly(tokens, count, shortest):
    """The same by its definition: all places are compared, each with all tokens before it."""
    best, kept, alike = 0, None, 0
    for end in range(1, len(tokens)):
        n = 0
        while n < end and tokens[end - 1 - n] == tokens[-1 - n]:
            n += 1
        if n >= shortest and min(n, 4) >= best:
            best, kept, alike = min(n, 4), end, n
    if kept is None:
        return [], 0
    text = list(tokens)
    for _ in range(count):
        text.append(text[kept + len(text) - len(tokens)])
    return text[len(tokens) :], max(kind for kind in speculative.ALIKE if kind <= alike)


@pytest.mark.parametrize("letters", [1, 2, 3, 8])
def test_look_ups_are_what_comparing_everything_finds(letters):
    draw = random.Random(letters)
    for shortest in (1, 2, 4):
        drafter = speculative.NGram(shortest)
        requests = [Asking([draw.randrange(letters)]) for _ in range(3)]
        for _ in range(40):
            some = draw.sample(requests, draw.randrange(1, 4))
            counts = [draw.randrange(1, 9) for _ in some]
            drafts = drafter.propose(some, counts, None)
            for request, count, draft in zip(some, counts, drafts):
                assert (draft.ids, draft.kind) == slowly(request.tokens, count, shortest)
                assert draft.beliefs is None
                more = draft.ids[: draw.randrange(3)]  # some guesses come true
                request.tokens += more + [draw.randrange(letters)]


def test_a_look_up_leaves_the_tokens_alone():
    asking = Asking([1, 2, 3, 1])
    [draft] = speculative.NGram().propose([asking], [9], None)
    draft.ids.append(0)
    assert asking.tokens == [1, 2, 3, 1]


def test_of_a_text_that_begins_again_nothing_is_known():
    """1 2 was at its beginning once; what ended behind its end cannot be copied at all."""
    drafter, asking = speculative.NGram(), Asking([1, 2, 3, 4, 5, 6, 4])
    drafter.propose([asking], [2], None)
    for tokens in ([7, 8, 1, 2], [5]):
        asking.tokens = tokens
        assert drafter.propose([asking], [2], None)[0].ids == []


def test_n_grams_of_who_ended_are_forgotten():
    drafter = speculative.NGram()
    one, other = Asking([1, 2, 1]), Asking([1, 3, 1])
    drafter.propose([one, other], [1, 1], None)
    drafter.keep([other])
    assert list(drafter.known) == [other]
    drafter.keep([])
    assert not drafter.known


# ---------------------------------------------------------------- another model guesses


GOLDEN = Path(__file__).parent / "golden"
COLD = SamplingParams(temperature=0.0)


def at(params=COLD, seed=0, domain=TARGET):
    """What makes the row that the token after some guesses is drawn from."""

    def row(request, guesses):
        history = request.tokens + guesses
        return Row(params.with_defaults({}), seed, len(history), history, None, 2, domain)

    return row


def golden(family: str) -> model.Model:
    data = model.load(GOLDEN / family)
    return model.Model(data.config, data.tensors)


def guesser(own: model.Model, target=None, slots=3, longest=200) -> speculative.DraftModel:
    """A drafter whose cache is full of NaN: nothing is read that was not written."""
    drafter = speculative.DraftModel(target or own, own)
    drafter.open(slots, longest)
    tiny.garbage(drafter.cache)
    return drafter


def ready(drafter, requests):
    """Let it read until it could guess for all of them."""
    for _ in range(100):
        drafter.keep(requests)
        if all(drafter.most_for(r) for r in requests):
            return
    raise AssertionError("it never catches up")


def alone(own: model.Model, tokens: list[int], count: int, row=at()) -> list[int]:
    """What a model writes after some tokens, all of them computed anew for each."""
    guesses = []
    for _ in range(count):
        text = tokens + guesses
        cache = kv_cache.ContiguousCache(own.config.specs, 1, len(text))
        step = cache.prepare([(tiny.request(text), len(text))])
        hidden, _ = own(step.tokens, step.positions, step)
        made = row(Asking(tokens), guesses)
        if made.domain == DRAFT:
            p, _ = distribution(own.logits(hidden[-1:]), [made])
            [id] = draw(p, [noise_key(made.seed, made.domain, made.position)]).tolist()
        else:
            [id] = sample(own.logits(hidden[-1:]), [made])[0]
        guesses.append(id)
    return guesses


def drawn_text(own: model.Model, draw: random.Random, n: int) -> list[int]:
    return [draw.randrange(3, own.config.vocab) for _ in range(n)]


def passes_of(drafter, monkeypatch) -> list[int]:
    """The rows of each of its passes from now on."""
    passes, run = [], drafter.run

    def counted(state, tokens, step):
        passes.append(len(tokens))
        return run(state, tokens, step)

    monkeypatch.setattr(drafter, "run", counted)
    return passes


SLOW = ["qwen2_sliding", "qwen3", "qwen3_5_text", "deepseek_v3", "deepseek_v32", "gemma3"]


@pytest.mark.parametrize(
    "family, domain, seed",
    [("qwen3_5_text", TARGET, 5), ("deepseek_v32", DRAFT, 5)]
    + [
        pytest.param(family, domain, seed, marks=pytest.mark.slow)
        for family in SLOW
        for domain in (TARGET, DRAFT)
        for seed in (6, 7)
    ],
)
def test_guesses_are_what_the_model_writes_alone(family, domain, seed):
    """Requests join, go on by their guesses or otherwise, and leave."""
    own, draw = golden(family), random.Random(seed)
    drafter, running = guesser(own), []
    row = at(SamplingParams(temperature=0.8, top_k=8, presence_penalty=1.0), 9, domain)
    for turn in range(6):
        if turn % 3 == 2:
            running.pop(draw.randrange(len(running)))
        while len(running) < 3:
            running.append(Asking(drawn_text(own, draw, draw.randrange(1, 30))))
        ready(drafter, running)
        some = draw.sample(running, draw.randrange(1, 4))
        counts = [draw.randrange(1, 5) for _ in some]
        drafts = drafter.propose(some, counts, row)
        for request, count, draft in zip(some, counts, drafts):
            assert draft.ids == alone(own, request.tokens, count, row)
            request.tokens += draft.ids[: draw.randrange(count + 1)]
        for request in running:
            request.tokens += drawn_text(own, draw, draw.choice([1, 1, 2, 20]))


def test_who_wants_fewer_guesses_is_in_fewer_passes(monkeypatch):
    own = tiny.build()
    drafter, draw = guesser(own), random.Random(1)
    asking = [Asking(drawn_text(own, draw, 5)) for _ in range(3)]
    ready(drafter, asking)
    passes = passes_of(drafter, monkeypatch)
    drafts = drafter.propose(asking, [3, 1, 2], at())
    assert [len(draft.ids) for draft in drafts] == [3, 1, 2]
    assert passes == [15, 2, 1]  # what it has not read of each, then a row a guess


def test_a_long_prompt_is_read_in_parts_and_not_guessed_for_before(monkeypatch):
    own = tiny.build()
    drafter, draw = guesser(own), random.Random(2)
    monkeypatch.setattr(drafter, "CHUNK", 32)
    long, short = Asking(drawn_text(own, draw, 100)), Asking(drawn_text(own, draw, 6))
    passes = passes_of(drafter, monkeypatch)
    could = []
    for _ in range(4):
        drafter.keep([long, short])
        could.append((drafter.most_for(long), drafter.most_for(short)))
    assert passes == [32, 32, 32]
    assert could == [(0, 8), (0, 8), (8, 8), (8, 8)]
    drafts = drafter.propose([long, short], [2, 2], at())
    assert drafts[0].ids == alone(own, long.tokens, 2)
    assert drafts[1].ids == alone(own, short.tokens, 2)


def test_the_rows_of_a_round_are_shared_in_order(monkeypatch):
    own = tiny.build()
    drafter, draw = guesser(own), random.Random(2)
    monkeypatch.setattr(drafter, "CHUNK", 32)
    asking = [Asking(drawn_text(own, draw, n)) for n in (25, 40, 30)]
    drafter.keep(asking)
    assert [drafter.held[one].computed for one in asking] == [24, 8, 0]
    drafter.keep(asking)
    assert [drafter.held[one].computed for one in asking] == [24, 39, 1]


def test_guesses_that_came_true_are_not_computed_again(monkeypatch):
    own = tiny.build()
    drafter, asking = guesser(own), Asking([5, 6, 7])
    ready(drafter, [asking])
    [draft] = drafter.propose([asking], [4], at())
    passes = passes_of(drafter, monkeypatch)
    asking.tokens += [*draft.ids, 9]  # all came true, and one more
    [draft] = drafter.propose([asking], [4], at())
    assert passes == [2, 1, 1, 1]  # the last guess had no row yet
    assert draft.ids == alone(own, asking.tokens, 4)
    asking.tokens += [*draft.ids[:2], (draft.ids[2] + 1) % 96]
    [draft] = drafter.propose([asking], [1], at())
    assert passes[4:] == [1]
    assert draft.ids == alone(own, asking.tokens, 1)
    asking.tokens += draft.ids  # it alone: what was not computed is still to be
    assert drafter.propose([asking], [2], at())[0].ids == alone(own, asking.tokens, 2)


def test_a_model_with_states_reads_again_what_came_true(monkeypatch):
    own = golden("qwen3_5_text")
    drafter, asking = guesser(own), Asking([5, 6, 7])
    ready(drafter, [asking])
    [draft] = drafter.propose([asking], [4], at())
    passes = passes_of(drafter, monkeypatch)
    asking.tokens += [*draft.ids, 9]
    [draft] = drafter.propose([asking], [2], at())
    assert passes == [5, 1]
    assert draft.ids == alone(own, asking.tokens, 2)


def test_who_finds_no_slot_gets_one_when_another_leaves():
    own = tiny.build()
    drafter = guesser(own, slots=1)
    first, second = Asking([5, 6, 7]), Asking([8, 9])
    drafter.keep([first, second])
    assert (drafter.most_for(first), drafter.most_for(second)) == (8, 0)
    drafter.propose([first], [3], at())
    drafter.keep([second])  # ended, or preempted
    assert (drafter.most_for(first), drafter.most_for(second)) == (0, 8)
    assert drafter.propose([second], [3], at())[0].ids == alone(own, [8, 9], 3)


def test_longer_texts_than_it_can_read_are_not_guessed_for():
    own = tiny.build()
    drafter = guesser(own, slots=1, longest=40)
    long, other = Asking([5] * 40), Asking([8, 9])
    ready(drafter, [long])
    assert len(drafter.propose([long], [8], at())[0].ids) == 8  # beyond it, and there is room
    long.tokens.append(5)
    drafter.keep([long, other])
    assert (drafter.most_for(long), drafter.most_for(other)) == (0, 8)
    positions = own.config.positions
    assert drafter.slot_bytes(positions + 1000) == drafter.slot_bytes(positions)
    drafter.open(1, positions + 1000)
    assert drafter.longest == positions
    assert drafter.cache.nbytes == drafter.slot_bytes(positions)


def test_beliefs_are_what_guesses_were_drawn_from():
    own = tiny.build()
    drafter, asking = guesser(own), Asking([5, 6, 7])
    ready(drafter, [asking])
    row = at(SamplingParams(temperature=1.0, top_k=3, frequency_penalty=40.0), 3, DRAFT)
    [draft] = drafter.propose([asking], [5], row)
    assert draft.beliefs.shape == (5, 96)
    assert torch.allclose(draft.beliefs.sum(1), torch.ones(5, dtype=torch.float64))
    assert ((draft.beliefs > 0).sum(1) == 3).all()
    assert all(draft.beliefs[j, id] > 0 for j, id in enumerate(draft.ids))
    assert len(set(draft.ids)) == 5  # each is in the history of those after it
    assert draft.ids == alone(own, asking.tokens, 5, row)
    asking.tokens += draft.ids
    assert drafter.propose([asking], [5], at())[0].beliefs is None


@pytest.mark.parametrize("domain", [TARGET, DRAFT])
@pytest.mark.parametrize("fewer", [True, False])
def test_ids_that_only_one_of_the_two_has_are_never_guessed(fewer, domain):
    """Sizes are padded: 64 ids here, 96 there."""
    small, large = tiny.build(64), tiny.build(96, seed=1)
    own, target = (small, large) if fewer else (large, small)
    drafter, asking = guesser(own, target), Asking([95 if fewer else 5, 6, 7])
    ready(drafter, [asking])
    hot = at(SamplingParams(temperature=50.0, repetition_penalty=1.2), 1, domain)
    for _ in range(8):
        [draft] = drafter.propose([asking], [8], hot)
        assert len(draft.ids) == 8 and max(draft.ids) < 64
        if domain == DRAFT:
            assert draft.beliefs.shape == (8, target.config.vocab)
            assert draft.beliefs[:, 64:].sum() == 0
        asking.tokens += draft.ids[:3] + [95 if fewer else 63]


def test_logits_that_are_not_finite_are_no_guess():
    own = tiny.build()
    drafter, asking, other = guesser(own), Asking([5, 6, 7]), Asking([8])
    ready(drafter, [asking, other])
    own.embedding = own.embedding.clone()
    own.embedding[5] = torch.nan
    drafts = drafter.propose([asking, other], [3, 3], at())
    assert drafts[0].ids == [] and len(drafts[1].ids) == 3
    asking.tokens.append(8)
    assert drafter.propose([asking], [3], at(domain=DRAFT))[0].ids == []


def test_who_has_no_new_token_is_not_guessed_for_again():
    drafter, asking = guesser(tiny.build()), Asking([5, 6, 7])
    ready(drafter, [asking])
    drafter.propose([asking], [3], at())
    drafter.keep([asking])  # it was not in the step
    assert drafter.most_for(asking) == 0
    asking.tokens.append(9)
    assert drafter.most_for(asking) == 8


def spelled(texts: list[str], added=()) -> dict:
    vocab = {text: id for id, text in enumerate(texts)}
    more = [{"id": id, "content": text, "special": True} for id, text in added]
    return {"model": {"type": "BPE", "vocab": vocab, "merges": []}, "added_tokens": more}


def with_words(words, vocab=8) -> model.Checkpoint:
    data = model.random(model.tiny(vocab))
    data.tokenizer, data.name = words, f"of {vocab}"
    return data


def test_a_vocabulary_may_be_padded_but_is_one():
    plain = spelled(["a", "b", "c"])
    same = speculative._same_vocabulary
    same(with_words(plain), with_words(plain))
    same(with_words(plain), with_words(plain, 12))  # rows that no text has
    same(with_words(plain), with_words(spelled(["a", "b", "c", "d"])))  # one has more
    same(with_words(spelled(["a", "b"], [(2, "c")])), with_words(plain))  # added, or in it
    same(with_words(None), with_words(plain))
    same(with_words({}), with_words(None))
    cases = [
        (spelled(["a", "c", "b"]), 8, "id 1 is 'c', and 'b' in of 8; 2 of 3 differ"),
        (spelled(["a", "b"], [(2, "<end>")]), 8, "id 2 is '<end>', and 'c' in of 8; 1 of 3"),
        (None, 12, "its vocabulary has 12 ids, that of of 8 8"),
    ]
    for words, size, message in cases:
        with pytest.raises(ValueError) as refused:
            same(with_words(plain), with_words(words, size))
        assert message in str(refused.value)


def test_any_model_of_the_same_vocabulary_is_a_drafter(tmp_path):
    data = model.load(GOLDEN / "qwen3")
    target = model.Model(data.config, data.tensors)
    made = speculative.drafter(f"draft:{GOLDEN / 'qwen3'}", target, data)
    made.open(1, 50)
    asking = Asking([5, 6, 7])
    ready(made, [asking])
    assert made.propose([asking], [4], at())[0].ids == alone(target, [5, 6, 7], 4)
    assert made.dtype == made.model.embedding.dtype == target.embedding.dtype

    def refusal(name):
        with pytest.raises(ValueError) as refused:
            speculative.drafter(name, target, data)
        return str(refused.value)

    assert (
        refusal("draft")
        == refusal("draft:")[:20].replace("draft:", "draft") + refusal("draft")[19:]
    )
    nowhere = tmp_path / "nowhere.gguf"
    assert refusal(f"draft:{nowhere}") == f"speculative draft:{nowhere}: no such file"
    for kind in ("draft", "eagle", "dflash"):  # and no word of --model
        assert refusal(f"{kind}:none") == f"speculative {kind}:none: no such file or folder"
    assert refusal(f"draft:{tmp_path}").endswith(
        f"{tmp_path}: no config.json, so not a model folder"
    )
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF\x03")
    assert refusal(f"draft:{broken}").startswith(f"speculative draft:{broken}: ")


def test_guesses_of_which_not_all_is_known_wait():
    at_work, asking = speculative.Speculation(speculative.NGram()), Asking([1, 2, 3, 1])
    for came in ([2], [3, 9]):
        at_work.propose([asking], [3], 1, at())  # 2, 3, 1
        assert not at_work.acceptance.tried
        asking.tokens += came
    at_work.propose([asking], [3], 1, at())
    assert at_work.acceptance.tried == {(1, 0): 1, (1, 1): 1, (1, 2): 1}
    assert at_work.acceptance.right == {(1, 0): 1, (1, 1): 1, (1, 2): 0}
