"""Speculative decoding: several tokens from one pass, and the same ones.

The idea      A decode step reads all weights to make one token, and would read them no oftener
              for five. So someone cheap guesses the next tokens, and the model looks at all of
              them in one pass: each guess is a row, as if it were a chunk of a prompt. Where the
              model agrees, several tokens come out of one pass; at the first guess that it does
              not make itself, its own token takes the place of the rest. What comes out follows
              the model's distribution exactly, whoever guesses, and however badly: a bad guess
              costs rows, never the text. Rows are not free either, so a model of the cost says
              how many guesses are worth theirs: often none.

The data      tokens   ... the cat sat on           draft   the mat and
              rows        | on  | the | mat | and |         one pass, positions s .. s + 3
              target        the   mat   .     (not reached)
              draft         the   mat   and
                            ok    ok    ^ not equal: "." is emitted, "and" and its row are dropped
              one round: 2 accepted, 1 corrected; were all 3 accepted, a 4th came as a bonus

Invariants    1. rule "sample": each row draws by its own noise what it would have drawn anyway,
                 and a guess is accepted if it is just that: same seed, same tokens
              2. rule "reject": a guess d, drawn from q, is accepted with min(1, p(d) / q(d)), else
                 a token is drawn from what p has more than q: each token's law is p. What was
                 certain, and at temperature 0 all, is drawn and compared as in 1
              3. p is what sampling draws by: after penalties, bias, mask, temperature, filters
              4. a row's history and mask hold the guesses before it
              5. whether and where a draft ends depends on no coin that verifies it, and of what a
                 guess is only with the guess itself still in the draft
              6. a drafter's slot belongs to a running request, and to one

Units         tokens, rows; seconds; rates from 0 to 1.
Article       "Speculative Decoding from First Principles"
Try           python speculative.py                 rounds, acceptance, what it is worth
              python speculative.py --agreement 0.3 --costs gpu --requests 64
              python tests/mutations.py speculative.py   change it: known bugs, each with its test
Imports       kernels, kv_cache, model, sample.
"""

import json
import math
import operator
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

import safetensors
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor

import kernels
import kv_cache
import model as models
from kv_cache import LayerSpec, Segment, Step
from model import Checkpoint, Config, Model
from sample import (
    ACCEPT, DRAFT, RESIDUAL, TARGET, Row, SamplingParams, distribution, draw, logprobs, noise_key,
    sample, uniform,
)  # fmt: skip

# ---------------------------------------------------------------- verification


@dataclass
class Draft:
    """Guesses for one request.

    ids      of the target's vocabulary; one outside it never stays
    beliefs  (k, V), the distribution that each was drawn from; None: each was certain, whatever
             the noise
    kind     drafts of a kind are accepted alike: of an n-gram how long it is
    """

    ids: list[int] = field(default_factory=list)
    beliefs: Tensor | None = None
    kind: int = 0

    def cut(self, n: int) -> "Draft":
        return Draft(self.ids[:n], None if self.beliefs is None else self.beliefs[:n], self.kind)


RULES = ("sample", "reject")


def verify(logits: Tensor, rows: list[Row], drafts: list[Draft], rule="sample") -> list[list]:
    """Of each draft the guesses that stay, and one token more: lists of (id, logprobs, took).

    logits (R, V), rows: those of the drafts side by side, 1 + k of a draft of k; row j has its
    first j guesses in its history. 1 to 1 + k tokens come out of each: logprobs and what masks
    took as `sample.sample` has them, and the id None, if that is the first, where nothing can be
    drawn.

    rule  "sample": draw at each row, stay while the guess is what was drawn. "reject": Leviathan
          et al. 2211.17192, Chen et al. 2302.01318; accepts more of guesses that were drawn. Of
          those that were certain it would accept as many as "sample", and does what that does

    Example: drafts [7, 8], drawn 7, 9, 4: out come 7 and 9.
    """
    spans, at = [], 0  # the rows of each draft
    for draft in drafts:
        spans.append(range(at, at + 1 + len(draft.ids)))
        at = spans[-1].stop
    assert len(rows) == at, f"{len(rows)} rows for drafts of {at}"
    judges = [_judge(rule, draft, rows[span.start]) for draft, span in zip(drafts, spans)]
    result: list[list] = [[] for _ in drafts]
    for judge in (_compare, _reject):
        mine = [i for i, one in enumerate(judges) if one is judge]
        own = [row for i in mine for row in spans[i]]
        if not own:
            continue
        part = logits if len(own) == len(rows) else logits[own]
        stays = judge(part, [rows[row] for row in own], [drafts[i] for i in mine])
        for i, came in zip(mine, stays):
            # what cannot be drawn is for the next step to find, if something comes before it
            result[i] = came[:-1] if len(came) > 1 and came[-1][0] is None else came
    return result


def _judge(rule: str, draft: Draft, row: Row):
    """What verifies a draft: coins only where they accept more than the target's own draws."""
    drawn = draft.beliefs is not None and len(draft.ids) > 0
    by_coins = rule == "reject" and drawn and row.params.temperature > 0
    return _reject if by_coins else _compare


def _compare(logits: Tensor, rows: list[Row], drafts: list[Draft]) -> list[list]:
    """Draw at every row; guesses stay as long as they are just that."""
    drawn, at, result = list(zip(*sample(logits, rows))), 0, []
    for draft in drafts:
        own = drawn[at : at + 1 + len(draft.ids)]
        at += len(own)
        result.append(own[: 1 + agreed(draft.ids, [id for id, *_ in own])])
    return result


def agreed(guesses: list[int], ids: list[int]) -> int:
    """How many of the first guesses are just these ids."""
    pairs = zip(guesses, ids)
    most = min(len(guesses), len(ids))
    return next((j for j, (guess, id) in enumerate(pairs) if guess != id), most)


def _reject(logits: Tensor, rows: list[Row], drafts: list[Draft]) -> list[list]:
    """Guesses stay while their coins fall below their chances; at the first that goes, and after
    the last, what p has more than q is drawn from. The last row has no guess: its q is 0."""
    p, took = distribution(logits, rows)
    q = torch.cat([F.pad(believed(draft, p.shape[1], p.device), (0, 0, 0, 1)) for draft in drafts])
    ids = [id for draft in drafts for id in [*draft.ids, -1]]
    chances = chance(share(p, ids), share(q, ids)).tolist()
    coins = uniform([noise_key(row.seed, ACCEPT, row.position) for row in rows], ids)
    goes = [coin >= chance for coin, chance in zip(coins, chances)]
    firsts = [0, *accumulate(1 + len(draft.ids) for draft in drafts)][:-1]
    ends = [goes.index(True, first) for first in firsts]
    keys = [noise_key(rows[end].seed, RESIDUAL, rows[end].position) for end in ends]
    drawn = draw(residual(p[ends], q[ends]), keys).tolist()
    result = []
    for first, end, id in zip(firsts, ends, drawn):
        own, came = slice(first, end + 1), [*ids[first:end], id if id >= 0 else None]
        result.append(list(zip(came, logprobs(logits[own], rows[own], came), took[own])))
    return result


def share(law: Tensor, ids: list[int]) -> Tensor:
    """What each row of a law (R, V) has of its id, 0 of one outside the vocabulary: (R,)."""
    inside = [0 <= id < law.shape[1] for id in ids]
    places = torch.tensor([id if x else 0 for id, x in zip(ids, inside)], device=law.device)
    found = law.gather(1, places[:, None])[:, 0]
    return found.masked_fill(~torch.tensor(inside, device=law.device), 0)


def chance(p: Tensor, q: Tensor) -> Tensor:
    """The chance that a guess stays, by what p and q have of it: min(1, p / q); 0 if p is 0."""
    return (p / q).clamp(max=1).nan_to_num(0)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """What p has more than q, made a distribution; p itself where that is nothing: (R, V)."""
    more = (p - q).clamp(min=0)
    total = more.sum(-1, keepdim=True)
    return torch.where(total > 0, more / total, p)


def believed(draft: Draft, vocab: int, device) -> Tensor:
    """The distributions that guesses were drawn from: (k, V).

    One that cannot be true, being none or having nothing of the guess, is as if the guess had
    been certain: that is fair whatever it came from. Another vocabulary's is cut or filled up.
    """
    q = draft.beliefs.to(device, torch.float64)
    sound = (q >= 0).all(-1) & ((q.sum(-1) - 1).abs() < 1e-4) & (share(q, draft.ids) > 0)
    ids = torch.tensor(draft.ids, device=device)[:, None]
    certain = (ids == torch.arange(vocab, device=device)).double()
    return torch.where(sound[:, None], F.pad(q, (0, vocab - q.shape[1])), certain)


# ---------------------------------------------------------------- who guesses

MOST = 64  # guesses a round, of any drafter


class Drafter:
    """Guesses what comes next: what all of them answer, and how one that needs nothing does.

    The engine calls `learn` after each step for each request in it, `propose` before the next
    plan for those it wants guesses for, and `keep` with all that run, so that what it holds for
    others goes. `rows(request, guesses)` is the Row that the token after them is drawn from.
    """

    name = "nobody"
    most = 8  # guesses a round
    taps: tuple[int, ...] = ()  # layers of the target after which it reads the residual stream
    hidden = False  # whether it reads the target's final hidden state
    free = False  # guesses cost nothing: they are made first, and counted off against rows then
    parallel = False  # all guesses of a round take as long as one

    def slot_bytes(self, max_len: int) -> int:
        """Of its cache, for a request of so many tokens."""
        return 0

    def open(self, slots: int, max_len: int):
        """Make its cache, for so many requests of so many tokens."""

    def prior(self, kind: int) -> float:
        """How often a guess of such a draft is right, before anything is known."""
        return 0.6

    def learn(self, request, start: int, features: list[Tensor]):
        """What the target computed at positions `start`.. of a request, of rows that stay: the
        residual stream after each of `taps`, in their order, then, if wanted, the final hidden
        state, (n, E) each. Copies: they are the drafter's to keep."""

    def most_for(self, request) -> int:
        """Most guesses that it could make for a request now."""
        return self.most

    def propose(self, requests: list, counts: list[int], rows) -> list[Draft]:
        """Drafts of at most so many guesses each, 1 or more."""
        return [Draft() for _ in requests]

    def keep(self, requests: list):
        """Hold nothing for any other request."""


