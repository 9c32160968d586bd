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
                 a token is drawn from what p has more than q: each token's law is p
              3. p is what sampling draws by: after penalties, bias, mask, temperature, filters
              4. a row's history and mask hold the guesses before it
              5. whether and where a draft ends depends on no coin that verifies it, and of what a
                 guess is only with the guess itself still in the draft
              6. a drafter's slot belongs to a running request, and to one

Units         tokens, rows; seconds; rates from 0 to 1.
Article       "Speculative Decoding from First Principles"
Try           python speculative.py                 rounds, acceptance, what it is worth
              python tests/mutations.py speculative.py   change it: known bugs, each with its test
Imports       kernels, kv_cache, model, sample.
"""

import json
import math
import time
from bisect import bisect_left
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import safetensors
import safetensors.torch
import torch
from torch import Tensor

import kernels
import kv_cache
from kv_cache import LayerSpec, Segment, Step
from model import Checkpoint, Model
from sample import (
    ACCEPT, DRAFT, RESIDUAL, TARGET, Row, SamplingParams, distribution, draw, logprobs, noise_key,
    sample, uniform,
)  # fmt: skip

# ---------------------------------------------------------------- verification


@dataclass
class Draft:
    """Guesses for one request.

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
          et al. 2211.17192, Chen et al. 2302.01318; accepts more where a guess was drawn from q

    Example: drafts [7, 8], drawn 7, 9, 4: out come 7 and 9.
    """
    assert len(rows) == sum(1 + len(draft.ids) for draft in drafts), "rows that are no draft's"
    if rule == "sample":
        drawn = list(zip(*sample(logits, rows)))
        stays, at = [], 0
        for draft in drafts:
            own = drawn[at : at + 1 + len(draft.ids)]
            at += len(own)
            stays.append(own[: 1 + agreed(draft.ids, [id for id, *_ in own])])
    else:
        stays = _reject(logits, rows, drafts)
    # what cannot be drawn is for the next step to find, if something comes before it
    return [own[:-1] if len(own) > 1 and own[-1][0] is None else own for own in stays]


def agreed(guesses: list[int], ids: list[int]) -> int:
    """How many of the first guesses are just these ids."""
    pairs = zip(guesses, ids)
    return next((j for j, (guess, id) in enumerate(pairs) if guess != id), len(guesses))


def _reject(logits: Tensor, rows: list[Row], drafts: list[Draft]) -> list[list]:
    p, took = distribution(logits, rows)
    sizes = [1 + len(draft.ids) for draft in drafts]
    firsts = [sum(sizes[:i]) for i in range(len(sizes))]
    counts = [
        _accepted(draft, p[at : at + len(draft.ids)], rows[at : at + len(draft.ids)])
        for draft, at in zip(drafts, firsts)
    ]
    ends = [at + n for at, n in zip(firsts, counts)]  # the row that each draft ends at
    laws, keys = p[ends], []
    for i, (draft, n, end) in enumerate(zip(drafts, counts, ends)):
        rejected = n < len(draft.ids)
        if rejected:
            laws[i] = residual(laws[i], belief(draft, n, len(laws[i]), p.device))
        domain = RESIDUAL if rejected else rows[end].domain
        keys.append(noise_key(rows[end].seed, domain, rows[end].position))
    drawn = draw(laws, keys).tolist()
    result = []
    for draft, at, n, id in zip(drafts, firsts, counts, drawn):
        ids = [*draft.ids[:n], id if id >= 0 else None]
        own = slice(at, at + n + 1)
        result.append(list(zip(ids, logprobs(logits[own], rows[own], ids), took[own])))
    return result


def _accepted(draft: Draft, p: Tensor, rows: list[Row]) -> int:
    """How many guesses the coins let stay: p (k, V), a row for each."""
    if not draft.ids:
        return 0
    ids = torch.tensor(draft.ids, device=p.device)[:, None]
    chances = p.gather(1, ids)[:, 0].tolist()
    beliefs = [1.0] * len(chances)
    if draft.beliefs is not None:
        beliefs = draft.beliefs.to(p).nan_to_num(0).gather(1, ids)[:, 0].tolist()
    keys = [noise_key(row.seed, ACCEPT, row.position) for row in rows]
    for j, (coin, a, b) in enumerate(zip(uniform(keys, draft.ids), chances, beliefs)):
        if not accepts(coin, a, b):
            return j
    return len(draft.ids)


def accepts(coin: float, p: float, q: float) -> bool:
    """Whether a guess stays that q was the chance of: with min(1, p / q). Never one with p = 0."""
    return coin * q < p


def belief(draft: Draft, j: int, vocab: int, device) -> Tensor:
    """The distribution (V,) that guess j was drawn from."""
    if draft.beliefs is not None:
        return draft.beliefs[j].double().nan_to_num(0)
    certain = torch.zeros(vocab, dtype=torch.float64, device=device)
    certain[draft.ids[j]] = 1
    return certain


def residual(p: Tensor, q: Tensor) -> Tensor:
    """What p has more than q, made a distribution; p itself where that is nothing: (V,)."""
    more = (p - q).clamp(min=0)
    total = more.sum()
    return more / total if total > 0 else p


# ---------------------------------------------------------------- who guesses


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
    these. The longest match wins, of equally long ones the most recent.

    Example: tokens 5 6 7 8 9 5 6: 5 6 was there before, and 7 8 9 5 6 came then.
    """

    name, most, free = "ngram", 16, True
    LONGEST = 4  # tokens that are looked up; what a match is worth depends on how far back it goes

    def __init__(self, shortest: int = 1):
        self.shortest = shortest
        self.known: dict = {}  # request -> (tokens looked at, n-gram -> where its last one ended)

    def propose(self, requests, counts, rows):
        return [self._look_up(r, r.tokens, count) for r, count in zip(requests, counts)]

    def prior(self, kind):
        return 1 - 1 / (1 + kind / 4)  # 1 token alike: 0.2, 4: 0.5, 32: 0.9

    def _look_up(self, request, tokens: list[int], count: int) -> Draft:
        done, ends = self.known.get(request, (0, {}))
        end = self._match(tokens, done, ends)
        self.known[request] = len(tokens), ends
        if end is None:
            return Draft()
        ids = [*tokens[end:], *([0] * count)][:count]
        for j in range(len(tokens) - end, count):  # it runs into what it copies: on and on
            ids[j] = ids[j - (len(tokens) - end)]
        return Draft(ids, kind=self._length(tokens, end))

    def _match(self, tokens: list[int], done: int, ends: dict) -> int | None:
        """Where the longest known n-gram at the end of tokens ended before. Enters all others."""
        for end in range(done, len(tokens)):
            for n in range(self.shortest, min(self.LONGEST, end) + 1):
                ends[tuple(tokens[end - n : end])] = end
        for n in range(min(self.LONGEST, len(tokens) - 1), self.shortest - 1, -1):
            if (end := ends.get(tuple(tokens[-n:]))) is not None:
                return end
        return None

    def _length(self, tokens: list[int], end: int) -> int:
        """Tokens that are alike before both places, up to LONG."""
        n = 0
        while n < LONG and n < end and tokens[end - 1 - n] == tokens[-1 - n]:
            n += 1
        return n

    def keep(self, requests):
        kept = set(requests)
        for request in [r for r in self.known if r not in kept]:
            del self.known[request]


