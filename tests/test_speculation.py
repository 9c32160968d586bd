"""speculative.py in the engine: guesses change how long a text takes, and nothing else."""

import math
import random
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
import torch

import generate
import model
from generate import Engine, SamplingParams
from sample import DRAFT, TARGET, draw, noise_key
from speculative import Draft, Drafter

GOLDEN = Path(__file__).parent / "golden"
KINDS = ["qwen3", "qwen2_sliding", "qwen3_5_text", "deepseek_v3", "deepseek_v32", "gemma3"]


class Oracle(Drafter):
    """Knows what will come (`answers`: prompt -> all tokens), and says some of it wrong."""

    name, most = "oracle", 6

    def __init__(self, answers: dict, how: str, vocab: int):
        self.answers, self.how, self.vocab = answers, how, vocab
        self.draw = random.Random(7)

    def propose(self, requests, counts, rows):
        return [Draft(self._guesses(r, n)) for r, n in zip(requests, counts)]

    def _guesses(self, request, n):
        known = self.answers[tuple(request.tokens[: request.prompt_tokens]), request.index]
        ids = known[len(request.tokens) :][:n]
        if self.how == "wrong":
            ids = [(i + 1) % self.vocab for i in ids]
        if self.how == "alternating":
            ids = [(i + j % 2) % self.vocab for j, i in enumerate(ids)]
        if self.how == "random":
            ids = ids[: self.draw.randrange(n + 1)]
            ids = [i if self.draw.random() < 0.7 else self.draw.randrange(self.vocab) for i in ids]
        return ids


def checkpoint(family: str) -> model.Checkpoint:
    return model.load(GOLDEN / family)


def served(engine: Engine, work) -> list:
    """Tokens, reasons and logprobs of each request, every invariant checked at every step."""
    requests = [engine.add(prompt, params) for prompt, params in work]
    while engine.scheduler.busy:
        engine.step()
        engine.check()
    assert engine.manager.held == 0
    members = [one for r in requests for one in r.family]
    return [(one.prompt_tokens, one.index, one.tokens, one.finish_reason) for one in members]


def workload(vocab: int, seed: int = 0, count: int = 5) -> list:
    draw = random.Random(seed)
    work = []
    for i in range(count):
        prompt = [draw.randrange(3, vocab) for _ in range(draw.randrange(1, 30))]
        params = {"temperature": 0.8 * (i % 2), "seed": i, "max_tokens": draw.randrange(1, 30)}
        if i % 3 == 2:
            params |= {"top_k": 20, "presence_penalty": 0.5, "repetition_penalty": 1.1}
        work.append((prompt, SamplingParams(ignore_eos=True, n=1 + (i == 3), **params)))
    return work


@pytest.mark.parametrize("how", ["right", "wrong", "alternating", "random"])
@pytest.mark.parametrize("family", KINDS)
def test_guesses_change_nothing_that_comes_out(family, how):
    data = checkpoint(family)
    work = workload(data.config.vocab)
    base = {"device": "cpu", "dtype": "float32", "block_size": 8, "kv_memory": 2**22}
    plain = served(Engine(data, **base), work)
    answers = {(tuple(tokens[:n]), index): tokens for n, index, tokens, _ in plain}
    oracle = Oracle(answers, how, data.config.vocab)
    engine = Engine(data, **base, speculative=oracle, spec_tokens=6)
    assert served(engine, work) == plain
    tally = engine.speculation.tally
    if how == "right":
        assert tally.accepted == tally.guesses > 0
    if how == "wrong":
        assert tally.accepted == 0 < tally.guesses


class Loud(Drafter):
    """Draws guesses from a law of its own, and says which."""

    name, most = "loud", 3

    def __init__(self, vocab: int):
        self.vocab = vocab

    def propose(self, requests, counts, rows):
        return [self._guesses(r, n, rows) for r, n in zip(requests, counts)]

    def _guesses(self, request, count, rows):
        ids, laws = [], []
        for _ in range(count):
            row = rows(request, ids)
            key = noise_key(row.seed, row.domain, row.position)
            likely = torch.arange(self.vocab) % 3 == (row.position + row.history[-1]) % 3
            laws.append((2.0 * likely).double().softmax(-1))
            ids.append(int(draw(laws[-1][None], [key])))
        return Draft(ids, torch.stack(laws))


def talking(letters=bytes(range(256)), **settings) -> Engine:
    base = {"device": "cpu", "dtype": "float32", "max_len": 64, "kv_memory": 2**20}
    return Engine(generate.byte_checkpoint(letters), **base | settings)


def begun(engine: Engine, prompt: str, **fields):
    """A request after its first step."""
    request = engine.add(prompt, SamplingParams(ignore_eos=True, **fields))
    engine.step()
    return request