class NGram(Drafter):
    """Prompt lookup (Saxena 2023): what followed the last time that the last few tokens were just
    these. The longest match wins, of equally long ones the most recent; beyond `LONGEST` tokens
    all count as equally long. Special tokens are tokens like others: where a turn ends, the one
    after it often begins as the last one did, and a guess that ends the text is cut behind it.

    Example: tokens 5 6 7 8 9 5 6: 5 6 was there before, and 7 8 9 5 6 came then.
    """

    name, most, free = "ngram", 16, True
    LONGEST = 4  # tokens that are looked up; what a match is worth depends on how far back it goes

    def __init__(self, shortest: int = 1):
        """shortest: tokens. One alike is seldom worth a row, and `choose` knows when it is."""
        self.shortest = shortest
        self.known: dict = {}  # request -> (tokens looked at, n-gram -> where its last one ended)

    def propose(self, requests, counts, rows):
        return [self._look_up(r, r.tokens, count) for r, count in zip(requests, counts)]

    def prior(self, kind):
        return ALIKE.get(kind, 0.0)  # 0: nothing is alike, and there is no guess

    def _look_up(self, request, tokens: list[int], count: int) -> Draft:
        done, ends = self.known.get(request, (0, {}))
        if done > len(tokens):  # it began again
            done, ends = 0, {}
        self._enter(tokens, done, ends)
        self.known[request] = len(tokens), ends
        end = self._match(tokens, ends)
        if end is None:
            return Draft()
        ids = tokens[end : end + count]
        while len(ids) < count:  # it runs into what it copies: on and on
            ids += ids[: count - len(ids)]
        return Draft(ids, kind=self._kind(tokens, end))

    def _enter(self, tokens: list[int], done: int, ends: dict):
        """Enter the n-grams that end before the last token: later ones in the place of earlier."""
        for n in range(self.shortest, self.LONGEST + 1):
            first = max(done - n, 0)  # of which the end is not known yet
            grams = zip(*(tokens[first + j :] for j in range(n)))
            ends.update(zip(grams, range(first + n, len(tokens))))

    def _match(self, tokens: list[int], ends: dict) -> int | None:
        """Where the longest known n-gram at the end of tokens ended before."""
        for n in range(self.LONGEST, self.shortest - 1, -1):
            if (end := ends.get(tuple(tokens[-n:]))) is not None:
                return end
        return None

    def _kind(self, tokens: list[int], end: int) -> int:
        """The key of `ALIKE` for as many tokens as are alike before both places."""
        n, most = 0, min(end, max(ALIKE))
        while n < most and tokens[end - 1 - n] == tokens[-1 - n]:
            n += 1
        return max(kind for kind in ALIKE if kind <= n)

    def keep(self, requests):
        kept = set(requests)
        for request in [r for r in self.known if r not in kept]:
            del self.known[request]


# Tokens alike, or more, up to the next -> how often the next one is alike too: about what it is in
# English prose and in Python, in the tokens of SmolLM2.
ALIKE = {1: 0.15, 2: 0.3, 3: 0.4, 4: 0.5, 5: 0.6, 9: 0.8, 17: 0.9}


# ---------------------------------------------------------------- when it pays


class Costs:
    """How long a step takes here, by its rows: measured at a few sizes, straight between them,
    and corrected by what steps take since.

    apart  seconds more for each different number of guesses: requests of as many attend together
    """

    def __init__(self, points: dict[int, float], apart: float = 0.0):
        self.rows = sorted(points)
        # One of fewer rows is not slower: what else the machine does only makes steps longer.
        self.seconds = [min(points[n] for n in self.rows[i:]) for i in range(len(self.rows))]
        self.apart = apart
        self.between: dict[int, float] = {}  # rows -> seconds, of what was asked for before
        self.off = [1.0, 1.0]  # times as long as measured: without guesses, and with some

    def line(self) -> str:
        """What was measured, for people."""
        shown = [(n, 1e3 * s) for n, s in zip(self.rows, self.seconds) if n in (1, 4, 16, 48)]
        times = ", ".join(f"{ms:.1f} with {n}" for n, ms in shown)
        return f"steps    ms by rows: {times} (timed now, to know what guesses cost)"

    def step_s(self, rows: int, parts: int = 0) -> float:
        """parts: different numbers of guesses that its requests have, 0 apart.

        Example: points 1: 10 ms, 3: 14 ms. A step of 2 rows takes 12 ms."""
        return self._measured(rows, parts) * self.off[parts > 0]

    def _measured(self, rows: int, parts: int) -> float:
        if rows not in self.between:
            self.between[rows] = self._straight(rows)
        return self.between[rows] + parts * self.apart

    def _straight(self, rows: int) -> float:
        x, y = self.rows, self.seconds
        rows = max(rows, x[0])  # fewer than were measured take as long
        if len(x) == 1:
            return y[0] * rows / x[0]
        i = min(max(bisect_left(x, rows), 1), len(x) - 1)
        slope = (y[i] - y[i - 1]) / (x[i] - x[i - 1])
        return y[i - 1] + slope * (rows - x[i - 1])

    def saw(self, rows: int, parts: int, seconds: float):
        """Such a step took so long. With nothing seen of guesses, both go the same way."""
        ratio = min(max(seconds / self._measured(rows, parts), 0.5), 2.0)
        self.off[parts > 0] += 0.1 * (ratio - self.off[parts > 0])
        if not parts:
            self.off[1] += 0.02 * (self.off[0] - self.off[1])


class Acceptance:
    """How often a guess was right, given that all before it in its draft were: by the draft's
    kind and the guess's place. A place with little behind it is like the one before it; and a
    request is like all others, but for its own luck: right ones of its own, against expected."""

    WEIGHT, MEMORY = 4.0, 200.0  # guesses that the prior counts for; after which old ones fade
    OWN = 32.0  # guesses of a request after which its older ones fade

    def __init__(self, prior=lambda kind: 0.5):
        self.prior = prior
        self.tried: dict[tuple[int, int], float] = {}
        self.right: dict[tuple[int, int], float] = {}
        self.own: dict[object, tuple[float, float]] = {}  # request -> right, and expected
        self.known: dict[int, list[float]] = {}  # kind -> its rates, until more is counted

    def count(self, kind: int, right: int, wrong: bool, request=None):
        """The first `right` guesses were right, and the one after them wrong, or none came."""
        if request is not None:
            own, expected = self.own.get(request, (0.0, 0.0))
            fade = 1 - min((right + wrong) / self.OWN, 1)
            expected = fade * expected + sum(self.rates(kind, right + wrong))
            self.own[request] = fade * own + right, expected
        self.known.pop(kind, None)
        for j in range(right + wrong):
            tried = self.tried.get((kind, j), 0.0)
            fade = 1.0 if tried < self.MEMORY else 1 - 1 / self.MEMORY
            self.tried[kind, j] = fade * tried + 1
            self.right[kind, j] = fade * self.right.get((kind, j), 0.0) + (j < right)

    def rates(self, kind: int, most: int) -> list[float]:
        """Of anyone's guesses 1, 2, ... `most`, each given that those before it were right."""
        rates = self.known.setdefault(kind, [])
        for j in range(len(rates), most):
            tried, right = self.tried.get((kind, j), 0.0), self.right.get((kind, j), 0.0)
            rate = rates[-1] if rates else self.prior(kind)
            rates.append((right + self.WEIGHT * rate) / (tried + self.WEIGHT))
        return rates[:most]

    def survival(self, kind: int, most: int, request=None) -> list[float]:
        """The chance that guess 1, 2, ... `most` is accepted with all before it."""
        right, expected = self.own.get(request, (0.0, 0.0))
        luck = (right + self.WEIGHT) / (expected + self.WEIGHT)
        rates = [min(rate * luck, max(rate, 0.98)) for rate in self.rates(kind, most)]
        return list(accumulate(rates, operator.mul))


def choose(
    costs: Costs, chances: list[list[float]], sampled: int, rows: int, guessing_s=lambda n: 0.0
):
    """How many guesses to verify of each draft: those that are worth most, as long as requests
    gain by it. Gives the counts, and what they lead to expect: (tokens, seconds) of the step.

    A step is longer by its guesses for everyone in it, also for who has none. So what counts is
    how many times as fast each request gets on, on the (geometric) average over all: nobody pays
    for another's speed more than that one gains (proportional fairness, Kelly 1998).

    chances: of each draft as from `survival`; sampled: requests that the step samples from; rows:
    of the step without guesses; guessing_s(n): seconds to make n guesses for each request.

    Example: rows 1, 2, 3 take 10, 14, 18 ms and the chances are 0.8, 0.3: 1 token in 10 ms, 1.8
    in 14, 2.1 in 18. One guess it is. Beside three requests without guesses it would be none: 1.8
    times as fast is less than 1.4 times as slow, four times.
    """
    order = []
    for r, own in enumerate(chances):
        tokens = 1.0
        for j, chance in enumerate(own):
            order.append((-math.log1p(chance / tokens), j, r))
            tokens += chance
    order.sort()
    plain_s, gain, tokens = costs.step_s(rows), 0.0, float(sampled)
    found, best = (0, (tokens, plain_s)), sampled * math.log(MARGIN)
    lengths = [0] * (1 + max(map(len, chances), default=0))  # how many drafts have each
    longest, parts, making_s = 0, 0, 0.0
    for m, (less, j, r) in enumerate(order, 1):  # a draft of j gets one more
        gain, tokens = gain - less, tokens + chances[r][j]
        if j == longest:
            longest, making_s = j + 1, guessing_s(j + 1)
        parts += not lengths[j + 1]
        lengths[j + 1] += 1
        if j:
            lengths[j] -= 1
            parts -= not lengths[j]
        seconds = costs.step_s(rows + m, parts) + making_s
        score = gain - sampled * math.log(seconds / plain_s)
        if score > best:
            best, found = score, (m, (tokens, seconds))
    chosen = Counter(r for _, _, r in order[: found[0]])
    return [chosen[r] for r in range(len(chances))], found[1]


SIZES = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 24, 32, 48)  # rows of the steps that are measured
MARGIN = 1.02  # times as fast, or guesses are not worth their noise
PROBE = 64  # rounds without a guess, after which a drafter is asked for one


@dataclass
class Tally:
    """What came of it: of a request, or of an engine."""

    rounds: int = 0  # steps in which a request was sampled
    drafts: int = 0  # of these, with guesses
    guesses: int = 0
    accepted: int = 0
    tokens: int = 0
    reached: list[int] = field(default_factory=list)  # drafts with a guess at each place
    stayed: list[int] = field(default_factory=list)  # of which it was accepted
    plain_s: float = 0.0  # that as many tokens would take without guesses
    spent_s: float = 0.0
    expected_plain_s: float = 0.0  # the same by what was expected before each step
    expected_s: float = 0.0

    def add(self, guesses: int, accepted: int, tokens: int):
        self.rounds += 1
        self.drafts += guesses > 0
        self.guesses += guesses
        self.accepted += accepted
        self.tokens += tokens
        more = guesses - len(self.reached)
        self.reached += [0] * more
        self.stayed += [0] * more
        for j in range(guesses):
            self.reached[j] += 1
            self.stayed[j] += j < accepted

    @property
    def a_round(self) -> float:
        """Tokens a round, the one that needs no guess among them."""
        return self.tokens / max(self.rounds, 1)

    @property
    def usage(self) -> dict[str, int]:
        """For Output.usage: steps it was sampled in, guesses verified, and those that stayed."""
        return {"rounds": self.rounds, "guesses": self.guesses, "guesses_accepted": self.accepted}

    @property
    def speedup(self) -> float:
        """Against the same steps without guesses."""
        return self.plain_s / self.spent_s if self.spent_s else 1.0

    @property
    def expected_speedup(self) -> float:
        return self.expected_plain_s / self.expected_s if self.expected_s else 1.0


