"""Sampling: from a row of logits to the next token, reproducibly.

The idea      The model gives every token a score; temperature, top-k, top-p and min-p reshape
              the distribution, penalties and bias shift it, and one token is drawn. The draw
              adds noise to every score and takes the largest (Gumbel-max): the chance to win
              is exactly the token's probability. The noise is not taken from a stream but
              computed from (seed, domain, position, token id), so a request draws the same
              tokens alone, in any batch, and after it was interrupted.

The data      a row of logits (V,)        2.1   0.3  -1.0   3.3  ...
              penalties, bias, mask       2.1   0.3  -inf   3.3  ...   scores
              / temperature               scaled
              + noise(seed, position, id) 4.0   0.1  -inf   3.1  ...   -> id 0, if top-k, top-p
                                                                       and min-p keep it

Invariants    1. temperature 0 is the argmax of the scores; the filters then change nothing
              2. a masked id is never drawn
              3. noise depends on (seed, domain, position, token id) and on nothing else
              4. an id is dropped before its exact noise is known only where a bound on that
                 noise shows that it cannot win

Units         logits and scores: nats. Probabilities from 0 to 1. position: tokens.
Article       "From Prompt to Token: The Life of an LLM Request"
Try           python sample.py                     a distribution, filtered and drawn from
              python sample.py --temperature 0.5   the same, sharper
              python tests/mutations.py sample.py   change it: known bugs, each with its test
Imports       kernels (the mask).
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

import kernels


@dataclass(frozen=True)
class SamplingParams:
    """How a request is sampled and when it ends. The names are vLLM's.

    None means: what the checkpoint's generation_config says, else no effect (temperature 1).
    ValueError names a value out of range.
    """

    max_tokens: int = 256
    temperature: float | None = None  # 0: always the most likely token
    top_k: int | None = None  # 0 or -1: all
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None  # on tokens of prompt and output (Keskar 2019)
    presence_penalty: float = 0.0  # subtracted once from tokens of the output
    frequency_penalty: float = 0.0  # subtracted for each occurrence in the output
    logit_bias: dict[int, float] | None = None  # added to a token's logit
    logprobs: int | None = None  # of the sampled token and of this many others
    n: int = 1  # samples of the prompt
    seed: int | None = None
    stop: str | list[str] | tuple[str, ...] = ()
    stop_token_ids: list[int] | tuple[int, ...] = ()
    ignore_eos: bool = False
    json_schema: dict | bool | str | None = None  # the text is JSON of this schema; True: any
    regex: str | None = None  # the whole text matches
    choice: list[str] | tuple[str, ...] | None = None  # the text is one of these
    grammar: str | None = None  # the text follows this grammar (GBNF)
    json_whitespace: str = "default"  # "compact", "default" or "any": see grammar.compile
    json_lenient: bool = False  # pass over keywords that cannot be enforced, and say which
    think_end: int | str | None = None  # the grammar begins after this token, of prompt or answer
    priority: int = 0  # smaller goes first, under the policy "priority"
    cache_salt: str | None = None  # a cached prefix is shared within one salt only

    def __post_init__(self):
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            value = [value] if isinstance(value, str) else value
            if not isinstance(value, (list, tuple)):
                raise ValueError(f"{name} {value!r} is not a list")
            object.__setattr__(self, name, tuple(value))
        for name, low, high, whole in RANGES:
            value = getattr(self, name)
            if value is None and name in UNSET:
                continue
            kinds = (int,) if whole else (int, float)
            if isinstance(value, bool) or not isinstance(value, kinds):
                raise ValueError(f"{name} {value!r} is not {'an integer' if whole else 'a number'}")
            if not (low <= value <= high and abs(value) < math.inf):
                raise ValueError(f"{name} {value} is not between {low} and {high}")
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise ValueError(f"stop {list(self.stop)!r}: each must be a non-empty string")
        if any(type(i) is not int for i in self.stop_token_ids):
            raise ValueError(f"stop_token_ids {self.stop_token_ids!r}: each must be an integer")
        if not isinstance(self.logit_bias, dict | None):
            raise ValueError(f"logit_bias {self.logit_bias!r} is not an object of id: bias")
        for name in ("ignore_eos", "json_lenient"):
            if type(getattr(self, name)) is not bool:
                raise ValueError(f"{name} {getattr(self, name)!r} is neither true nor false")
        if self.cache_salt is not None and (
            type(self.cache_salt) is not str or not self.cache_salt
        ):
            raise ValueError(f"cache_salt {self.cache_salt!r} is not a text, or is empty")
        self._check_grammar()
        for i, bias in (self.logit_bias or {}).items():
            number = type(bias) in (int, float) and abs(bias) <= 1e30
            if type(i) is not int or i < 0 or not number:
                raise ValueError(f"logit_bias {i!r}: {bias!r} is not an id and a number up to 1e30")

    def _check_grammar(self):
        given = self.constraint
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)}: a text can follow one of them")
        for name, value in given.items():
            types, words = GRAMMARS[name]
            if not isinstance(value, types):
                raise ValueError(f"{name} {str(value)[:60]!r} is not {words}")
        if any(type(text) is not str for text in self.choice or ()):
            raise ValueError(f"choice {list(self.choice)!r}: each must be a text")
        if type(self.json_whitespace) is not str:
            raise ValueError(f"json_whitespace {self.json_whitespace!r} is not a text")
        if type(self.think_end) not in (int, str, type(None)):
            raise ValueError(f"think_end {self.think_end!r} is neither a token nor its id")
        if self.think_end is not None and not given:
            raise ValueError(f"think_end {self.think_end!r}: there is no grammar to begin after it")

    @property
    def constraint(self) -> dict:
        """The grammar that the text follows, by its field's name; empty without one."""
        return {name: getattr(self, name) for name in GRAMMARS if getattr(self, name) is not None}

    def with_defaults(self, generation: dict) -> "SamplingParams":
        """Fill unset fields from a generation_config."""
        defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        defaults["repetition_penalty"] = 1.0
        unset = [f.name for f in fields(self) if f.name in defaults]
        unset = [name for name in unset if getattr(self, name) is None]
        found = {name: generation.get(name) for name in unset}
        return replace(self, **{k: defaults[k] if v is None else v for k, v in found.items()})