LONG = 32  # tokens of a match beyond which it is as good as any


class Cached(Drafter):
    """A drafter with a cache of its own: contiguous, a slot for each request that it holds. Who
    finds no slot free is not guessed for."""

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

    def guess(self, logits: Tensor, rows: list[Row]) -> tuple[list, list]:
        """An id by each row of logits (R, V), and what it was drawn from: None, if certain."""
        if rows[0].domain != DRAFT:
            return sample(logits, rows)[0], [None] * len(rows)
        beliefs, _ = distribution(logits, rows)
        keys = [noise_key(row.seed, row.domain, row.position) for row in rows]
        return [i if i >= 0 else None for i in draw(beliefs, keys).tolist()], list(beliefs)


@dataclass(eq=False)
class Held:
    """A request in a drafter's cache."""

    base: int  # its position that is the cache's 0
    computed: int = 0  # entries in the cache, which hold for as long as the request's tokens do
    slot: int | None = None
    features: list[list[Tensor]] = field(default_factory=list)  # learnt, not yet in the cache
    pending: int = 0  # positions in them

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

    A subclass says what it reads of the target (`taps`, `hidden`), and has

        fuse(features) -> (n, D)             the target's features as the head reads them
        run(features, tokens, step) -> (T, D) to go on from, (T, E) to score
        score(x) -> logits (R, V)            of the whole vocabulary, -inf where it has no id
    """

    CHUNK = 512  # rows that wait before they are computed without being asked for

    def learn(self, request, start, features):
        if request in self.held and self.held[request].seen != start:  # some were not for it
            self.drop(request)
        held = self.hold(request, start)
        if held is not None and len(features[0]):
            held.features.append(features)
            held.pending += len(features[0])

    def keep(self, requests):
        super().keep(requests)
        for request, held in self.held.items():
            if held.pending >= self.CHUNK:
                self._catch_up([request])

    def most_for(self, request):
        held = self.held.get(request)
        ready = held is not None and held.pending and held.seen == len(request.tokens) - 1
        return self.most if ready else 0

    def _catch_up(self, requests: list) -> tuple[Tensor, Tensor]:
        """Put what was learnt into the cache: of each request's last row what `run` gives."""
        work, features = [], []
        for request in requests:
            held = self.held[request]
            first = held.base + held.computed + 1
            # the token after the last position may not be known yet, in the middle of a prompt
            n = min(held.pending, len(request.tokens) - first)
            parts = [torch.cat(part) for part in zip(*held.features)]
            features.append([part[:n] for part in parts])
            held.features = [[part[n:] for part in parts]] if n < held.pending else []
            held.pending -= n
            work.append((held, request.tokens[first : first + n]))
        step = self.prepare(work)
        fused = self.fuse([torch.cat(part) for part in zip(*features)])
        state, x = self.run(fused, step.tokens, step)
        self.cache.commit(step, None)
        return state[step.sample_rows], x[step.sample_rows]

    def propose(self, requests, counts, rows):
        state, x = self._catch_up(requests)
        held = [self.held[request] for request in requests]
        true = [one.computed for one in held]
        drafts = [Draft() for _ in requests]
        beliefs: list[list] = [[] for _ in requests]
        going = list(range(len(requests)))  # those that want more
        while going:
            ids, laws = self.guess(self.score(x), [rows(requests[i], drafts[i].ids) for i in going])
            more = []
            for at, (i, id, law) in enumerate(zip(going, ids, laws)):
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
        for one, computed in zip(held, true):
            one.computed = computed
        for draft, laws in zip(drafts, beliefs):
            draft.beliefs = torch.stack(laws) if laws and laws[0] is not None else None
        return drafts


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
        logits = x.new_full((len(x), self.target.config.vocab), -torch.inf)
        whole = self.head is None  # then the target's head says more than is asked
        known = self.target.logits(x)[:, self.ids] if whole else kernels.linear(x, self.head)
        logits[:, self.ids] = known
        return logits

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
PENALTIES = (1e-4, 1e-3, 3e-3, 1e-2, 3e-2)  # times the mean square of a feature


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