class Speculation:
    """A drafter at work: how many guesses it is asked for, and what came of them.

    rule   see `verify`
    fixed  guesses for everyone in every round; None: as many as `choose` finds worth it
    """

    def __init__(self, drafter: Drafter, rule: str = "sample", fixed: int | None = None):
        self.drafter, self.rule, self.fixed = drafter, rule, fixed
        self.most = drafter.most if fixed is None else min(fixed, drafter.most)
        self.costs: Costs | None = None
        self.acceptance = Acceptance(drafter.prior)
        self.drafts: dict = {}  # request -> the Draft that the next step verifies
        self.watched: dict = {}  # request -> (tokens before it, a Draft of which not all is known)
        self.unasked = 0  # rounds since the drafter was last asked
        self.guess_s = 0.0  # to make a guess for each request, or a block of them
        self.draft_s = 0.0  # that the last `propose` took
        self.asking_s = 0.0  # of this what was not for guesses, as a rule
        self.expected = (0.0, 0.0)  # tokens and seconds of the next step
        self.tally = Tally()
        self.came = 0  # tokens out of the last step

    def learn(self, request, start: int, features: list[Tensor]):
        self.drafter.learn(request, start, features)

    def keep(self, requests: list):
        """Forget all others."""
        self.drafter.keep(requests)
        kept = set(requests)
        for known in (self.drafts, self.watched, self.acceptance.own):
            for request in [r for r in known if r not in kept]:
                del known[request]

    def propose(self, requests: list, room: list[int], rows: int, make_row) -> list[Draft]:
        """Drafts for requests that the next step samples from, at most `room` guesses each.

        rows: of the next step, without guesses. make_row: see Drafter.propose.
        """
        began, self.came = time.perf_counter(), 0
        most = [min(n, self.most, self.drafter.most_for(r)) for r, n in zip(requests, room)]
        asked = [i for i, n in enumerate(most) if n > 0]
        drafts = [Draft() for _ in requests]
        if self.drafter.free:
            self._ask(drafts, asked, requests, most, make_row)
            for request, draft in zip(requests, drafts):
                self._watch(request, draft)
            counts = self._counts(drafts, requests, [len(draft.ids) for draft in drafts], rows)
            drafts = [draft.cut(n) for draft, n in zip(drafts, counts)]
        else:
            counts = self._counts(drafts, requests, most, rows)
            asked = [i for i in asked if counts[i]]
            self._ask(drafts, asked, requests, counts, make_row)
        self.draft_s = time.perf_counter() - began
        guessed = self._guessing_s(max((len(draft.ids) for draft in drafts), default=0))
        self.asking_s += 0.1 * (max(self.draft_s - guessed, 0.0) - self.asking_s)
        self.drafts = {r: draft for r, draft in zip(requests, drafts) if draft.ids}
        return drafts

    def _ask(self, drafts: list[Draft], asked: list[int], requests, counts, make_row):
        if not asked:
            return
        began = time.perf_counter()
        some = [counts[i] for i in asked]
        made = self.drafter.propose([requests[i] for i in asked], some, make_row)
        for i, draft, most in zip(asked, made, some):
            drafts[i] = draft.cut(most)
        each = (time.perf_counter() - began) / (1 if self.drafter.parallel else max(some))
        if not self.drafter.free:
            self.guess_s = 0.8 * self.guess_s + 0.2 * each if self.guess_s else each

    def _counts(self, drafts: list[Draft], requests, most: list[int], rows: int) -> list[int]:
        each = zip(drafts, most, requests)
        chances = [self.acceptance.survival(d.kind, n, request) for d, n, request in each]
        if self.costs is None or not drafts:
            self.expected = 0.0, 0.0
            return most
        sampled = len(drafts)
        if self.fixed is not None:
            tokens = sampled + sum(map(sum, chances))
            took = self.costs.step_s(rows + sum(most), len({*most} - {0}))
            self.expected = tokens, took + self._guessing_s(max(most, default=0))
            return most
        counts, self.expected = choose(self.costs, chances, sampled, rows, self._guessing_s)
        self.unasked = 0 if any(counts) or self.drafter.free else self.unasked + 1
        if self.unasked > PROBE:  # what is never tried is never known to pay
            self.unasked = 0
            counts = [min(n, 1) for n in most]
        return counts

    def _guessing_s(self, guesses: int) -> float:
        return self.guess_s * (guesses > 0 if self.drafter.parallel else guesses)

    def _watch(self, request, draft: Draft):
        """Learn how good guesses are from what came, whether they were verified or not: they
        were certain, so they are right if they are what came."""
        if request in self.watched:
            position, old = self.watched[request]
            came = request.tokens[position:]
            right = agreed(old.ids, came)
            if right == len(came) < len(old.ids):
                return  # the rest is not known yet
            self.acceptance.count(old.kind, right, right < len(old.ids), request)
            del self.watched[request]
        if draft.ids:
            self.watched[request] = len(request.tokens), draft

    def verify(self, logits: Tensor, rows: list[Row], requests: list) -> list[list]:
        """`verify` of requests, each with as many rows as it has guesses, and one more; what is
        sampled several times has none, and is in there as often."""
        drafts = [self.drafts.get(r, Draft()).cut(len(r.draft)) for r in requests]
        return verify(logits, rows, drafts, self.rule)

    def count(self, request, guesses: int, right: int, tokens: int):
        """A round of a request: of its guesses how many were right, and how many tokens stay."""
        self.tally.add(guesses, min(right, tokens), tokens)
        self.came += tokens
        if guesses and not self.drafter.free:
            self.acceptance.count(0, right, right < guesses, request)

    def account(self, seconds: float, guesses: list[int]):
        """A step without prompts: how long it took, and how many guesses it verified of each
        request; against as many tokens without guesses."""
        if self.costs is None:
            return
        sampled, tokens = len(guesses), self.came
        self.costs.saw(sampled + sum(guesses), len({*guesses} - {0}), seconds)
        t, plain_s = self.tally, self.costs.step_s(sampled) / sampled
        t.plain_s += tokens * plain_s
        t.spent_s += seconds + self.draft_s
        t.expected_plain_s += self.expected[0] * plain_s
        t.expected_s += self.expected[1] + self.asking_s

    @property
    def begins_cold(self) -> bool:
        """Whether it lacks what the target computed of a prefix that was found in the cache: then
        fewer guesses are right, and the text is the same."""
        reads = bool(self.drafter.taps or self.drafter.hidden)
        return reads and self.drafter.slot_bytes(1) > 0

    def lines(self) -> list[str]:
        """What people want to know."""
        t = self.tally
        share = f" ({t.accepted / t.guesses:.0%})" if t.guesses else ""
        lines = [
            f"guesses  {self.drafter.name}: {t.accepted} of {t.guesses} accepted{share},"
            f" {t.a_round:.2f} tokens a round in {t.rounds} rounds, {t.drafts} with guesses"
        ]
        if t.spent_s and t.expected_s:
            lines.append(
                f"speed-up {t.speedup:.2f} times plain decoding: {1e3 * t.spent_s / t.tokens:.1f} ms"
                f" a token, by its own measure {1e3 * t.plain_s / t.tokens:.1f} without guesses;"
                f" {t.expected_speedup:.2f} times was expected"
            )
        return lines


# ---------------------------------------------------------------- drafters with a cache of their own


class Cached(Drafter):
    """A drafter with a cache of its own: contiguous, a slot for each request that it holds. Who
    finds no slot free is not guessed for. A subclass that makes one guess after another has

        _catch_up(requests) -> what `run` gives of the last row of each, all known rows computed
        run(state, tokens, step) -> (T, D) to go on from, (T, E) to score
        score(x) -> logits (R, V)            of the target's vocabulary, -inf where it has no id
    """

    CHUNK = 512  # rows of a request that wait before they are computed without being asked for

    def __init__(self, target: Model, specs: tuple[LayerSpec, ...]):
        self.target, self.specs = target, specs
        self.device, self.dtype = target.embedding.device, target.embedding.dtype
        self.held: dict[object, Held] = {}

    def slot_bytes(self, max_len: int) -> int:
        return sum(kv_cache.block_bytes(s, max_len + MOST, self.dtype.itemsize) for s in self.specs)

    def open(self, slots: int, max_len: int):
        self.slots = kv_cache.Slots(slots)
        self.cache = kv_cache.ContiguousCache(
            self.specs, slots, max_len + MOST, self.device, self.dtype
        )

    def hold(self, request, base: int = 0) -> "Held | None":
        """A request's place, which begins at its position `base`; None: there is none left."""
        if request not in self.held:
            held = Held(base)
            if not self.slots.grow(held, 0):
                return None
            self.held[request] = held
        return self.held[request]

    def drop(self, request):
        self.slots.release(self.held.pop(request))

    def keep(self, requests):
        kept = set(requests)
        for request in [r for r in self.held if r not in kept]:
            self.drop(request)

    def learn(self, request, start, features):
        if request in self.held and self.held[request].seen != start:  # some were not for it
            self.drop(request)
        held = self.hold(request, start)
        if held is not None and len(features[0]):
            held.features.append(features)
            held.pending += len(features[0])

    def prepare(self, work: list[tuple["Held", list[int]]]) -> Step:
        """Rows for the next ids of some requests, after what is computed of each; of each the
        last one is a sample row. Moves `computed` on."""
        tokens, positions, last, segments = [], [], [], []
        for held, ids in work:
            segments.append(Segment(held.slot, len(tokens), len(ids), held.computed))
            positions += range(held.base + held.computed, held.base + held.computed + len(ids))
            tokens += ids
            last.append(len(tokens) - 1)
            held.computed += len(ids)
        tensors = [torch.tensor(x, device=self.device) for x in (tokens, positions, last)]
        return Step(self.cache, *tensors, segments)

    def propose(self, requests, counts, rows):
        """One pass for each guess, over those that want another. What guesses leave in the cache
        lies beyond `computed`; linear layers are given their states back."""
        state, x = self._catch_up(requests)
        held = [self.held[request] for request in requests]
        true, states = [one.computed for one in held], self._states(held)
        drafts = [Draft() for _ in requests]
        beliefs: list[list] = [[] for _ in requests]
        going = list(range(len(requests)))  # those that want more
        while going:
            these = [rows(requests[i], drafts[i].ids) for i in going]
            more = []
            for at, (i, id, law) in enumerate(zip(going, *self.guess(self.score(x), these))):
                if id is None:  # logits that are not finite
                    continue
                drafts[i].ids.append(id)
                beliefs[i].append(law)
                if len(drafts[i].ids) < counts[i]:
                    more.append(at)
            going = [going[at] for at in more]
            if going:
                step = self.prepare([(held[i], drafts[i].ids[-1:]) for i in going])
                state, x = self.run(state[more], step.tokens, step)
                self.cache.commit(step, None)
        for one, computed in zip(held, true):
            one.computed = computed
        for buffer, slots, old in states:
            buffer[slots] = old
        for draft, laws in zip(drafts, beliefs):
            draft.beliefs = torch.stack(laws) if laws and laws[0] is not None else None
        return drafts

    def _states(self, held: list["Held"]) -> list[tuple]:
        """Copies of what linear layers have of some requests: (buffer, slots, content)."""
        slots, layers = [one.slot for one in held], zip(self.specs, self.cache.buffers)
        linear = [buffer for spec, own in layers if spec.kind == "linear" for buffer in own]
        return [(buffer, slots, buffer[slots]) for buffer in linear]  # by a list: copies

    def guess(self, logits: Tensor, rows: list[Row]) -> tuple[list, list]:
        """An id by each row of logits (R, V), and what it was drawn from: None, if certain."""
        if rows[0].domain != DRAFT:
            return sample(logits, rows)[0], [None] * len(rows)
        beliefs, _ = distribution(logits, rows)
        keys = [noise_key(row.seed, row.domain, row.position) for row in rows]
        return [i if i >= 0 else None for i in draw(beliefs, keys).tolist()], list(beliefs)

    def _spread(self, logits: Tensor) -> Tensor:
        """Logits (R, V) of the target's vocabulary from those of `ids` alone: -inf elsewhere."""
        whole = logits.new_full((len(logits), self.target.config.vocab), -torch.inf)
        whole[:, self.ids] = logits
        return whole

    def _fusion(self, take: models.Take, width: int, parts: int):
        """The matrix `fc` of a head: of the residual streams after so many layers of the target,
        side by side, it makes one feature."""
        wide = parts * self.target.config.width
        if "fc.weight" in take.left and (found := take.tensors["fc.weight"].shape[-1]) != wide:
            raise ValueError(
                f"fc.weight reads {found} numbers of a token, but {parts} layers of the target"
                f" have {wide}"
            )
        return take.linear(["fc"], (width,), wide, False)[0]

    def _turn(self, config: Config) -> tuple[Tensor, float]:
        """How a head turns queries and keys, by its own config: what `rope_tables` wants."""
        frequencies, factor = models.inverse_frequencies(config.ropes[0], config.rotary)
        return frequencies.to(self.device), factor

    def _vocabulary(self, take: models.Take, count: int, vocab: int) -> Tensor:
        """The target's id of each of the head's: d2t (Vd,) says how much more it is, t2d (V,)
        which of the target's there are."""
        ids = torch.arange(count, device=self.device)
        if count != vocab or "d2t" in take.left:
            ids = ids + take("d2t", (count,), torch.int64)
        if ids.min() < 0 or ids.max() >= vocab or len(ids.unique()) < count:
            raise ValueError(f"d2t does not lead to {count} different ids below {vocab}")
        if "t2d" in take.left:
            known = take("t2d", (vocab,), torch.bool)
            if known.sum() != count or not known[ids].all():
                raise ValueError("t2d does not mark the ids that d2t leads to")
        return ids