GRAMMARS = {  # field: its types
    "json_schema": ((dict, bool, str), "an object, true, false or JSON text"),
    "regex": (str, "a text"),
    "choice": ((list, tuple), "a list of texts"),
    "grammar": (str, "a text"),
}
UNSET = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "logprobs", "seed")
RANGES = (  # field, lowest, highest, whole numbers only
    ("max_tokens", 1, math.inf, True),
    ("temperature", 0, math.inf, False),
    ("top_k", -1, math.inf, True),
    ("top_p", 1e-9, 1, False),
    ("min_p", 0, 1, False),
    ("repetition_penalty", 1e-9, 1e9, False),
    ("presence_penalty", -1e9, 1e9, False),
    ("frequency_penalty", -1e9, 1e9, False),
    ("logprobs", 0, 1000, True),
    ("n", 1, math.inf, True),
    ("seed", -math.inf, math.inf, True),
    ("priority", -math.inf, math.inf, True),
)


@dataclass(frozen=True)
class Row:
    """What sampling needs to know of one row of logits."""

    params: SamplingParams
    seed: int
    position: int  # of the token to sample, 0 being the prompt's first
    history: Sequence[int] = ()  # all tokens before it; only penalties look at them
    mask: Sequence[int] | None = None  # ids that are allowed, int32 words as in kernels.allow
    prompt_tokens: int = 0  # how many of history are the prompt
    domain: int = 0  # what its noise is for: TARGET, or DRAFT

    def __post_init__(self):
        if None in (self.params.temperature, self.params.repetition_penalty):
            object.__setattr__(self, "params", self.params.with_defaults({}))