# ---------------------------------------------------------------- when it pays


class Costs:
    """How long a step takes here, by its rows: measured at a few sizes, straight between them.

    drafted  seconds that each verified draft costs beside its rows: a request of several rows
             attends by itself
    """

    def __init__(self, points: dict[int, float], drafted: float = 0.0):
        self.rows = sorted(points)
        self.seconds = []
        for rows in self.rows:  # a step of more rows is not faster, whatever was measured
            self.seconds.append(max([points[rows], *self.seconds[-1:]]))
        self.drafted = drafted

    def step_s(self, rows: int, drafts: int = 0) -> float:
        """Example: points 1: 10 ms, 3: 14 ms. A step of 2 rows takes 12 ms."""
        x, y = self.rows, self.seconds
        if len(x) == 1:
            return y[0] * max(rows / x[0], 1) + drafts * self.drafted
        i = min(max(bisect_left(x, rows), 1), len(x) - 1)
        slope = (y[i] - y[i - 1]) / (x[i] - x[i - 1])
        return y[i] + slope * (rows - x[i]) + drafts * self.drafted


class Acceptance:
    """How often a guess was right, given that all before it in its draft were: by the draft's
    kind and the guess's place. A place with little behind it is like the one before it."""

    WEIGHT, MEMORY = 4.0, 200.0  # guesses that the prior counts for; after which old ones fade

    def __init__(self, prior=lambda kind: 0.5):
        self.prior = prior
        self.tried: dict[tuple[int, int], float] = {}
        self.right: dict[tuple[int, int], float] = {}

    def count(self, kind: int, right: int, wrong: bool):
        """The first `right` guesses were right, and the one after them wrong, or none came."""
        for j in range(right + wrong):
            tried = self.tried.get((kind, j), 0.0)
            fade = 1.0 if tried < self.MEMORY else 1 - 1 / self.MEMORY
            self.tried[kind, j] = fade * tried + 1
            self.right[kind, j] = fade * self.right.get((kind, j), 0.0) + (j < right)

    def survival(self, kind: int, most: int) -> list[float]:
        """The chance that guess 1, 2, ... `most` is accepted with all before it."""
        chances, chance, rate = [], 1.0, self.prior(kind)
        for j in range(most):
            tried, right = (x.get((kind, j), 0.0) for x in (self.tried, self.right))
            rate = (right + self.WEIGHT * rate) / (tried + self.WEIGHT)
            chance *= rate
            chances.append(chance)
        return chances