def test_a_row_of_a_draft_holds_the_guesses_before_it_and_its_own_mask():
    engine = talking(speculative=Loud(257), spec_tokens=3)
    request = begun(engine, "text", seed=5, regex="[ab](q|u)(r|s)[xy]")
    request.draft = list(b"qs")
    assert request.stream.guide.ahead(request.draft) == 2
    rows, n = engine._rows(request), len(request.tokens)
    assert [row.history for row in rows] == [request.tokens + list(b"qs")[:j] for j in range(3)]
    assert [row.position for row in rows] == [n, n + 1, n + 2]
    assert {(row.seed, row.prompt_tokens, row.domain) for row in rows} == {(5, 4, TARGET)}
    bits = torch.arange(32, dtype=torch.int32)
    allowed = [
        (torch.tensor(row.mask.tolist(), dtype=torch.int32)[:, None] >> bits & 1)
        .flatten()
        .nonzero()[:, 0]
        .tolist()
        for row in rows
    ]
    assert allowed == [list(b"qu"), list(b"rs"), list(b"xy")]
    assert request.stream.guide.mask().tolist() == rows[0].mask.tolist()  # it went nowhere


@pytest.mark.parametrize("rule, domain", [("sample", TARGET), ("reject", DRAFT)])
def test_a_drafter_draws_by_the_targets_noise_where_that_is_what_it_is_compared_with(rule, domain):
    engine = talking(speculative=Loud(257), spec_tokens=3, verify=rule)
    request = begun(engine, "text", seed=5)
    row = engine._draft_row(request, [7, 8])
    assert row.history == request.tokens + [7, 8] and row.mask is None
    assert (row.seed, row.position, row.prompt_tokens) == (5, len(request.tokens) + 2, 4)
    assert row.domain == domain


def test_a_guess_that_ends_a_text_or_breaks_its_grammar_is_the_last_and_stays_in_its_draft():
    """To drop it would be to look before the coin falls: then what comes is no longer p."""
    engine = talking(speculative=Loud(257), spec_tokens=3)
    free = begun(engine, "text", stop_token_ids=[ord("y")])
    assert engine._worth(free, list(b"axyz")) == 3
    assert engine._worth(free, list(b"yy")) == 1
    assert engine._worth(free, list(b"axz")) == 3
    bound = begun(engine, "text", regex="[ab](q|u)(r|s)[xy]+", stop_token_ids=[ord("y")])
    assert engine._worth(bound, list(b"qrxyx")) == 4
    assert engine._worth(bound, list(b"q1xx")) == 2
    assert engine._worth(bound, list(b"1")) == 1
    assert engine._worth(bound, list(b"q")) == 1
    assert engine._worth(bound, []) == 0


@pytest.mark.parametrize("rule", ["sample", "reject"])
def test_at_temperature_0_drawn_guesses_change_nothing_by_either_rule(rule):
    work = [
        ([97 + i] * (1 + i % 3), SamplingParams(temperature=i % 2, seed=i, max_tokens=12, **more))
        for i, more in enumerate([{}, {}, {"frequency_penalty": 2.0}, {}, {"regex": "[a-c]+"}])
    ]
    plain = served(talking(), work)
    engine = talking(speculative=Loud(257), spec_tokens=3, verify=rule)
    same = [a == b for a, b in zip(served(engine, work), plain)]
    assert same[::2] == [True] * 3 and (all(same) or rule == "reject")
    assert engine.speculation.tally.guesses > engine.speculation.tally.accepted


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["sample", "reject"])
def test_three_tokens_of_an_engine_follow_the_models_law(rule):
    """2000 requests of a model of four tokens, with a penalty that sees the guesses; the law is
    that of the logprobs that a plain engine says. Chi-square, one-sided at 1e-6."""
    letters, count = b"abc", 2000
    fields = {"temperature": 2.0, "ignore_eos": True, "frequency_penalty": 1.5}
    asked = SamplingParams(max_tokens=1, logprobs=4, seed=0, **fields)
    prefixes = [ids for n in range(3) for ids in product(range(4), repeat=n)]
    said = talking(letters).generate([[0, 1, *ids] for ids in prefixes], asked)
    laws = {}
    for ids, output in zip(prefixes, said):
        law = [math.exp((x - 1.5 * ids.count(i)) / 2) for i, x in sorted(output.logprobs[0].top)]
        laws[ids] = [x / sum(law) for x in law]
    engine = talking(letters, speculative=Loud(4), spec_tokens=3, verify=rule, max_running=64)
    params = [SamplingParams(max_tokens=4, seed=i, **fields) for i in range(count)]
    counts = Counter(tuple(x.token_ids[:3]) for x in engine.generate([[0, 1]] * count, params))
    cells = Counter({(): 0.0})  # expected, those of fewer than 5 as one
    seen = Counter()
    for a, b, c in product(range(4), repeat=3):
        expected = count * laws[()][a] * laws[a,][b] * laws[a, b][c]
        cell = (a, b, c) if expected >= 5 else ()
        cells[cell] += expected
        seen[cell] += counts[a, b, c]
    found = sum((seen[cell] - expected) ** 2 / max(expected, 5) for cell, expected in cells.items())
    df = len(cells) - 1
    assert df > 20
    assert found < df * (1 - 2 / (9 * df) + 4.7534 * math.sqrt(2 / (9 * df))) ** 3
    assert engine.speculation.tally.accepted > 500