@dataclass(eq=False)
class Held:
    """A request in a drafter's cache."""

    base: int  # its position that is the cache's 0
    computed: int = 0  # entries in the cache, which hold for as long as the request's tokens do
    slot: int | None = None
    features: list[list[Tensor]] = field(default_factory=list)  # learnt, not yet in the cache
    pending: int = 0  # positions in them
    guesses: list[int] = field(default_factory=list)  # in the cache after `computed`

    @property
    def seen(self) -> int:
        """The position of which nothing is known yet."""
        return self.base + self.computed + self.pending


class Chained(Cached):
    """Guesses from what the target computed (EAGLE, Li et al. 2401.15077; MTP, 2412.19437).

    Entry i of its cache is made of the target's features at position i and of token i + 1, and
    tells of token i + 2. Then it goes on by itself: from its own output and its own guess. What
    these leave in the cache is written again by true ones in the next round.

        position     ..   s - 1     s       s + 1         tokens up to s are known, and the
        feature      ..   target's  own     own           target's features up to s - 1
        token        ..   x_s       guess 1 guess 2
        tells of     ..   guess 1   guess 2 guess 3

    A subclass says what it reads of the target (`taps`, `hidden`), and has beside `run` and `score`

        fuse(features) -> (n, D)             the target's features as the head reads them: what
                                             `run` takes as the state
    """

    def keep(self, requests):
        super().keep(requests)
        for request, held in self.held.items():
            if held.pending > self.CHUNK:
                self._catch_up([request], leave=1)  # a row must be left to guess from

    def most_for(self, request):
        held = self.held.get(request)
        ready = held is not None and held.pending and held.seen == len(request.tokens) - 1
        return self.most if ready else 0

    def _catch_up(self, requests: list, leave: int = 0) -> tuple[Tensor, Tensor]:
        """Put what was learnt into the cache, but for the last rows of each request that are to
        be left: of the last row that is computed of each what `run` gives."""
        work, features = [], []
        for request in requests:
            held = self.held[request]
            n, first = held.pending - leave, held.base + held.computed + 1
            assert first + n <= len(request.tokens), "a feature whose next token is not known"
            parts = [torch.cat(part) for part in zip(*held.features)]
            features.append([part[:n] for part in parts])
            held.features = [[part[n:].clone() for part in parts]] if leave else []
            held.pending = leave
            work.append((held, request.tokens[first : first + n]))
        step = self.prepare(work)
        fused = self.fuse([torch.cat(part) for part in zip(*features)])
        state, x = self.run(fused, step.tokens, step)
        self.cache.commit(step, None)
        return state[step.sample_rows], x[step.sample_rows]


class DraftModel(Cached):
    """A smaller model of the same vocabulary goes ahead (Leviathan et al. 2211.17192, Chen et al.
    2302.01318). It needs nothing of the target: it reads the tokens, a prompt in parts of `CHUNK`
    while the target computes its own.

        row          x_s - 1   x_s       guess 1   guess 2      tokens up to x_s are known
        tells of     (x_s)     guess 1   guess 2   guess 3
        passes       unread tokens: one  one       one

    What it has computed of a guess that came true stays; linear layers, whose states are put
    back, read it again.
    """

    name = "draft"
    CHUNK = 512  # rows a round, of all requests together, that it reads without being asked
    NEAR = 16  # tokens behind with which it is asked: they take about as long as one

    def __init__(self, target: Model, model: Model):
        super().__init__(target, model.config.specs)
        self.model = model

    def slot_bytes(self, max_len):
        return super().slot_bytes(min(max_len, self.model.config.positions))

    def open(self, slots, max_len):
        self.longest = min(max_len, self.model.config.positions)  # tokens that it can read
        super().open(slots, self.longest)

    def keep(self, requests):
        super().keep([r for r in requests if len(r.tokens) <= self.longest])
        work, room = [], self.CHUNK
        for request in requests:
            if len(request.tokens) > self.longest or (held := self.hold(request)) is None:
                continue
            ids = self._unread(request)[:-1]  # the last one is what it guesses from
            if len(ids) >= self.NEAR and room:
                work.append((held, ids[:room]))
                room -= len(work[-1][1])
        if work:
            self._read(work)

    def most_for(self, request):
        unread = len(self._unread(request)) if request in self.held else 0
        return self.most if 0 < unread <= self.NEAR else 0  # 0: it waited since it was guessed for

    def _unread(self, request) -> list[int]:
        """Tokens that are not in the cache: guesses that came true are. The last never counts."""
        held = self.held[request]
        held.computed += agreed(held.guesses, request.tokens[held.computed : -1])
        held.guesses = []
        return request.tokens[held.computed :]

    def _catch_up(self, requests):
        return self._read([(self.held[request], self._unread(request)) for request in requests])

    @torch.inference_mode()  # `keep` may come between two steps
    def _read(self, work):
        step = self.prepare(work)
        hidden, _ = self.run(None, step.tokens, step)
        self.cache.commit(step, None)
        return hidden[step.sample_rows], hidden[step.sample_rows]

    def run(self, state, tokens, step):
        tokens = tokens.clamp(max=self.model.config.vocab - 1)  # it may have fewer ids
        x, _ = self.model(tokens, step.positions, step)
        return x, x

    def score(self, x):
        """Ids that only one of the two has are never guessed."""
        logits, vocab = self.model.logits(x), self.target.config.vocab
        missing = max(vocab - logits.shape[1], 0)
        return F.pad(logits[:, :vocab], (0, missing), value=-torch.inf)

    def propose(self, requests, counts, rows):
        drafts = super().propose(requests, counts, rows)
        if all(spec.kind != "linear" for spec in self.specs):
            for request, draft in zip(requests, drafts):
                self.held[request].guesses = draft.ids[:-1]  # of the last there is no row
        return drafts


# ---------------------------------------------------------------- MTP: a head that comes with the target


class MTP(Chained):
    """The head that some checkpoints bring, trained with the model (multi-token prediction,
    DeepSeek-AI 2412.19437): of the target's final hidden state at position i and of token i + 1
    one more layer, of the target's own attending kind, makes the hidden state at i + 1, or what
    it takes for it. The target's embedding and head are used with it.

        fc [norm(embedding of token i + 1) ; norm(hidden i)] -> layer -> norm -> hidden, logits

    It turns keys by position i, at which the layer's own norm, attention and MLP see the pair.
    What it goes on from is its own hidden state after the last norm, for the target's was normed.
    (vLLM makes DeepSeek's embedding at position 0 zero. That is not done here.)

    ValueError: the checkpoint has no such head, lacks a part of it, or has more than one layer.
    """

    name, hidden = "mtp", True

    def __init__(self, target: Model, checkpoint: Checkpoint):
        config, tensors = target.config, checkpoint.tensors
        names, spec = head_names(config, tensors), draft_spec(config)
        router = f"{names[LAYER]}mlp.gate.", f"{names[LAYER]}mlp.experts."
        routed = any(name.startswith(router) for name in tensors)
        self.config = replace(
            config, specs=(spec,), rope_of=(0,), expert_layers=(0,) if routed else ()
        )
        super().__init__(target, self.config.specs)
        self.embedding, self.head = target.embedding, target.head
        own = head_tensors(self.config, names, tensors)
        take, E = models.Take(own, self.device, self.dtype), config.width
        self.embedding_norm, self.hidden_norm, self.norm = (
            take.norm(name, E, config) for name in ("embedding_norm", "hidden_norm", "norm")
        )
        self.fc, _ = take.linear(["fc"], (E,), 2 * E, False, plain=True)
        before, after = (take.norm(LAYER + x, E, config) for x in models.layer_norms(config))
        mixer = models.MIXERS[spec.kind](take, 0, self.config)
        mlp = (models.Experts if routed else models.MLP)(take, LAYER + "mlp.", self.config)
        self.layer = models.Layer(before, mixer, after, mlp)
        if "embedding.weight" in own:
            self.embedding = take("embedding.weight", (config.vocab, E))
        if "head.weight" in own:
            self.head, _ = take.linear(["head"], (config.vocab,), E, False, plain=True)
        take.finish()

    def fuse(self, features):
        return features[0]

    def run(self, features, tokens, step):
        eps, layer = self.config.eps, self.layer
        e = kernels.rms_norm(self.embedding[tokens], self.embedding_norm, eps)
        h = kernels.rms_norm(features, self.hidden_norm, eps)
        x = kernels.linear(torch.cat((e, h), -1), self.fc)
        tables = [kernels.rope_tables(step.positions, *turn) for turn in self.target.turns]
        mixed = layer.mixer(kernels.rms_norm(x, layer.norm, eps), tables, step)
        x, normed = kernels.add_norm(x, mixed, layer.mlp_norm, eps)
        _, hidden = kernels.add_norm(x, layer.mlp(normed), self.norm, eps)
        return hidden, hidden

    def score(self, x):
        return kernels.linear(x, self.head)


LAYER = "model.layers.0."  # where the head's layer is for the classes that a model is made of
DEEPSEEK = {  # of an MTP head -> its name in the checkpoint, after model.layers.N.
    "fc": "eh_proj", "embedding_norm": "enorm", "hidden_norm": "hnorm",
    "norm": "shared_head.norm", LAYER: "", "embedding": "embed_tokens", "head": "shared_head.head",
}  # fmt: skip
QWEN = {  # the same after mtp.
    "fc": "fc", "embedding_norm": "pre_fc_norm_embedding", "hidden_norm": "pre_fc_norm_hidden",
    "norm": "norm", LAYER: "layers.0.",
}  # fmt: skip
TWICE = {"embedding": "model.embed_tokens.weight", "head": "lm_head.weight"}  # may be copies