def choose(costs: Costs, chances: list[list[float]], sampled: int, rows: int, guessing_s=float):
    """How many guesses to verify of each draft: those with the best chances, as long as tokens a
    second rise. Gives the counts, and what they lead to expect: (tokens, seconds) of the step.

    chances: of each draft as from `survival`; sampled: requests that the step samples from; rows:
    of the step without guesses; guessing_s(n): seconds to make n guesses for each request.

    Example: rows 1, 2, 3 take 10, 14, 18 ms and the chances are 0.8, 0.3: 1 token in 10 ms, 1.8
    in 14, 2.1 in 18. One guess it is.
    """
    order = sorted((-chance, j, r) for r, own in enumerate(chances) for j, chance in enumerate(own))
    counts, tokens = [0] * len(chances), float(sampled)
    found = counts.copy(), (tokens, costs.step_s(rows))
    best = MARGIN * tokens / found[1][1]
    for m, (chance, _, r) in enumerate(order, 1):
        counts[r] += 1
        tokens -= chance
        seconds = costs.step_s(rows + m, sum(map(bool, counts))) + guessing_s(max(counts))
        if tokens / seconds > best:
            best = tokens / seconds
            found = counts.copy(), (tokens, seconds)
    return found


SIZES = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 24, 32, 48)  # rows of the steps that are measured
MARGIN = 1.02  # times as many tokens a second, or the guesses are not worth their noise


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
        self.guess_s = 0.0  # a guess for each request, or a block of them
        self.draft_s = 0.0  # that the last `propose` took
        self.expected = (0.0, 0.0)  # tokens and seconds of the next step
        self.tally = Tally()

    def learn(self, request, start: int, features: list[Tensor]):
        self.drafter.learn(request, start, features)

    def keep(self, requests: list):
        """Forget all others."""
        self.drafter.keep(requests)
        kept = set(requests)
        for known in (self.drafts, self.watched):
            for request in [r for r in known if r not in kept]:
                del known[request]

    def propose(self, requests: list, room: list[int], rows: int, make_row) -> list[Draft]:
        """Drafts for requests that the next step samples from, at most `room` guesses each.

        rows: of the next step, without guesses. make_row: see Drafter.propose.
        """
        began = time.perf_counter()
        most = [min(n, self.most, self.drafter.most_for(r)) for r, n in zip(requests, room)]
        asked = [i for i, n in enumerate(most) if n > 0]
        drafts = [Draft() for _ in requests]
        if self.drafter.free:
            self._ask(drafts, asked, requests, most, make_row)
            for request, draft in zip(requests, drafts):
                self._watch(request, draft)
            counts = self._counts(drafts, [len(draft.ids) for draft in drafts], rows)
            drafts = [draft.cut(n) for draft, n in zip(drafts, counts)]
        else:
            counts = self._counts(drafts, most, rows)
            asked = [i for i in asked if counts[i]]
            self._ask(drafts, asked, requests, counts, make_row)
        self.draft_s = time.perf_counter() - began
        self.drafts = {r: draft for r, draft in zip(requests, drafts) if draft.ids}
        return drafts

    def _ask(self, drafts: list[Draft], asked: list[int], requests, counts, make_row):
        if not asked:
            return
        began = time.perf_counter()
        some = [counts[i] for i in asked]
        made = self.drafter.propose([requests[i] for i in asked], some, make_row)
        for i, draft in zip(asked, made):
            drafts[i] = draft
        each = (time.perf_counter() - began) / (1 if self.drafter.parallel else max(some))
        if not self.drafter.free:
            self.guess_s = 0.8 * self.guess_s + 0.2 * each if self.guess_s else each

    def _counts(self, drafts: list[Draft], most: list[int], rows: int) -> list[int]:
        chances = [self.acceptance.survival(d.kind, n) for d, n in zip(drafts, most)]
        if self.costs is None:
            return most
        sampled = len(drafts)
        if self.fixed is not None:
            tokens = sampled + sum(map(sum, chances))
            took = self.costs.step_s(rows + sum(most), sum(map(bool, most)))
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
            self.acceptance.count(old.kind, right, right < len(old.ids))
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
        self.tally.add(guesses, right, tokens)
        if guesses and not self.drafter.free:
            self.acceptance.count(0, right, right < guesses)

    def account(self, seconds: float, sampled: int, tokens: int):
        """A step without prompts: how long it took with what was spent on guesses, from how many
        requests it sampled, and what came out; against the same without guesses."""
        if self.costs is None:
            return
        t, plain_s = self.tally, self.costs.step_s(sampled) / sampled
        t.plain_s += tokens * plain_s
        t.spent_s += seconds
        t.expected_plain_s += self.expected[0] * plain_s
        t.expected_s += self.expected[1]

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
                f"speed-up {t.speedup:.2f} times plain decoding, of {1e3 * t.plain_s / t.tokens:.1f}"
                f" ms a token by its own measure; {t.expected_speedup:.2f} was expected"
            )
        return lines