@dataclass(frozen=True)
class Logprobs:
    """Natural logarithms of the model's own probabilities, before any of this file's changes."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # the most likely ids, best first


def sample(logits: Tensor, rows: list[Row]) -> tuple[list, list, list]:
    """Draw one token for each row of logits (R, V): ids, logprobs, and what masks took.

    An id is None where nothing can be drawn: every id is masked, or the row has NaN or inf.
    Logprobs are there where asked for, else None. Masks take from the distribution after
    penalties and bias, at temperature 1: of a row that has one the probability of all forbidden
    ids, and whether the likeliest id was one of them; else None.
    """
    scores, took = _scores(logits, rows)
    best, first = scores.max(-1)  # the first of equals
    chosen = torch.where(best.isfinite(), first, -1)
    drawn = [i for i, row in enumerate(rows) if row.params.temperature > 0]
    if drawn:
        where = slice(None)
        if len(drawn) < len(rows):
            where = kernels.upload(drawn, torch.int64, logits.device)
        tokens = _draw(scores[where].float(), [rows[i] for i in drawn])
        chosen[where] = torch.where(chosen[where] < 0, -1, tokens)
    if took is not None:
        took = took.to("cpu", non_blocking=True)  # there as soon as the ids are
    ids = [i if i >= 0 else None for i in chosen.tolist()]  # the one wait for the device
    return ids, logprobs(logits, rows, ids), _shares(took, rows)


def _scores(logits: Tensor, rows: list[Row]) -> tuple[Tensor, Tensor | None]:
    """Logits (R, V) after penalties, bias and masks; and what the masks took, see `_shares`."""
    assert len(rows) == logits.shape[0], f"{len(rows)} rows for {logits.shape[0]} of logits"
    scores, took = logits, None
    if not all(_plain(row) for row in rows):
        scores = torch.stack([_adjust(x, row) for x, row in zip(logits.float(), rows)])
    masked = [i for i, row in enumerate(rows) if row.mask is not None]
    if masked:
        words = kernels.upload_rows([rows[i].mask for i in masked], logits.device)
        places = kernels.upload(masked, torch.int64, logits.device)
        scores, took = kernels.allow(scores, words, places)
    return scores, took


def _shares(took: Tensor | None, rows: list[Row]) -> list[tuple[float, bool] | None]:
    """Of each row that has a mask the probability it took, and whether that of the likeliest."""
    pairs = iter([] if took is None else [(mass, first == 1) for mass, first in took.tolist()])
    return [None if row.mask is None else next(pairs) for row in rows]


def _plain(row: Row) -> bool:
    p = row.params
    penalties = p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1
    return not (penalties or p.logit_bias)


def _adjust(logits: Tensor, row: Row) -> Tensor:
    """Penalties and bias of one row (V,): a new row."""
    p = row.params
    scores = logits.clone()
    if p.repetition_penalty != 1:
        seen = kernels.upload(sorted(set(row.history)), torch.int64, scores.device)
        old = scores[seen]
        penalty = p.repetition_penalty
        scores[seen] = torch.where(old > 0, old / penalty, old * penalty)
    output = row.history[row.prompt_tokens :]
    if output and (p.presence_penalty or p.frequency_penalty):
        counts = Counter(output)
        seen = kernels.upload(list(counts), torch.int64, scores.device)
        counts = kernels.upload(list(counts.values()), torch.float32, scores.device)
        scores[seen] -= p.presence_penalty + p.frequency_penalty * counts
    if p.logit_bias:
        seen = kernels.upload(list(p.logit_bias), torch.int64, scores.device)
        bias = kernels.upload(list(p.logit_bias.values()), torch.float32, scores.device)
        scores[seen] += bias
    return scores


def _draw(scores: Tensor, rows: list[Row]) -> Tensor:
    """Gumbel-max over what the filters keep: scores (R, V) -> ids (R,), of no meaning for a row
    whose maximum is not finite.

    The winner among all ids is the winner among the kept ones if it is kept itself. So nothing
    is sorted: the winner is found, and only then asked whether it belongs to the top k and p.
    """
    columns = _Columns(rows, *scores.shape, scores.device)
    best, first = scores.max(-1, keepdim=True)
    # Relative to the best, so that rounding does not grow with the scores or 1 / temperature.
    # Nothing wins from 60 below, noise being between -3.1 and 22.9; lower still, probabilities
    # become denormal numbers, which CPUs compute a hundred times slower.
    scaled = (scores - best).div_(columns.temperature).clamp_(min=-60)  # the best is 0
    finite, triton = best.isfinite(), kernels.on_triton(scores)
    if triton or not finite.all():  # what is drawn from such a row is not looked at
        scaled.masked_fill_(~finite, 0)
        first.masked_fill_(~finite, 0)  # of equals the first, as below: it is always kept
    # The best id is always kept, so its noisy score is one that the winner must reach.
    floor = gumbel(columns.keys, first).float()
    if triton:
        limits = torch.cat((floor, _total(scaled, columns), columns.top_p, columns.min_p.log()), 1)
        return kernels.draw(scaled, limits, columns.keys, columns.top_k, first)
    values, ids = _contenders(scaled, floor, columns.keys)
    noisy = values + gumbel(columns.keys, ids)
    if not columns.filtered:
        return ids.gather(1, noisy.argmax(-1, keepdim=True))[:, 0]
    kept = _Kept(scaled, columns)
    result = torch.empty_like(first[:, 0])
    todo = torch.arange(len(rows), device=scores.device)  # rows whose winner is not known
    while len(todo):
        winner = noisy[todo].argmax(-1, keepdim=True)
        value, token = values[todo].gather(1, winner), ids[todo].gather(1, winner)
        result[todo] = token[:, 0]
        out = ~(kept(todo, value.float(), token) | (token == first[todo]))[:, 0]
        todo, value, token = todo[out], value[out], token[out]
        # What does not outrank an id that is left out is left out as well.
        lower = (values[todo] < value) | ((values[todo] == value) & (ids[todo] >= token))
        noisy[todo] = noisy[todo].masked_fill(lower, -torch.inf)
    return result


class _Columns:
    """The rows' parameters as columns (R, 1), and their noise keys (R, 1, 2)."""

    def __init__(self, rows: list[Row], R: int, V: int, device):
        def column(values, dtype=torch.float32):
            return kernels.upload(values, dtype, device)[:, None]

        p = [row.params for row in rows]
        self.temperature = column([min(max(x.temperature, 1e-30), 1e30) for x in p])
        self.top_k = column([x.top_k if 0 < x.top_k < V else V for x in p], torch.int64)
        self.largest_k = max([x.top_k for x in p if 0 < x.top_k < V], default=0)
        self.top_p = column([x.top_p for x in p])
        self.min_p = column([x.min_p for x in p])
        self.filtered = self.largest_k > 0 or any(x.top_p < 1 or x.min_p > 0 for x in p)
        self.keys = column([noise_key(r.seed, r.domain, r.position) for r in rows], torch.int32)