def draft_spec(config: Config) -> LayerSpec:
    """The head's layer keeps what the target's last attention keeps."""
    return next(spec for spec in config.specs[::-1] if spec.kind != "linear")


def head_names(config: Config, tensors: Mapping) -> dict[str, str]:
    """Part of the MTP head -> what its names begin with in the checkpoint, by the target's kind."""
    if draft_spec(config).kind in ("latent", "sparse"):
        prefixes, names = config.ignored, DEEPSEEK
    elif config.gate:
        layers = [name.split(".")[2] for name in tensors if name.startswith("mtp.layers.")]
        prefixes, names = ["mtp."] * max(len(set(layers)), 1), QWEN
    else:
        raise ValueError(
            "mtp: a head of DeepSeek-V3's or Qwen3-Next's kind is needed, and the model is of"
            " another kind"
        )
    if not prefixes:
        raise ValueError("mtp: the model was made without a head (num_nextn_predict_layers is 0)")
    if len(prefixes) > 1:
        raise ValueError(f"mtp: a head of {len(prefixes)} layers is not known, only one of 1")
    return {part: prefixes[0] + name for part, name in names.items()}


def head_tensors(config: Config, names: dict[str, str], tensors: Mapping) -> dict[str, Tensor]:
    """The MTP head's tensors by its parts' own names; of copies of the target's only those that
    differ. Each of the checkpoint's is consumed, and has the shape that the config makes it."""
    E, V = config.width, config.vocab
    shapes = dict.fromkeys(("embedding_norm.weight", "hidden_norm.weight", "norm.weight"), (E,))
    shapes |= {"fc.weight": (E, 2 * E)} | {f"{part}.weight": (V, E) for part in TWICE}
    shapes |= {n: x for n, x in models.shapes(config).items() if n.startswith(LAYER)}
    prefix = names["fc"].rpartition(".")[0] + "."
    left = {name for name in tensors if name.startswith(prefix)}
    own = {}
    for name, shape in shapes.items():
        part = LAYER if name.startswith(LAYER) else name.partition(".")[0]
        theirs = names.get(part, "") + name.removeprefix(part)
        if part in TWICE and theirs not in left:
            continue  # it has none of its own
        if theirs not in left:
            raise ValueError(
                f"the checkpoint has no {theirs}, a part of its MTP head, which many re-uploads lack"
            )
        if tuple(tensors[theirs].shape) != shape:
            found = list(tensors[theirs].shape)
            raise ValueError(f"{theirs} is {found}, config.json makes it {list(shape)}")
        left.discard(theirs)
        if part not in TWICE or not _copied(tensors[theirs], TWICE[part], tensors):
            own[name] = tensors[theirs]
    if unknown := sorted(x for x in left if not x.endswith(".rotary_emb.inv_freq")):
        raise ValueError(f"mtp: {unknown[0]} is not known in a head of this kind")
    return own


def _copied(tensor: Tensor, name: str, tensors: Mapping) -> bool:
    """Whether a tensor is the target's of that name, or without one its tied embedding."""
    return torch.equal(tensor, tensors.get(name, tensors[TWICE["embedding"]]))


# ---------------------------------------------------------------- EAGLE-3


class Eagle(Chained):
    """EAGLE-3 (Li et al. 2503.01840): one layer, which sees the target at several depths.

        target's x after three layers -> g = fc([low; mid; high])           (T, D)
        q, k, v of [norm(embedding of token i + 1); norm(g)]                (T, 2 D)
        y = g + attention; z = y + mlp(norm(y)); norm(z) -> logits          (T, D) -> (T, Vd)

    z is the g of the row after it, without another fc. The head has Vd of the target's V ids, the
    common ones: the others are never guessed.

    `eagle_aux_hidden_state_layer_ids` names the layers, in one of two ways. An id is the layer
    that x enters, so that 2 is after layer 1 (counted from 0); but in a list that begins with 1,
    as NVIDIA's do, it is the layer that x leaves.
    """

    name = "eagle"

    def __init__(self, path: str, target: Model):
        """path: a folder with config.json and safetensors, or a hub repository of such.

        ValueError: it is no EAGLE-3 head, or one of another target.
        """
        fields, tensors = models.read(models.find(path)[0])
        try:
            self._load(*eagle_layer(fields, tensors), target)
        except ValueError as error:
            raise ValueError(f"{path}: {error}")
        except (TypeError, AttributeError) as error:  # a field of another shape
            raise ValueError(f"{path}: config.json is malformed: {error!r}")

    def _load(self, fields: dict, tensors: dict[str, Tensor], target: Model):
        config = Config.from_hf(fields)
        super().__init__(target, config.specs)
        D, wide, V = config.width, target.config.width, config.vocab
        if V != target.config.vocab:
            raise ValueError(f"vocab_size {V}, but the target has {target.config.vocab} ids")
        if kv_cache.positive(fields, "target_hidden_size", wide) != wide:
            raise ValueError(f"target_hidden_size {fields['target_hidden_size']}, not {wide}")
        self.taps = eagle_taps(fields, len(target.layers))
        self.eps, parts = config.eps, len(self.taps)
        take = models.Take(tensors, self.device, self.dtype)
        # the two ways of norming what the fc reads: each part by itself, or all together
        apart, whole = kv_cache.flag(fields, "fc_norm"), kv_cache.flag(fields, "norm_before_fc")
        if apart and whole:
            raise ValueError("fc_norm and norm_before_fc: only one of them can hold")
        names = [f"fc_norm.{i}.weight" for i in range(parts)]
        self.part_norms = [take(name, (wide,)) for name in names] if apart else []
        self.whole_norm = take("input_norm.weight", (parts * wide,)) if whole else None
        self.fc = self._fusion(take, D, parts)
        self.embedding = target.embedding
        if "embed_tokens.weight" in tensors:
            self.embedding = take("embed_tokens.weight", (V, D))
        elif wide != D:
            raise ValueError(f"no embed_tokens, and the target's is {wide} wide, not {D}")
        layer = "model.layers.0."
        norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        self.token_norm, self.hidden_norm, self.mlp_norm = (
            take.norm(layer + name, D, config) for name in norms
        )
        self.attention = models.Attention(take, 0, config, 2 * D)
        self.mlp = models.MLP(take, layer + "mlp.", config)
        self.norm = take.norm("norm", D, config)
        self.ids = self._vocabulary(take, kv_cache.positive(fields, "draft_vocab_size", V), V)
        self.head, _ = take.linear(["lm_head"], (len(self.ids),), D, False)
        take.finish()
        self.normed_residual = kv_cache.flag(fields, "norm_before_residual")
        self.normed_output = kv_cache.flag(fields, "norm_output")
        self.turn = self._turn(config)

    def fuse(self, features):
        if self.part_norms:
            pairs = zip(features, self.part_norms)
            features = [kernels.rms_norm(x, weight, self.eps) for x, weight in pairs]
        x = torch.cat(features, -1)
        if self.whole_norm is not None:
            x = kernels.rms_norm(x, self.whole_norm, self.eps)
        return kernels.linear(x, self.fc)

    def run(self, features, tokens, step):
        tables = [kernels.rope_tables(step.positions, *self.turn)]
        token = kernels.rms_norm(self.embedding[tokens], self.token_norm, self.eps)
        hidden = kernels.rms_norm(features, self.hidden_norm, self.eps)
        mixed = self.attention(torch.cat((token, hidden), -1), tables, step)
        x = hidden if self.normed_residual else features
        x, normed = kernels.add_norm(x, mixed, self.mlp_norm, self.eps)
        x, normed = kernels.add_norm(x, self.mlp(normed), self.norm, self.eps)
        return normed if self.normed_output else x, normed

    def score(self, x):
        return self._spread(kernels.linear(x, self.head))


EAGLE_LAYERS = ("llama", "mistral", "qwen2", "qwen3")  # model_types that its layer may be of


def eagle_layer(config: dict, tensors: dict[str, Tensor]) -> tuple[dict, dict[str, Tensor]]:
    """The fields of an EAGLE-3 head, its layer's among them, and its tensors by the names that the
    layers here read. Those published differ in both: midlayer.* or layers.0.*, and the fields of
    the layer apart or not. ValueError: it is something else."""
    named = {}
    for name, tensor in tensors.items():
        short = name.removeprefix("model.").replace("midlayer.", "layers.0.", 1)
        named["model." + short if short.startswith("layers.") else short] = tensor
    if len(named) < len(tensors):
        raise ValueError("tensors of the same layer by two names")
    fields = dict(config)
    if "speculators_model_type" in config:
        fields = {"norm_before_residual": True, **config}
        fields |= config.get("transformer_layer_config") or {}
    _refuse_eagle(config, fields, named)
    return fields, named


def _refuse_eagle(config: dict, fields: dict, tensors: dict[str, Tensor]):
    """What is not EAGLE-3, by its name."""
    kind, made = config.get("speculators_model_type"), config.get("architectures") or []
    said = f"{kind} {made} {config.get('model_type')}".lower()
    if "peagle" in said or "mask_hidden" in tensors or config.get("parallel_drafting"):
        raise ValueError("a P-EAGLE head, which guesses all at once from masks; EAGLE-3 is read")
    third = "eagle3" in said or "draft_vocab_size" in config
    if not third and "model.layers.0.hidden_norm.weight" not in tensors:
        if "eagle" in said or ("fc.weight" in tensors and "hidden_norm.weight" not in tensors):
            raise ValueError("an EAGLE-1 or EAGLE-2 head, of the last layer alone; EAGLE-3 is read")
        raise ValueError(f"architectures {made}: not an EAGLE-3 head")
    if fields.get("model_type") not in EAGLE_LAYERS:
        raise ValueError(
            f"model_type {fields.get('model_type')!r} of its layer is not one of"
            f" {', '.join(EAGLE_LAYERS)}"
        )
    if kv_cache.positive(fields, "num_hidden_layers", 1) != 1:
        raise ValueError(f"num_hidden_layers {fields['num_hidden_layers']}: EAGLE-3 has one")
    if not kv_cache.flag(config.get("eagle_config") or {}, "use_aux_hidden_state", True):
        raise ValueError("use_aux_hidden_state false: it reads the last layer alone")