PROBE = 64  # rounds without a guess, after which a drafter is asked for one


MOST = 64  # guesses a round


# ---------------------------------------------------------------- drafters by name

DRAFTERS = {  # name -> what makes one: (path, target, its checkpoint) -> Drafter
    "ngram": lambda path, target, checkpoint: NGram(),
    "linear": Linear.load,
}
PATHS = {"draft": "MODEL", "eagle": "PATH", "dflash": "PATH", "linear": "PATH"}  # that need one


def drafter(name: str, target: Model, checkpoint: Checkpoint) -> Drafter:
    """The drafter of a name such as "ngram" or "eagle:PATH", for a target. ValueError: there is
    none, or it does not go with the target."""
    kind, colon, path = name.partition(":")
    if kind not in DRAFTERS or bool(path) != (kind in PATHS) or bool(colon) != bool(path):
        known = [f"{x}:{PATHS[x]}" if x in PATHS else x for x in DRAFTERS]
        raise ValueError(f"speculative {name!r} is not {' or '.join(known)}")
    return DRAFTERS[kind](path, target, checkpoint)


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
        f"A toy target of {len(WORDS)} words; a drafter that knows {agreement:.0%} of its law, and a"
        f' guess later 95% of that; rule "{rule}"',
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
        "E = 1 + r1 + r1 r2 + ...: of 4 rounds of 200 texts, counted in 4 others. A step's rows cost",
        "nothing while it waits for the weights; once they do, and requests share a step, k = 0 is right.",
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