def _contenders(scaled: Tensor, floor: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Values (float64) and ids of scaled (R, V) that may reach floor (R, 1): (R, C) each.

    A noise -ln(-ln u) reaches d only if 1 - u <= exp(-d), because 1 - exp(-x) <= x. This takes
    integer arithmetic and one exp an id, where the noise itself takes two logarithms; a dozen
    ids are left of fifty thousand. Rows with fewer than C are filled up with -inf and id 0.
    """
    bits = noise_bits(keys, _all_ids(scaled))
    distance = bits.float().mul_(-(2.0**-32)).add_(0.5 - SLACK)  # not above 1 - u
    keep = distance <= (scaled - floor).exp_()
    row, token = keep.nonzero(as_tuple=True)
    counts = torch.bincount(row, minlength=scaled.shape[0])
    place = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
    shape = (scaled.shape[0], int(counts.max()))
    values = torch.full(shape, -torch.inf, dtype=torch.float64, device=scaled.device)
    ids = torch.zeros(shape, dtype=torch.int64, device=scaled.device)
    values[row, place] = scaled[row, token].double()
    ids[row, place] = token
    return values, ids


SLACK = 2.0**-20  # more than float32 rounding takes from a uniform or from its bound


def _all_ids(scaled: Tensor) -> Tensor:
    return torch.arange(scaled.shape[1], dtype=torch.int32, device=scaled.device)[None]


class _Kept:
    """Tells whether an id of each row survives top-k, then top-p, then min-p.

    top-k keeps k ids, top-p of those the fewest that have the share p (the one that crosses p
    stays), min-p those with at least that part of the best one's probability. Of equals the
    smaller id goes first.
    """

    def __init__(self, scaled: Tensor, columns: _Columns):
        self.scaled, self.columns = scaled, columns
        self.ids = _all_ids(scaled)
        self.probabilities = (scaled - _total(scaled, columns)).exp_()
        self.least = columns.min_p.log()

    def __call__(self, rows: Tensor, value: Tensor, token: Tensor) -> Tensor:
        """One id of each of some rows (N,): value, token (N, 1) -> (N, 1) bool."""
        whole = len(rows) == len(self.scaled)
        scaled = self.scaled if whole else self.scaled[rows]
        probabilities = self.probabilities if whole else self.probabilities[rows]
        top_k, top_p = self.columns.top_k[rows], self.columns.top_p[rows]
        before = (scaled > value) | ((scaled == value) & (self.ids < token))
        mass = (probabilities * before).sum(-1, keepdim=True)
        inside = (mass < top_p) | (top_p >= 1)
        if self.columns.largest_k:
            inside &= before.sum(-1, keepdim=True) < top_k
        return inside & (value >= self.least[rows])


def _total(scaled: Tensor, columns: _Columns) -> Tensor:
    """Log of the sum over what top-k leaves, of which probabilities are shares: (R, 1)."""
    total = scaled.logsumexp(-1, keepdim=True)
    if columns.largest_k:
        top = scaled.topk(columns.largest_k).values
        ranks = torch.arange(columns.largest_k, device=scaled.device)
        inside = top.masked_fill(ranks >= columns.top_k, -torch.inf)
        of_top = inside.logsumexp(-1, keepdim=True)
        total = torch.where(columns.top_k < scaled.shape[1], of_top, total)
    return total


def distribution(logits: Tensor, rows: list[Row]) -> tuple[Tensor, list]:
    """The probabilities that `sample` draws each row by, (R, V) in float64, and what masks took.

    At temperature 0 all is on one id. A row from which nothing can be drawn is all 0. Sums are
    float64 here: where top-p falls on one just so, `sample` may keep an id more, or one less.
    """
    scores, took = _scores(logits, rows)
    columns = _Columns(rows, *scores.shape, scores.device)
    scores = scores.double()
    best, first = scores.max(-1, keepdim=True)
    scaled = (scores - best).div_(columns.temperature).nan_to_num_(nan=-torch.inf)
    if columns.filtered:
        scaled.masked_fill_(_left_out(scaled, columns), -torch.inf)
    result = scaled.softmax(-1)
    cold = [row.params.temperature == 0 for row in rows]
    if any(cold):
        cold = kernels.upload(cold, torch.bool, scores.device)[:, None]
        result = torch.where(cold, torch.zeros_like(result).scatter_(1, first, 1), result)
    return torch.where(best.isfinite(), result, 0), _shares(took, rows)


def _left_out(scaled: Tensor, columns: _Columns) -> Tensor:
    """Which ids of scaled (R, V) the filters drop: what `_Kept` tells of one id, of all of them."""
    order, ids = scaled.sort(dim=-1, descending=True, stable=True)  # of equals the smaller id first
    out = torch.arange(order.shape[1], device=order.device) >= columns.top_k
    shares = order.masked_fill(out, -torch.inf).softmax(-1)
    before = shares.cumsum(-1) - shares
    out |= (before >= columns.top_p) & (columns.top_p < 1)
    out |= order < columns.min_p.double().log()
    return torch.zeros_like(out).scatter_(1, ids, out)


def draw(probabilities: Tensor, keys: list[list[int]]) -> Tensor:
    """Ids (R,) drawn by probabilities (R, V), with the noise of `noise_key`s; -1 for a row that
    is all 0."""
    keys = kernels.upload(keys, torch.int32, probabilities.device)[:, None]
    best, ids = (probabilities.double().log() + gumbel(keys, _all_ids(probabilities))).max(-1)
    return torch.where(best.isfinite(), ids, -1)


def uniform(keys: list[list[int]], ids: list[int]) -> list[float]:
    """A number between 0 and 1, neither of them, for an id each: the coins of a verification."""
    keys, ids = torch.tensor(keys, dtype=torch.int32)[:, None], torch.tensor(ids)[:, None]
    return _uniform(noise_bits(keys, ids))[:, 0].tolist()


def logprobs(logits: Tensor, rows: list[Row], ids: list) -> list[Logprobs | None]:
    """Of each row that asks for them, and has an id."""
    result: list[Logprobs | None] = [None] * len(rows)
    for i, row in enumerate(rows):
        if row.params.logprobs is None or ids[i] is None:
            continue
        logs = logits[i].float().log_softmax(-1)
        top = logs.topk(min(row.params.logprobs, len(logs)))
        pairs = tuple(zip(top.indices.tolist(), top.values.tolist()))
        result[i] = Logprobs(ids[i], float(logs[ids[i]]), pairs)
    return result


# ---------------------------------------------------------------- noise

TARGET, DRAFT, ACCEPT, RESIDUAL = range(4)  # what a noise is for


def mix(*values: int) -> int:
    """Fold integers into 64 well-mixed bits (splitmix64's finaliser, Steele et al. 2014)."""
    state = 0
    for value in values:
        state = (state + value + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state


def sample_seed(seed: int, index: int) -> int:
    """The seed of sample `index` of a request: sample 0 has the request's own."""
    return mix(seed, index) if index else seed


def noise_key(seed: int, domain: int, position: int) -> list[int]:
    """Two 32-bit keys, as signed integers, for all token ids of one row."""
    bits = mix(seed, domain, position)
    halves = (bits & 0xFFFFFFFF, bits >> 32)
    return [half - (half >> 31 << 32) for half in halves]


def noise_bits(keys: Tensor, ids: Tensor) -> Tensor:
    """32 random bits, as int32, for token ids (R or 1, C) under keys (R, 1, 2) int32: (R, C)."""
    return _mix32(_mix32(ids.int()) * (keys[..., 1] | 1) + keys[..., 0])


def gumbel(keys: Tensor, ids: Tensor) -> Tensor:
    """Standard Gumbel noise, float64, for token ids (R, C): -ln(-ln(u)), from -3.1 to 22.9."""
    return -(-_uniform(noise_bits(keys, ids)).log()).log()


def _uniform(bits: Tensor) -> Tensor:
    return (bits.double() + (2.0**31 + 0.5)) / 2.0**32  # in (0, 1)


def _mix32(x: Tensor) -> Tensor:
    """A bijection of 32 bits without visible structure (Wellons' lowbias32)."""
    x = x ^ (x >> 16 & 0xFFFF)
    x *= 0x7FEB352D
    x ^= x >> 15 & 0x1FFFF
    x *= 0x846CA68B - 2**32
    x ^= x >> 16 & 0xFFFF
    return x


# ---------------------------------------------------------------- the experiment


def picture(temperature: float, draws: int = 10_000) -> str:
    words = ["blue", "grey", "clear", "red", "green", "dark", "up", "the"]
    logits = torch.tensor([3.2, 2.6, 2.3, 1.1, 0.7, 0.2, -0.8, -1.5])
    cases = {
        "as it is": {},
        "top_k 3": {"top_k": 3},
        "top_p 0.9": {"top_p": 0.9},
        "min_p 0.05": {"min_p": 0.05},
    }
    probabilities = (logits / temperature).softmax(-1).tolist()
    lines = [f"The sky is ...   temperature {temperature:g}: each id's probability, and out of"]
    lines[0] += f" {draws:,} draws"
    lines += ["", f"{'':<7}{'p':>6}  {'':<20}" + "".join(f"{name:>11}" for name in cases)]
    counts = []
    for settings in cases.values():
        params = SamplingParams(temperature=temperature, **settings).with_defaults({})
        rows = [Row(params, 1, i) for i in range(draws)]
        ids, *_ = sample(logits.expand(draws, -1), rows)
        counts.append([ids.count(i) for i in range(len(words))])
    for i, word in enumerate(words):
        bar = "#" * round(40 * probabilities[i])
        row = "".join(f"{count[i] or '-':>11}" for count in counts)
        lines.append(f"{word:<7}{probabilities[i]:>6.3f}  {bar:<20}{row}")
    lines += ["", "Each draw has its own position; the same (seed, position) draws the same id:"]
    params = SamplingParams(temperature=temperature).with_defaults({})
    for seed in (1, 1, 2):
        rows = [Row(params, seed, i) for i in range(9)]
        ids, *_ = sample(logits.expand(9, -1), rows)
        lines.append(f"  seed {seed}: " + " ".join(words[i] for i in ids))
    return "\n".join(lines)


if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser(description="Filter a distribution and draw from it.")
    parser.add_argument("--temperature", type=float, default=1.0, help="above 0 (default 1)")
    args = parser.parse_args()
    if not args.temperature > 0:
        parser.error(f"--temperature {args.temperature} must be above 0 here")
    print(picture(args.temperature))