def eagle_taps(config: dict, count: int) -> tuple[int, ...]:
    """The layers of a target of so many after which the head reads, from 0: see `Eagle`.

    Example: none said, 36 layers: it enters 2, 18 and 33, so after 1, 17 and 32.
    """
    field = "eagle_aux_hidden_state_layer_ids"
    ids = config.get(field) or (config.get("eagle_config") or {}).get(field)
    why = f"{field} {ids}"
    if not ids:
        ids = [2, count // 2, count - 3]
        why = f"no {field}, so {ids}"
    if not isinstance(ids, list) or any(type(i) is not int for i in ids):
        raise ValueError(f"{why}: not a list of layers")
    taps = [i if ids[0] == 1 else i - 1 for i in ids]
    if taps != sorted(set(taps)) or taps[0] < 0 or taps[-1] >= count:
        raise ValueError(f"{why}: not ascending, of the target's {count} layers")
    return tuple(taps)


# ---------------------------------------------------------------- DFlash


class DFlash(Cached):
    """A block of guesses from one pass (DFlash, Chen et al. 2602.06036).

    Of each position that the target has computed, its residual stream after some layers makes one
    fused feature. A draft layer keeps a key and a value of it, and does nothing else with it: this
    is the context. Then the last token, which the target has yet to compute, and MASKs after it
    go through the draft's layers as one block. Each of its rows sees the context and, where a
    layer is not causal, the whole block, and tells of the token at its own position.

        position   ..   s - 1     s     s + 1    s + 2       tokens up to s are known, and the
        context    ..   target's                             target's features up to s - 1
        block                     x_s   MASK     MASK
        tells of                  -     guess 1  guess 2     at once: no guess knows another

    The block's entries lie beyond `computed`, so they are gone after the round. It is run whole,
    however few guesses are asked for: a shorter one would have other guesses, as its rows see
    each other, and the end of the text is no end for positions.
    """

    name, parallel = "dflash", True

    def __init__(self, path: str, target: Model):
        """path: a folder with config.json and safetensors, or a hub repository of such.

        ValueError: it is no DFlash head, or one of another target.
        """
        folder = models.find(path)[0]
        fields, tensors = models.read(folder)
        try:
            if (folder / "mask_embedding.pt").exists():
                raise ValueError("mask_embedding.pt is a pickle, which is not read")
            self._load(fields, tensors, target)
        except ValueError as error:
            raise ValueError(f"{path}: {error}")

    def _load(self, fields: dict, tensors: dict[str, Tensor], target: Model):
        self.config = config = Config.from_hf(fields)
        super().__init__(target, config.specs)
        fields = dflash_fields(fields)
        _refuse_dflash(fields, config, target)
        self.block, self.mask = _dflash_block(fields, target)
        self.most = self.block - 1
        ids = dflash_layers(fields, len(target.layers), len(config.specs))
        self.taps = tuple(sorted(set(ids)))
        self.order = [self.taps.index(i) for i in ids]
        self.scale = kv_cache.number(fields, "input_embedding_scale", 1.0)
        take = models.Take(
            {_dflash_name(x): t for x, t in tensors.items()}, self.device, self.dtype
        )
        E, V, wide = config.width, target.config.vocab, target.config.width
        self.fc = self._fusion(take, E, len(ids))
        self.feature_norm = take("hidden_norm.weight", (E,))
        causal = dflash_causal(fields, [spec.window for spec in config.specs])
        self.layers = [BlockLayer(take, i, config, own) for i, own in enumerate(causal)]
        self.norm = take("norm.weight", (E,))
        own = {name: f"{name}.weight" in take.left for name in ("embed_tokens", "lm_head")}
        if E != wide and not all(own.values()):
            raise ValueError(
                f"hidden_size {E}, the target's is {wide}: no embed_tokens and lm_head"
            )
        self.embedding, self.head = target.embedding, None
        if own["embed_tokens"]:
            self.embedding = take("embed_tokens.weight", (V, E))
        if own["lm_head"]:
            self.ids = self._vocabulary(take, kv_cache.positive(fields, "draft_vocab_size", V), V)
            self.head, _ = take.linear(["lm_head"], (len(self.ids),), E, False)
        take.finish()
        self.turn = self._turn(config)

    def most_for(self, request):
        held = self.held.get(request)
        ready = held is not None and held.seen == len(request.tokens) - 1
        return self.most if ready else 0

    def keep(self, requests):
        super().keep(requests)
        self._catch_up([r for r, held in self.held.items() if held.pending >= self.CHUNK])

    def _catch_up(self, requests: list):
        """Put what was learnt into the cache: of each position every layer's key and value."""
        work, features = [], []
        for request in requests:
            held = self.held[request]
            if held.pending:
                work.append((held, request.tokens[held.seen - held.pending : held.seen]))
                features += held.features
                held.features, held.pending = [], 0
        if not work:
            return
        step = self.prepare(work)
        parts = [torch.cat(part) for part in zip(*features)]  # by layers of the target
        fused = kernels.linear(torch.cat([parts[i] for i in self.order], -1), self.fc)
        fused = kernels.rms_norm(fused, self.feature_norm, self.config.eps)  # (T, E)
        turns = kernels.rope_tables(step.positions, *self.turn)
        for layer in self.layers:
            layer.store(fused, turns, step)

    def _run(self, step: Step) -> Tensor:
        """A block's rows through the layers: (T, E), normed."""
        turns, eps = kernels.rope_tables(step.positions, *self.turn), self.config.eps
        x = self.embedding[step.tokens]  # not scaled, even where the target scales it
        if self.scale != 1:
            x = x * self.scale
        norms = [layer.norm for layer in self.layers[1:]] + [self.norm]  # each layer's next one
        normed = kernels.rms_norm(x, self.layers[0].norm, eps)
        for layer, after in zip(self.layers, norms):
            x, normed = kernels.add_norm(x, layer.attend(normed, turns, step), layer.mlp_norm, eps)
            x, normed = kernels.add_norm(x, layer.mlp(normed), after, eps)
        return normed

    def _score(self, x: Tensor) -> Tensor:
        """x (R, E) -> logits (R, V) of the target's vocabulary, -inf where the head has no id."""
        if self.head is None:
            return self.target.logits(x)
        return self._spread(kernels.linear(x, self.head))

    def propose(self, requests, counts, rows):
        self._catch_up(requests)
        held = [self.held[request] for request in requests]
        masks = [self.mask] * self.most
        step = self.prepare([(h, [r.tokens[-1], *masks]) for h, r in zip(held, requests)])
        x = self._run(step)
        for one in held:
            one.computed -= self.block
        slots = [i * self.block + j for i, n in enumerate(counts) for j in range(1, n + 1)]
        logits = self._score(x[torch.tensor(slots, device=self.device)])
        ids, laws = self._settled(logits, requests, counts, rows)
        drafts, at = [], 0
        for n in counts:
            own, law = ids[at : at + n], laws[at : at + n]
            at += n
            known = own.index(None) if None in own else n  # logits that are not finite
            beliefs = torch.stack(law[:known]) if known and law[0] is not None else None
            drafts.append(Draft(own[:known], beliefs))
        return drafts

    def _settled(self, logits: Tensor, requests, counts, rows) -> tuple[list, list]:
        """The guesses of all slots and what they were drawn from, as if one after another.

        A slot's row has the guesses before it in its history, for penalties. So all are drawn at
        once, again and again, until none changes: then each was drawn after just these. Without
        penalties this is so the second time at the latest.
        """
        ids = logits.argmax(-1).tolist()
        while True:
            known, given = ids, []
            for request, n in zip(requests, counts):
                own = [id or 0 for id in known[len(given) : len(given) + n]]
                given += [rows(request, own[:j]) for j in range(n)]
            ids, laws = self.guess(logits, given)
            if ids == known:
                return ids, laws


class BlockLayer:
    """A layer of DFlash: what it keeps of a feature, and what it does to the rows of a block.

    causal: whether a row of the block sees only the rows before it and itself.
    """

    def __init__(self, take: models.Take, layer: int, config: Config, causal: bool):
        self.layer, self.eps, self.causal = layer, config.eps, causal
        spec, E, prefix = config.specs[layer], config.width, f"layers.{layer}."
        self.dim, inner, shared = spec.dim, config.heads * spec.dim, spec.heads * spec.dim
        q, k, v, o = (f"{prefix}self_attn.{x}_proj" for x in "qkvo")
        self.queries, _ = take.linear([q], (inner,), E, False)
        self.keys_values, _ = take.linear([k, v], (shared, shared), E, False)
        self.out, _ = take.linear([o], (E,), inner, False)
        q_norm, k_norm = (take(f"{prefix}self_attn.{x}_norm.weight", (spec.dim,)) for x in "qk")
        self.q_norm = q_norm.repeat(config.heads, 1)  # (H, D)
        self.k_norm = k_norm.repeat(spec.heads, 1)  # (G, D)
        self.norm = take(f"{prefix}input_layernorm.weight", (E,))
        self.mlp_norm = take(f"{prefix}post_attention_layernorm.weight", (E,))
        self.mlp = models.MLP(take, f"{prefix}mlp.", config)

    def store(self, features: Tensor, turns: Tensor, step: Step):
        """Keep keys and values of features (T, E), which are normed already."""
        step.store(self.layer, *self._keys_values(features, turns))

    def attend(self, x: Tensor, turns: Tensor, step: Step) -> Tensor:
        """x (T, E), normed -> (T, E)."""
        q = kernels.linear(x, self.queries).view(len(x), -1, self.dim)
        q = kernels.rope(kernels.rms_norm(q, self.q_norm, self.eps), turns)
        o = step.attend(self.layer, q, *self._keys_values(x, turns), causal=self.causal)
        return kernels.linear(o.reshape(len(x), -1), self.out)

    def _keys_values(self, x: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
        k, v = kernels.linear(x, self.keys_values).view(len(x), -1, self.dim).chunk(2, 1)
        return kernels.rope(kernels.rms_norm(k, self.k_norm, self.eps), turns), v  # (T, G, D)


DFLASH_NAMES = {  # how some files call a tensor -> its name here
    "midlayer.": "layers.0.", "encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm.",
}  # fmt: skip
DFLASH_FIELDS = {"block_size", "target_layer_ids", "mask_token_id", "causal", "num_target_layers",
                 "input_embedding_scale", "target_hidden_size"}  # fmt: skip
DFLASH_PLAIN = {  # field that may be written, if it asks for nothing
    "attention_bias": False, "is_neox_style": True, "use_swa": False, "attention_sink_bias": False,
    "attention_value_scale": 1, "output_multiplier": 1, "final_logit_softcapping": None,
    "swa_window_size": None, "fc_norm": False,
}  # fmt: skip


def _dflash_name(name: str) -> str:
    for theirs, own in DFLASH_NAMES.items():
        if name.startswith(theirs):
            return own + name.removeprefix(theirs)
    return name


def dflash_fields(config: dict) -> dict:
    """The fields of config.json; those of its dflash_config come first."""
    own = config.get("dflash_config") or {}
    if not isinstance(own, dict):
        raise ValueError(f"dflash_config {own!r} is not an object")
    if unknown := sorted(own.keys() - DFLASH_FIELDS - DFLASH_PLAIN.keys()):
        raise ValueError(f"dflash_config: {', '.join(unknown)} is not known of DFlash here")
    return config | {name: value for name, value in own.items() if value is not None}


def _refuse_dflash(fields: dict, config: Config, target: Model):
    kinds = fields.get("architectures") or ["DFlashDraftModel"]
    if kinds != ["DFlashDraftModel"]:
        raise ValueError(f"architectures {kinds} is not DFlashDraftModel")
    if fields["model_type"] != "qwen3":
        raise ValueError(f"model_type {fields['model_type']!r} of a DFlash head is not 'qwen3'")
    for name, value in DFLASH_PLAIN.items():
        if fields.get(name) not in (None, value):
            raise ValueError(f"{name} {fields[name]!r} is not known of DFlash here")
    wanted = {
        "vocab_size": (config.vocab, target.config.vocab),
        "num_target_layers": (fields.get("num_target_layers"), len(target.layers)),
        "target_hidden_size": (fields.get("target_hidden_size"), target.config.width),
    }
    for name, (found, own) in wanted.items():
        if found not in (None, own):
            raise ValueError(f"{name} {found!r}, but the target has {own}")


def _dflash_block(fields: dict, target: Model) -> tuple[int, int]:
    """Rows of a block, and the id that those after the first one have."""
    size, mask = kv_cache.positive(fields, "block_size"), fields.get("mask_token_id")
    if not 2 <= size <= MOST + 1:
        raise ValueError(f"block_size {size} is not from 2 to {MOST + 1}")
    last = target.config.vocab - 1
    if type(mask) is not int or not 0 <= mask <= last:
        raise ValueError(f"mask_token_id {mask!r} is no id of the target's embedding, 0 to {last}")
    return size, mask


def dflash_layers(fields: dict, count: int, own: int) -> list[int]:
    """The layers, of a target of `count`, that a head of `own` layers reads, in the order of fc's
    columns.

    Example: none said, 36 layers and 5 of its own: after 1, 9, 17, 25, 33.
    """
    ids = fields.get("target_layer_ids")
    if ids is None and own == 1:
        ids = [count // 2]
    elif ids is None:
        ids = [round(1 + i * (count - 4) / (own - 1)) for i in range(own)]
    if not isinstance(ids, list) or not ids or any(type(i) is not int for i in ids):
        raise ValueError(f"target_layer_ids {ids!r} is not a list of layers")
    if not all(0 <= i < count for i in ids):
        raise ValueError(f"target_layer_ids {ids}: the target's layers are 0 to {count - 1}")
    return ids


def dflash_causal(fields: dict, windows: list[int]) -> list[bool]:
    """Which layers are causal within the block: as is said of all, or else those that slide."""
    named = [name for name in ("causal", "is_causal") if fields.get(name) is not None]
    said = {kv_cache.flag(fields, name) for name in named}
    if len(said) > 1:
        raise ValueError(f"causal {fields['causal']} and is_causal {fields['is_causal']} disagree")
    if "sliding_attention" in (fields.get("layer_types") or ()) and not any(windows):
        raise ValueError("layer_types has sliding_attention, but use_sliding_window is not true")
    if said == {False} and any(windows):
        raise ValueError(f"sliding_window {max(windows)}: one in both directions is not known here")
    return [True in said if said else window > 0 for window in windows]


# ---------------------------------------------------------------- a linear head, solved for


class Linear(Chained):
    """A head that was solved for, not trained (ridge regression, Hoerl & Kennard 1970): a matrix
    that leads from the target's hidden state to its next one, and the target's own head says which
    token that means.

        hidden state (E,) at position i   |
                                          | features (F,) -> matrix -> hidden state at i + 1,
        embedding (E,) of token i + 1     |                            which tells of token i + 2

    The features are both, normed, a 1, and random sums of them behind a ReLU: what is solved for
    stays linear in them. An entry is made of nothing but its own position, so the cache is empty.
    Of the vocabulary it knows the ids of the texts that it was fitted on.

    parts  random (U, 2E + 1), matrix (E, F), ids (N,), rising: what `fit` makes and a file has
    """

    name, hidden = "linear", True

    def __init__(self, target: Model, parts: dict[str, Tensor], rows: Tensor | None = None):
        """rows (N, E): those of the target's head for the ids, where its embedding has them not."""
        super().__init__(target, ())
        self.parts = parts
        self.ids = parts["ids"].to(self.device)
        self.random = parts["random"].to(self.device)
        self.matrix = kernels.pack(parts["matrix"].to(self.device, self.dtype))
        if target.config.tied:
            rows = target.embedding[self.ids]
        self.head = None if rows is None else kernels.pack(rows.to(self.device, self.dtype))

    def fuse(self, features):
        return features[-1]

    def run(self, features, tokens, step):
        seen = mixed(features, self.target.embedding[tokens], self.random)
        x = kernels.linear(seen.to(self.dtype), self.matrix)
        return x, x

    def score(self, x):
        whole = self.head is None  # then the target's head says more than is asked
        known = self.target.logits(x)[:, self.ids] if whole else kernels.linear(x, self.head)
        return self._spread(known)

    def save(self, path: str, **said: str):
        """Write a file of it, and what is said of it. OSError: that cannot be."""
        about = {"width": self.target.config.width, "vocab": self.target.config.vocab, **said}
        data = safetensors.torch.save(self.parts, {"octavo": json.dumps(about)})
        Path(path).write_bytes(data)

    @classmethod
    def load(cls, path: str, target: Model, checkpoint: Checkpoint) -> "Linear":
        """One that was saved. ValueError, one sentence, if it is none or for another target."""
        refusal = f"speculative linear:{path}"
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                about = json.loads((file.metadata() or {}).get("octavo", "{}"))
                parts = {name: file.get_tensor(name) for name in file.keys()}
        except (OSError, ValueError, safetensors.SafetensorError) as error:
            raise ValueError(f"{refusal}: no safetensors file that can be read ({error})") from None
        E, V = target.config.width, target.config.vocab
        for what, ours in (("width", E), ("vocab", V), ("model", checkpoint.name)):
            if about.get(what) != ours:
                its = about.get(what, "none")
                raise ValueError(f"{refusal}: it was fitted for {what} {its}, the model has {ours}")
        if missing := {"random", "matrix", "ids"} - set(parts):
            raise ValueError(f"{refusal}: it has no tensor {min(missing)!r}")
        U, N = len(parts["random"]), len(parts["ids"])
        wanted = {"random": (U, 2 * E + 1), "matrix": (E, 2 * E + 1 + U), "ids": (N,)}
        for name, shape in wanted.items():
            if tuple(parts[name].shape) != shape:
                raise ValueError(f"{refusal}: {name} is {tuple(parts[name].shape)}, not {shape}")
        ids = parts["ids"]
        if ids.dtype != torch.int64 or not N or ids.min() < 0 or ids.max() >= V:
            raise ValueError(f"{refusal}: its ids are not integers from 0 to {V - 1}")
        tied = target.config.tied
        return cls(target, parts, None if tied else checkpoint.tensors["lm_head.weight"][ids])


def mixed(hidden: Tensor, embedded: Tensor, random: Tensor) -> Tensor:
    """The features (T, F) of hidden states and embeddings (T, E), in float32."""
    parts = [
        x.float() * (x.float().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        for x in (hidden, embedded)
    ]
    both = torch.cat([*parts, torch.ones_like(parts[0][:, :1])], -1)  # (T, 2E + 1)
    return torch.cat([both, (both @ random.T).relu()], -1)


@dataclass
class Text:
    """What a target computed over a text: tokens n + 1, hidden (n, E) of all but the last. From
    `first` on a token is the target's own."""

    tokens: list[int]
    hidden: Tensor
    first: int


class Recorder(Drafter):
    """Guesses nothing, and keeps what the target computes: texts to fit a head on."""

    name, most, hidden = "recorder", 0, True

    def __init__(self):
        self.seen: dict = {}  # request -> (its first position that is known, hidden states)

    def learn(self, request, start, features):
        first, hidden = self.seen.get(request, (start, []))
        if start != first + sum(map(len, hidden)):  # it began again
            first, hidden = start, []
        self.seen[request] = first, [*hidden, features[-1]]

    def text(self, request) -> Text:
        first, hidden = self.seen[request]
        hidden = torch.cat(hidden)
        tokens = request.tokens[first : first + len(hidden) + 1]
        return Text(tokens, hidden, request.prompt_tokens - first)


UNITS = 2048  # random features
PENALTIES = (1e-6, 1e-3, 3e-3, 1e-2, 3e-2)  # times the mean square of a feature


def fit(target: Model, texts: list[Text], held: list[Text], units: int | None = None):
    """The Linear whose matrix gives the least squares over texts, in float64, with the penalty
    that is best on other texts, `held`: it, and how often its first and second guess is what these
    go on with (the second where the first is).

    Example: hidden states that each are twice the one before, in one direction: so is the matrix.
    """
    E, device = target.config.width, target.embedding.device
    units = UNITS if units is None else units
    noise = torch.Generator().manual_seed(0)
    random = torch.randn(units, 2 * E + 1, generator=noise) / (2 * E) ** 0.5
    random = random.to(device)
    width = 2 * E + 1 + units
    inner = torch.zeros(width, width, dtype=torch.float64, device=device)
    outer = torch.zeros(width, E, dtype=torch.float64, device=device)
    for text in texts:
        embedded = target.embedding[torch.tensor(text.tokens[1:-1], device=device)]
        seen = mixed(text.hidden[:-1], embedded, random).double()
        inner += seen.T @ seen
        outer += seen.T @ text.hidden[1:].double()
    ids = torch.tensor(sorted({id for text in texts for id in text.tokens}))
    best = None
    for penalty in PENALTIES:
        loaded = inner + penalty * inner.diagonal().mean() * torch.eye(width).to(inner)
        matrix = torch.cholesky_solve(outer, torch.linalg.cholesky(loaded)).T.float().contiguous()
        made = Linear(target, {"random": random.cpu(), "matrix": matrix.cpu(), "ids": ids})
        rates = agreement(made, held)
        if best is None or rates > best[1]:
            best = made, rates
    return best


def agreement(head: Linear, texts: list[Text], most: int = 2) -> list[float]:
    """How often guess 1, .. `most` is what a text goes on with, where the guesses before it are:
    in the part that is the target's own. The likeliest token is guessed."""
    tried, right = [0] * most, [0] * most
    for text in texts:
        ids = torch.tensor(text.tokens, device=head.device)
        at = torch.arange(max(text.first - 1, 0), len(ids) - 2, device=head.device)
        state, tokens = text.hidden[at].to(head.dtype), ids[at + 1]
        for j in range(most):
            going = at + 2 + j < len(ids)
            at, state, tokens = at[going], state[going], tokens[going]
            if not len(at):
                break
            state, x = head.run(state, tokens, None)
            tokens = head.score(x).argmax(-1)
            stays = tokens == ids[at + 2 + j]
            tried[j] += len(at)
            right[j] += int(stays.sum())
            at, state, tokens = at[stays], state[stays], tokens[stays]
    return [r / max(t, 1) for r, t in zip(right, tried)]


# ---------------------------------------------------------------- drafters by name


def _draft_model(name: str, target: Model, checkpoint: Checkpoint) -> DraftModel:
    """Any model that `model.find` finds, in the target's type. In the 4 bits of its file, if the
    target has low-bit weights too."""
    own = models.load(models.find(name)[0])
    _same_vocabulary(checkpoint, own)
    device, dtype = target.embedding.device, target.embedding.dtype
    stored = target.low and models.stores_four_bits(own, device, dtype)
    how = "stored" if stored else None
    return DraftModel(target, Model(own.config, own.tensors, device, dtype, quantize=how))


def _same_vocabulary(target: Checkpoint, own: Checkpoint):
    """ValueError: an id is one text here and another there; or, where that is not known, one has
    more ids. Models of a family pad one vocabulary to different sizes."""
    ours, theirs = vocabulary(own), vocabulary(target)
    if not ours or not theirs:
        if own.config.vocab != target.config.vocab:
            raise ValueError(
                f"its vocabulary has {own.config.vocab:,} ids, that of {target.name or 'the model'}"
                f" {target.config.vocab:,}"
            )
        return
    differ = sorted(id for id in ours.keys() & theirs.keys() if ours[id] != theirs[id])
    if differ:
        id = differ[0]
        raise ValueError(
            f"it is of another vocabulary: id {id} is {ours[id]!r}, and {theirs[id]!r} in"
            f" {target.name or 'the model'}; {len(differ):,} of {len(theirs):,} differ"
        )


def vocabulary(checkpoint: Checkpoint) -> dict[int, str]:
    """The texts of a tokenizer's ids; {}: there is none."""
    given = checkpoint.tokenizer or {}
    ids = dict((given.get("model") or {}).get("vocab") or {})
    for token in given.get("added_tokens") or ():
        ids.setdefault(token["content"], token["id"])
    return {id: text for text, id in ids.items()}


DRAFTERS = {  # name -> what makes one: (path, target, its checkpoint) -> Drafter
    "ngram": lambda path, target, checkpoint: NGram(),
    "draft": _draft_model,
    "eagle": lambda path, target, checkpoint: Eagle(path, target),
    "mtp": lambda path, target, checkpoint: MTP(target, checkpoint),
    "dflash": lambda path, target, checkpoint: DFlash(path, target),
    "linear": Linear.load,
}
PATHS = {"draft": "MODEL", "eagle": "PATH", "dflash": "PATH", "linear": "FILE"}  # that need one


def named(name: str) -> tuple[str, str]:
    """The kind and the path of a name such as "ngram" or "eagle:PATH". ValueError: it is none."""
    kind, colon, path = name.partition(":")
    if kind not in DRAFTERS or bool(path) != (kind in PATHS) or bool(colon) != bool(path):
        known = [f"{x}:{PATHS[x]}" if x in PATHS else x for x in DRAFTERS]
        raise ValueError(f"speculative {name!r} is not {' or '.join(known)}")
    return kind, path


def check(drafter: "str | Drafter", fixed: int | None, rule: str):
    """ValueError: this cannot be asked for, whatever the target."""
    if rule not in RULES:
        raise ValueError(f"verify {rule!r} is not {' or '.join(RULES)}")
    if fixed is not None and not 1 <= fixed <= MOST:
        raise ValueError(f"spec_tokens {fixed} is not from 1 to {MOST}")
    if not isinstance(drafter, Drafter):
        named(str(drafter))


def drafter(name: str, target: Model, checkpoint: Checkpoint) -> Drafter:
    """The drafter of a name, for a target. ValueError: there is none, or it does not go with the
    target."""
    kind, path = named(name)
    try:
        return DRAFTERS[kind](path, target, checkpoint)
    except ValueError as error:
        why = str(error).replace(models.WAYS, "").rstrip(" .")  # those are about --model
        for said in (f"speculative {name}: ", f"{path or name}: "):
            why = why.removeprefix(said)
        raise ValueError(f"speculative {name}: {why}") from None


# ---------------------------------------------------------------- the experiment

WORDS = ["the", "cat", "dog", "sat", "ran", "on", "mat", "and"]
NEXT = {  # word -> what may come after it, in hundredths
    "the": {"cat": 40, "dog": 35, "mat": 25}, "cat": {"sat": 50, "ran": 30, "and": 20},
    "dog": {"ran": 50, "sat": 30, "and": 20}, "sat": {"on": 70, "and": 30},
    "ran": {"and": 60, "on": 40}, "on": {"the": 100}, "mat": {"and": 80, "the": 20},
    "and": {"the": 70, "ran": 15, "sat": 15},
}  # fmt: skip
CURVES = {  # rows of a step -> how long it takes, a step of one row being 1
    "cpu": {1: 1.0, 4: 1.3, 8: 1.85, 16: 2.6, 32: 4.8},  # soon it is arithmetic that takes time
    "gpu": {1: 1.0, 64: 1.05, 256: 1.2, 1024: 4.2},  # for long it is reading the weights
}
GUESS_S, K = 0.05, 8  # what a guess takes, and how many a round has


class Toy(Cached):
    """Knows the target's law, but not all of it, and less with each guess that it builds on."""

    def __init__(self, law: Tensor, agreement: float):
        self.law, self.agreement = law, agreement

    def propose(self, requests, counts, rows):
        drafts = [Draft() for _ in requests]
        beliefs = []
        for j in range(K):
            asked = [rows(r, draft.ids) for r, draft in zip(requests, drafts)]
            known = self.agreement * 0.95**j
            law = known * self.law[[row.history[-1] for row in asked]] + (1 - known) / len(WORDS)
            ids, own = self.guess(law.log(), asked)
            beliefs.append(own)
            for draft, id in zip(drafts, ids):
                draft.ids.append(id)
        for draft, own in zip(drafts, zip(*beliefs)):
            draft.beliefs = None if own[0] is None else torch.stack(own)
        return drafts


class Toys:
    """Texts of a toy target, which the toy drafter guesses for by one rule."""

    def __init__(self, rule: str, agreement: float, texts: int = 200):
        self.law = torch.zeros(len(WORDS), len(WORDS), dtype=torch.float64)
        for i, word in enumerate(WORDS):
            for other, share in NEXT[word].items():
                self.law[i, WORDS.index(other)] = share / 100
        self.rule, self.toy = rule, Toy(self.law, agreement)
        self.params = SamplingParams(temperature=1.0).with_defaults({})
        self.texts = [SimpleNamespace(tokens=[0], seed=seed) for seed in range(texts)]

    def row(self, text, guesses: list[int], domain: int) -> Row:
        history = text.tokens + guesses
        return Row(self.params, text.seed, len(history), history, None, 1, domain)

    def round(self) -> list[tuple[list[int], list[int]]]:
        """Of each text the guesses, and what comes out."""
        domain = TARGET if self.rule == "sample" else DRAFT
        counts = [K] * len(self.texts)
        drafts = self.toy.propose(self.texts, counts, lambda *own: self.row(*own, domain))
        rows = [
            self.row(text, draft.ids[:j], TARGET)
            for text, draft in zip(self.texts, drafts)
            for j in range(K + 1)
        ]
        logits = self.law[[row.history[-1] for row in rows]].log()
        came = [[id for id, *_ in own] for own in verify(logits, rows, drafts, self.rule)]
        for text, ids in zip(self.texts, came):
            text.tokens = text.tokens + ids
        return [(draft.ids, ids) for draft, ids in zip(drafts, came)]


def picture(rule: str, agreement: float, curve: str, requests: int) -> str:
    lines = [
        f"A toy target of {len(WORDS)} words; a drafter that knows {agreement:.0%} of its law,"
        f' and a guess later 95% of that; rule "{rule}"',
        "",
    ]
    chances, tokens = {}, {}
    for each in RULES:
        toys, acceptance = Toys(each, agreement), Acceptance()
        acceptance.MEMORY = math.inf
        for n in range(4):
            for i, (guesses, ids) in enumerate(toys.round()):
                acceptance.count(0, len(ids) - 1, len(ids) <= K)
                if i == 0 and each == rule:
                    lines += shown(n + 1, guesses, ids)
        chances[each] = acceptance.survival(0, K)
        later = [len(ids) for _ in range(4) for _, ids in toys.round()]
        tokens[each] = [sum(min(n, 1 + k) for n in later) / len(later) for k in range(K + 1)]
    return "\n".join(lines + worth(chances, tokens, curve, requests))


def shown(n: int, guesses: list[int], ids: list[int]) -> list[str]:
    """A round: the guesses, and below them what comes out."""

    def words(ids: list[int]) -> str:
        return "".join(f"{WORDS[id]:<5}" for id in ids)

    right = len(ids) - 1
    last = "corrected" if right < K else "bonus"
    return [
        f"round {n}  guesses   {words(guesses)}".rstrip(),
        f"         come out  {words(ids):<{5 * (K + 1)}} {right} accepted, 1 {last}",
    ]


def expected(costs: Costs, chances: list[float], k: int, requests: int) -> tuple[float, float]:
    """With k guesses for each request: tokens a round of one, and how many times plain decoding."""
    tokens = 1 + sum(chances[:k])
    seconds = costs.step_s(requests * (1 + k)) + k * GUESS_S
    return tokens, tokens * costs.step_s(requests) / seconds


def chosen(costs: Costs, chances: list[float], requests: int) -> tuple[int, float]:
    """How many guesses `choose` takes at most, and how many times plain decoding that is."""
    counts, (tokens, seconds) = choose(
        costs, [chances] * requests, requests, requests, lambda n: n * GUESS_S
    )
    return max(counts), tokens / seconds / (requests / costs.step_s(requests))


def worth(chances: dict, counted: dict, curve: str, requests: int) -> list[str]:
    """What each number of guesses leads to by both rules, and what is chosen here and elsewhere.

    chances: rule -> as from `survival`; counted: rule -> tokens a round, for each k
    """
    costs = {name: Costs(points) for name, points in CURVES.items()}
    here = f"on a {curve}, {requests} request{'s' * (requests > 1)}"
    titles = "".join(f'rule "{rule}", {here}'.ljust(53) for rule in RULES)
    columns = f"{'guess k right':<18}{'tokens: E, counted':<20}{'times plain':<15}"
    lines = ["", f"   {titles.rstrip()}", f"k  {(columns * 2).rstrip()}"]
    best = {rule: chosen(costs[curve], chances[rule], requests)[0] for rule in RULES}
    for k in range(K + 1):
        line = f"{k:<3}"
        for rule in RULES:
            rate = (chances[rule][k - 1] / (chances[rule][k - 2] if k > 1 else 1)) if k else 1
            bar = f"{rate:.2f} {'#' * round(12 * rate)}" if k else ""
            tokens, times = expected(costs[curve], chances[rule], k, requests)
            mark = " <" if k == best[rule] else ""
            line += f"{bar:<18}{tokens:>7.2f}{counted[rule][k]:>8.2f}{'':<5}"
            line += f"{times:.2f} {'#' * round(2 * times)}{mark}".ljust(15)
        lines.append(line.rstrip())
    sizes = (1, 2, 4, 8, 16, 64, 256)
    title = 'rule "sample", requests a step'
    lines += ["", title + "".join(f"{n:>10}" for n in sizes)]
    for name in CURVES:
        line = f"  on a {name}: guesses, times".ljust(len(title))
        for n in sizes:
            k, times = chosen(costs[name], chances["sample"], n)
            line += (f"{k}: {times:.2f}" if k else "none").rjust(10)
        lines.append(line)
    return lines + [
        "",
        "E = 1 + r1 + r1 r2 + ...: of 4 rounds of 200 texts; counted: in 4 others. While a step waits",
        "for the weights its rows cost nothing. Where they do, or many requests share it, k = 0 is",
        "right: a guess is a row, and must bring more than a row costs.",
    ]


if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser(description="Guess, verify, and see what it is worth.")
    parser.add_argument("--rule", choices=RULES, default="sample", help="of the rounds shown")
    parser.add_argument("--agreement", type=float, default=0.8, help="from 0 to 1 (default 0.8)")
    parser.add_argument("--costs", choices=CURVES, default="cpu", help="how a step's time grows")
    parser.add_argument("--requests", type=int, default=1, help="in a step, 1 to 256 (default 1)")
    args = parser.parse_args()
    if not 0 <= args.agreement <= 1:
        parser.error(f"--agreement {args.agreement} is not from 0 to 1")
    if not 1 <= args.requests <= 256:
        parser.error(f"--requests {args.requests} is not from 1 to 256")
    print(picture(args.rule, args.agreement, args.costs, args.requests))
