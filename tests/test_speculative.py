"""speculative.py by itself: guesses verified, by every outcome of the coins; who guesses; what pays.

With the engine around it: test_speculation.py. Chi-squares are one-sided at 1e-6, seeds fixed.
"""

import math
import random
from collections import defaultdict
from itertools import product

import pytest
import torch

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
