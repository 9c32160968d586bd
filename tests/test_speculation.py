"""speculative.py in the engine: guesses change how long a text takes, and nothing else."""

import json
import math
import random
import shutil
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

import generate
import model
import speculative
import tiny
from generate import Engine, SamplingParams, byte_checkpoint
from kv_cache import LayerSpec
from sample import DRAFT, TARGET, draw, noise_key
from speculative import DFlash, Draft, Drafter, Eagle, Recorder
from test_speculative_dflash import (
    dflash_close, dflash_cycle, dflash_cyclic, dflash_fields, dflash_fitted, dflash_taps,
    dflash_tensors, dflash_watched,
)  # fmt: skip
from test_speculative_linear import right
from tiny import with_head

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
    return Engine(byte_checkpoint(letters), **base | settings)


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


# ---------------------------------------------------------------- EAGLE-3

POOL = {"device": "cpu", "dtype": "float32", "block_size": 8, "kv_memory": 2**22}
EAGLES = {  # family -> the layers that a head enters; they have too few for those by default
    "qwen3": [2, 3], "qwen2_sliding": [2, 3], "qwen3_5_text": [2, 3, 4], "gemma3": [2, 3, 4],
    "deepseek_v3": [2, 3],
}  # fmt: skip


def eagle_head(folder, family: str, **changes) -> str:
    layers = {"eagle_aux_hidden_state_layer_ids": EAGLES[family]}
    return f"eagle:{tiny.written(folder, *tiny.eagle(**layers, **changes))}"


def few_ids(vocab: int, count: int = 4) -> list:
    """Texts of nearly four ids, greedy and not, so that a random head is right now and then. The
    first two begin alike, for longer than a block."""
    draw, work = random.Random(1), []
    start = [draw.randrange(3, vocab) for _ in range(17)]
    for i in range(count):
        prompt = start * (i < 2) + [draw.randrange(3, vocab) for _ in range(draw.randrange(1, 9))]
        params = {"temperature": 0.8 * (i % 2), "seed": i, "max_tokens": 12 + 3 * i}
        bias = dict.fromkeys(range(5, 9), 12.0)
        work.append((prompt, SamplingParams(ignore_eos=True, logit_bias=bias, **params)))
    return work


def disturbed(engine: Engine, work) -> tuple[list, list]:
    """`served` one after the other, then all again at once, all preempted after every fourth
    step."""
    found = [one for each in work for one in served(engine, [each])]
    requests = [engine.add(prompt, params) for prompt, params in work]
    steps = 0
    while engine.scheduler.busy:
        engine.step()
        engine.check()
        steps += 1
        for request in engine.scheduler.running[::-1] if steps % 4 == 0 else ():
            engine.scheduler._preempt(request)
    assert sum(request.preempted for request in requests) > len(requests)
    return found, [(r.prompt_tokens, r.index, r.tokens, r.finish_reason) for r in requests]


@pytest.mark.parametrize(
    ("family", "rule"),
    [
        *((family, "sample") for family in list(EAGLES)[:3]),
        ("qwen3_5_text", "reject"),
        *(pytest.param(family, "sample", marks=pytest.mark.slow) for family in list(EAGLES)[3:]),
        *(pytest.param(f, "reject", marks=pytest.mark.slow) for f in EAGLES if f != "qwen3_5_text"),
    ],
)
def test_an_eagle_head_changes_nothing_that_comes_out(tmp_path, family, rule):
    data = checkpoint(family)
    work = few_ids(data.config.vocab)
    if rule == "reject":  # the same law; what is greedy is the same
        work = work[::2]
    plain = served(Engine(data, **POOL), work)
    engine = Engine(
        data, **POOL, speculative=eagle_head(tmp_path, family), spec_tokens=3, verify=rule
    )
    assert served(engine, work) == plain
    tally = engine.speculation.tally
    assert 0 < tally.guesses > tally.accepted >= (rule == "sample")


@pytest.mark.parametrize(
    ("family", "budget"),
    [
        ("qwen3_5_text", 5),
        *(
            pytest.param(f, n, marks=pytest.mark.slow)
            for f in EAGLES
            for n in (5, 64)
            if (f, n) != ("qwen3_5_text", 5)
        ),
    ],
)
def test_an_eagle_head_in_chunks_preempted_and_after_prefix_hits(tmp_path, family, budget):
    data = checkpoint(family)
    work = few_ids(data.config.vocab)
    plain = served(Engine(data, **POOL), work)
    path = eagle_head(tmp_path, family, norm_output=True)
    engine = Engine(data, **POOL, speculative=path, spec_tokens=3, budget=budget)
    first, again = disturbed(engine, work)
    assert first == again == plain
    assert engine.counts.reused_tokens > 0 < engine.speculation.tally.accepted


ROUND = 48  # ids in a circle


def circle() -> model.Checkpoint:
    """A target that says of each id, whatever was before it, the one that is 7 further: ids are
    the axes of its residual stream, and its layers add little to them."""
    config = {
        "model_type": "llama", "num_hidden_layers": 7, "hidden_size": ROUND,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64,
        "vocab_size": ROUND, "max_position_embeddings": 128,
    }  # fmt: skip
    data = model.random(model.Config.from_hf(config), 0)
    for name, x in data.tensors.items():
        data.tensors[name] = 0.01 * x if "o_proj" in name or "down_proj" in name else x
    data.tensors["model.embed_tokens.weight"] = torch.eye(ROUND)
    data.tensors["lm_head.weight"] = 2 * further()
    return data


def further() -> torch.Tensor:
    """Of the axis of an id that of the next one."""
    return torch.eye(ROUND).roll(7, 0)


def knowing(folder, reads: str) -> str:
    """A head made by hand that guesses right. Each row attends to itself alone: its q and k are
    the same everywhere, and rope turns them apart. What it adds makes the residual stream the axis
    of the newest token: out of the token, or out of the feature, which is of the one before it."""
    fields, tensors = tiny.eagle(
        wide=ROUND, vocab=ROUND, draft_vocab_size=None, num_attention_heads=6,
        num_key_value_heads=6, attention_bias=True, norm_before_residual=True, rope_theta=1e4,
    )  # fmt: skip
    tensors = {name: torch.ones_like(x) if "norm" in name else 0 * x for name, x in tensors.items()}
    one, none = torch.eye(ROUND), torch.zeros(ROUND, ROUND)
    tensors["fc.weight"] = torch.cat((none, one, none), 1)
    added = (one, -one) if reads == "token" else (none, further() - one)
    attention = "midlayer.self_attn."
    tensors[attention + "v_proj.weight"] = torch.cat(added, 1)
    tensors[attention + "o_proj.weight"] = one
    focus = torch.tensor([60.0, 300.0, 600.0, 600.0, 0, 0, 0, 0]).sqrt().repeat(6)
    tensors |= {f"{attention}{x}_proj.bias": focus.clone() for x in "qk"}
    tensors["lm_head.weight"] = 2 * further()
    return tiny.written(folder, fields, tensors)


class LateEagle(Eagle):
    """Reads the token before the one it should, or the feature."""

    what = "token"

    def run(self, features, tokens, step):
        return super().run(features, (tokens - 7 * (self.what == "token")) % ROUND, step)

    def learn(self, request, start, features):
        if self.what == "feature":
            before = self.__dict__.setdefault("before", {})
            moved = [
                torch.cat((last, x[:-1]))
                for last, x in zip(before.get(request, [x[:1] for x in features]), features)
            ]
            before[request] = [x[-1:] for x in features]
            features = moved
        super().learn(request, start, features)


@pytest.mark.parametrize("reads", ["token", "feature"])
def test_an_eagle_head_that_knows_is_right_and_one_off_by_a_row_is_not(tmp_path, reads):
    data = circle()
    draw = random.Random(0)
    work = [
        (
            [draw.randrange(ROUND) for _ in range(n)],
            SamplingParams(temperature=t, seed=n, max_tokens=25),
        )
        for n, t in ((1, 0.0), (9, 0.0), (20, 0.5))
    ]
    plain = served(Engine(data, **POOL), work)
    path = knowing(tmp_path, reads)
    engine = Engine(data, **POOL, speculative=f"eagle:{path}", spec_tokens=4)
    assert served(engine, work) == plain
    tally = engine.speculation.tally
    assert tally.accepted > 0.9 * tally.guesses > 30 and tally.a_round > 4
    for what in ("token", "feature"):
        late = LateEagle(path, engine.model)
        late.what = what
        other = Engine(data, **POOL, speculative=late, spec_tokens=4)
        assert served(other, work) == plain
        tally = other.speculation.tally
        if what == reads:  # off by one it is wrong; what it does not read does not matter
            assert tally.accepted < 0.05 * tally.guesses
        else:
            assert tally.accepted > 0.9 * tally.guesses


# ---------------------------------------------------------------- guesses from what was computed

BASE = {"device": "cpu", "dtype": "float32", "block_size": 8}


def aware(engine: Engine, work, each=lambda step, requests: None) -> list:
    """`served`, and each slot of the drafter's cache belongs to one running request or to none."""
    drafter, steps = engine.speculation.drafter, 0
    requests = [engine.add(prompt, params) for prompt, params in work]
    while engine.scheduler.busy:
        each(steps, requests)
        engine.step()
        engine.check()
        drafter.slots.check(list(drafter.held.values()))
        assert drafter.held.keys() <= set(engine.scheduler.running)
        for request, held in drafter.held.items():
            assert held.seen == request.computed
            assert held.pending == sum(len(part[0]) for part in held.features)
        steps += 1
    assert engine.manager.held == drafter.slots.held == 0 and not drafter.held
    members = [one for r in requests for one in r.family]
    return [(one.prompt_tokens, one.index, one.tokens, one.finish_reason) for one in members]


def slow_but(one: str, families: list[str]) -> list:
    """One of them by default, the others among the slow tests."""
    slow = [pytest.param(x, marks=pytest.mark.slow) for x in families if x != one]
    return [one, *slow]


class Chain(speculative.Chained):
    """The least that goes on by itself: attention without any weight, over the target's own."""

    name, hidden, most, CHUNK = "chain", True, 4, 5

    def __init__(self, target: model.Model):
        super().__init__(target, (LayerSpec("full", 1, 8),))

    def fuse(self, features):
        return features[0]

    def run(self, features, tokens, step):
        x = features + self.target.embedding[tokens]
        few = x[:, None, :8]
        x = torch.cat((few[:, 0] + step.attend(0, few, few, few)[:, 0], x[:, 8:]), 1)
        return x, x

    def score(self, x):
        return self.target.logits(x)


@pytest.mark.parametrize("family", slow_but("gemma3", KINDS))
def test_any_chain_of_guesses_changes_nothing(family):
    data = checkpoint(family)
    work = workload(data.config.vocab, count=8)
    target = Engine(data, **BASE, kv_memory=2**22)
    plain = served(target, work)
    chain = Chain(target.model)
    engine = Engine(data, **BASE, kv_memory=2**22, speculative=chain, spec_tokens=4, budget=9)
    assert aware(engine, work) == plain
    assert 0 < engine.speculation.tally.accepted < engine.speculation.tally.guesses


# ---------------------------------------------------------------- the checkpoint's own head

HEADED = ["deepseek_v3", "deepseek_v32", "deepseek_v3_yarn", "qwen3_next", "qwen3_5_text"]


@pytest.mark.parametrize("family", slow_but("qwen3_next", HEADED))
def test_a_head_changes_nothing_that_comes_out(family):
    data = with_head(checkpoint(family))
    work = workload(data.config.vocab, count=4)
    plain = served(Engine(data, **BASE, kv_memory=2**22), work)
    engine = Engine(data, **BASE, kv_memory=2**22, speculative="mtp", spec_tokens=3, budget=40)
    assert aware(engine, work) == plain
    assert engine.speculation.tally.guesses > 30
    assert aware(engine, work) == plain  # their prompts are cached now: the head begins after them
    assert engine.counts.reused_tokens > 0


# so that the drafter has fewer slots than there are requests; where no states are, blocks lack too
LITTLE = {"deepseek_v3": 60_000, "deepseek_v32": 60_000, "deepseek_v3_yarn": 40_000}
LITTLE |= {"qwen3_next": 250_000, "qwen3_5_text": 130_000}


@pytest.mark.parametrize("family", slow_but("deepseek_v3", HEADED))
def test_a_head_in_little_memory_changes_nothing(family):
    data = with_head(checkpoint(family))
    work = workload(data.config.vocab, seed=1, count=6)
    plain = served(Engine(data, **BASE, kv_memory=2**22), work)
    memory = {"kv_memory": LITTLE[family], "max_running": 4, "max_len": 64, "budget": 9}
    engine = Engine(data, **BASE, **memory, speculative="mtp", spec_tokens=3)
    assert engine.speculation.drafter.slots.total < engine.scheduler.max_running
    preempted = []

    def preempt(step, requests):
        for request in engine.scheduler.running[::-1][: 2 * (step % 4 == 3)]:
            engine.scheduler._preempt(request)
            preempted.append(request)

    assert aware(engine, work, preempt) == plain
    assert len(preempted) > 10 and engine.speculation.tally.guesses > 20
    assert engine.counts.preemptions > 0 or "qwen" in family


def test_a_head_after_aborted_requests_leaks_nothing():
    data = with_head(checkpoint("deepseek_v3"))
    work = [one for one in workload(data.config.vocab, seed=2, count=9) if one[1].n == 1]
    plain = served(Engine(data, **BASE, kv_memory=2**22), work)
    engine = Engine(
        data, **BASE, kv_memory=2**22, max_running=3, budget=9, speculative="mtp", spec_tokens=3
    )
    draw, gone = random.Random(4), set()

    def abort(step, requests):
        if step % 5 == 4:
            gone.add(draw.choice(requests))
            for request in gone:
                engine.abort(request)

    came = aware(engine, work, abort)
    assert len(gone) > 3
    ended = [(a, b) for a, b in zip(came, plain) if a[3] != "abort"]
    assert len(ended) > 2 and all(a == b for a, b in ended)
    assert all(b[2][: len(a[2])] == a[2] for a, b in zip(came, plain))


def test_a_head_where_a_grammar_leaves_no_choice_changes_nothing():
    """Forced tokens come several at a time: the head waits until the target has computed them."""
    text = byte_checkpoint()
    raw = json.loads((GOLDEN / "deepseek_v3" / "config.json").read_text())
    config = model.Config.from_hf(raw | {"vocab_size": text.config.vocab})
    data = replace(with_head(model.random(config, 0)), tokenizer=text.tokenizer)
    form = {"regex": r"\{name: [a-z]{1,6}, age: (\d{1,3}|none)\}", "max_tokens": 40}
    seeded = {"temperature": 1.0, "seed": 3}
    work = [([5, 6], form | {"temperature": 0.0}), ([7], form | seeded), ([8] * 20, form | seeded)]
    work.append(([9, 9], seeded | {"max_tokens": 20}))
    work = [(prompt, SamplingParams(**params)) for prompt, params in work]
    plain = served(Engine(data, **BASE, kv_memory=2**22), work)
    engine = Engine(data, **BASE, kv_memory=2**22, speculative="mtp", spec_tokens=3, budget=9)
    forced = []

    def note(step, requests):
        running = engine.scheduler.running
        forced.extend(r.missing for r in running if r.output and r.missing > 1)

    assert aware(engine, work, note) == plain
    assert len(forced) > 5 and engine.speculation.tally.guesses > 20


# A model whose next token depends on the last one alone, and a head that knows it: of what it
# hears of token i and of token i + 1 it believes one a little more.


def cyclic(believed: str) -> model.Checkpoint:
    raw = json.loads((GOLDEN / "qwen3_5_text" / "config.json").read_text())
    config = model.Config.from_hf(raw | {"vocab_size": 32, "tie_word_embeddings": False})
    data = with_head(model.random(config, 0))
    after = torch.randperm(32, generator=torch.Generator().manual_seed(3))
    cycle = dict(zip(after.tolist(), after.roll(-1).tolist()))  # one of all 32
    follow = torch.zeros(32, 32)
    for token, follower in cycle.items():
        follow[follower, token] = 1
    tensors = data.tensors
    for name in tensors:
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            tensors[name] = torch.zeros_like(tensors[name])  # x is the embedding, up to the end
        if name.endswith("norm.weight") or "pre_fc_norm" in name:
            tensors[name] = torch.zeros_like(tensors[name])  # times 1
    tensors["model.embed_tokens.weight"] = torch.eye(32)
    tensors["lm_head.weight"] = 2 * follow
    share = {"token": 0.6, "hidden": 0.4}[believed]
    tensors["mtp.fc.weight"] = torch.cat((share * torch.eye(32), (1 - share) * follow), 1)
    return data


class Late(speculative.MTP):
    """Off by one: it is told of position i what the target computed at i - 1."""

    def open(self, slots, max_len):
        super().open(slots, max_len)
        self.last: dict = {}

    def learn(self, request, start, features):
        before = self.last.get(request, torch.zeros(1, 32))
        self.last[request] = features[0][-1:]
        super().learn(request, start, [torch.cat((before, features[0]))[:-1]])


class Early(speculative.MTP):
    """Off by one: with position i it sees token i."""

    def _catch_up(self, requests, leave=0):
        for request in requests:
            request.tokens.insert(0, 0)
        try:
            return super()._catch_up(requests, leave)
        finally:
            for request in requests:
                del request.tokens[0]


GOOD = [(speculative.MTP, "token"), (speculative.MTP, "hidden"), (Late, "token")]  # or unharmed
OFF = [(Late, "hidden"), (Early, "token")]


@pytest.mark.parametrize(("kind", "believed"), GOOD + OFF)
def test_a_good_head_is_right_and_one_that_is_off_by_one_is_not(monkeypatch, kind, believed):
    monkeypatch.setattr(speculative, "MTP", kind)
    engine = Engine(cyclic(believed), **BASE, kv_memory=2**22, speculative="mtp", spec_tokens=3)
    params = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 1}, {"temperature": 0.0}]
    params = [SamplingParams(max_tokens=40, ignore_eos=True, **own) for own in params]
    prompts = [[5], [1, 2, 3], [9, 30, 7, 7, 21, 2, 8, 0, 1, 4]]
    aware(engine, list(zip(prompts, params)))
    tally = engine.speculation.tally
    assert tally.guesses > 80
    rate = tally.accepted / tally.guesses
    assert rate < 0.02 if (kind, believed) in OFF else rate > 0.98, rate


# ---------------------------------------------------------------- DFlash

DFLASH = {  # family: its layers, whose features a head reads, memory that requests contend for
    "qwen3": (3, [2, 0, 1], 2**17),
    "qwen2_sliding": (3, [2, 0, 1], 7 * 2**13),
    "qwen3_5_text": (4, [3, 0, 2], 5 * 2**14),
}


def dflash_head(family: str, folder: Path) -> str:
    layers, ids, _ = DFLASH[family]
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}
    own = {"dflash_config": {"target_layer_ids": ids}, "num_target_layers": layers}
    small = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    fields = dflash_fields(**kinds, **own, **small, use_sliding_window=True)
    return tiny.written(folder, fields, dflash_tensors(fields))


def dflash_work(vocab: int, count: int = 5) -> list:
    """Requests of a common beginning, some greedy, some seeded, one of two samples."""
    work, common = workload(vocab, count=count), [7 + i for i in range(20)]
    return [(common[: 20 * (i % 2)] + prompt, params) for i, (prompt, params) in enumerate(work)]


def dflash_families(*quick: str) -> list:
    """These families; the others are slow."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow)
            for name in DFLASH]  # fmt: skip


@pytest.mark.parametrize("family", dflash_families("qwen2_sliding", "qwen3_5_text"))
def test_dflash_changes_nothing_that_comes_out(family, tmp_path):
    """Greedy and seeded, in chunks, preempted, with prefix hits, not all in the head's cache."""
    data, path = checkpoint(family), dflash_head(family, tmp_path)
    work = dflash_work(data.config.vocab, 8)
    plain = served(Engine(data, **POOL), work)
    crowded = {"budget": 9, "max_running": 6, "max_len": 64, "kv_memory": DFLASH[family][2]}
    engine = Engine(data, **POOL | crowded, speculative=f"dflash:{path}", spec_tokens=4)
    assert served(engine, work) == plain
    assert served(engine, work) == plain
    assert engine.speculation.tally.guesses > 200
    assert engine.counts.preemptions > 0 < engine.counts.reused_tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "settings"),
    [("reject", {}), ("sample", {"budget": 7}), ("reject", {"max_running": 1})],
)
@pytest.mark.parametrize("family", DFLASH)
def test_dflash_changes_nothing_under_other_settings(family, rule, settings, tmp_path):
    """Under "reject" greedy texts are the same, too."""
    data, path = checkpoint(family), dflash_head(family, tmp_path)
    work = dflash_work(data.config.vocab, 8)
    if rule == "reject":
        work = [(prompt, replace(params, temperature=0)) for prompt, params in work]
    if "max_running" in settings:
        work = [(prompt, replace(params, n=1)) for prompt, params in work]
    plain = served(Engine(data, **POOL), work)
    settings = POOL | settings | {"speculative": f"dflash:{path}", "verify": rule}
    engine = Engine(data, **settings, spec_tokens=4)
    assert served(engine, work) == plain
    assert engine.speculation.tally.guesses > 200
    free = Engine(data, **settings)  # as many as it thinks worth it
    assert served(free, work) == plain


def dflash_told(head: DFlash, fresh: DFlash, answers: dict) -> list:
    """Let a head say in every other round what comes, so that guesses are accepted; what it would
    have said is compared with a head that learns all at once. Gives the bases of what it held."""
    propose, seen, other, bases = head.propose, dflash_watched(head), dflash_watched(fresh), []

    def checked(requests, counts, rows):
        seen.clear()
        drafts = propose(requests, counts, rows)
        for request, draft, found in zip(requests, drafts, seen[0].split(counts)):
            bases.append(head.held[request].base)
            taps = dflash_taps(head.target, request.tokens[:-1], head.taps)
            fresh.learn(request, bases[-1], [x[bases[-1] :] for x in taps])
            other.clear()
            fresh.propose([request], [len(found)], rows)
            dflash_close(found, other[0], 1e-3)
            fresh.keep([])
            if len(bases) % 2:
                known = answers[tuple(request.tokens[: request.prompt_tokens]), request.index]
                draft.ids = known[len(request.tokens) :][: len(found)]
        return drafts

    head.propose = checked
    return bases


@pytest.mark.parametrize("family", dflash_families("qwen3_5_text"))
def test_dflash_knows_in_the_engine_what_it_would_know_by_itself(family, tmp_path):
    """Chunks, batches, accepted and rejected guesses, prefix hits: the context is always right."""
    data, path = checkpoint(family), dflash_head(family, tmp_path)
    work = dflash_work(data.config.vocab)[:4]
    plain = served(Engine(data, **POOL), work)
    answers = {(tuple(tokens[:n]), index): tokens for n, index, tokens, _ in plain}
    settings = POOL | {"budget": 9, "kv_memory": 2**18, "max_len": 64, "max_running": 3}
    engine = Engine(data, **settings, speculative=f"dflash:{path}", spec_tokens=4)
    fresh = DFlash(path, model.Model(data.config, data.tensors))
    fresh.open(1, 64)
    bases = dflash_told(engine.speculation.drafter, fresh, answers)
    assert served(engine, work) == plain
    assert served(engine, work) == plain
    tally = engine.speculation.tally
    assert 0 < tally.accepted < tally.guesses
    assert any(bases) and not all(bases)


def test_dflash_that_learnt_its_target_is_accepted(tmp_path):
    """Under both rules, greedy and drawn: 4 guesses are 5 tokens a round."""
    data = dflash_cyclic()
    path = tiny.written(tmp_path, *dflash_fitted(data))
    params = [{"temperature": 0}, {"temperature": 1.0, "seed": 3}, {"temperature": 0.7, "seed": 4}]
    params = [SamplingParams(max_tokens=41, ignore_eos=True, **own) for own in params]
    work = [(dflash_cycle(i, 9 + i), own) for i, own in enumerate(params)]
    plain = served(Engine(data, **POOL), work)
    for rule in ("sample", "reject"):
        engine = Engine(data, **POOL, speculative=f"dflash:{path}", spec_tokens=4, verify=rule)
        assert served(engine, work) == plain
        tally = engine.speculation.tally
        assert tally.accepted > 0.95 * tally.guesses and tally.a_round > 4


# ---------------------------------------------------------------- another model guesses


def plainly(data: model.Checkpoint, **settings) -> Engine:
    base = {"device": "cpu", "dtype": "float32", "block_size": 8, "kv_memory": 2**22}
    return Engine(data, **base | settings)


def twin(data: model.Checkpoint, **settings) -> Engine:
    """An engine whose model drafts for itself: whatever is asked, each guess is right."""
    own = model.Model(data.config, data.tensors)
    drafter = speculative.DraftModel(own, own)
    return plainly(data, **{"speculative": drafter, "spec_tokens": 5} | settings)


def asked(vocab: int, count: int = 6, most: int = 30) -> list:
    """Work without an early end; every other prompt begins alike."""
    draw = random.Random(3)
    shared = [draw.randrange(3, vocab) for _ in range(20)]
    work = []
    for i in range(count):
        prompt = shared * (i % 2) + [draw.randrange(3, vocab) for _ in range(draw.randrange(1, 30))]
        params = {
            "temperature": 0.8 * (i % 3 > 0),
            "seed": i,
            "max_tokens": draw.randrange(4, most),
        }
        if i % 3 == 2:
            params |= {"top_k": 20, "presence_penalty": 0.5, "repetition_penalty": 1.1}
        work.append((prompt, SamplingParams(ignore_eos=True, n=1 + (i == 3), **params)))
    return work


QUICK = [("qwen3", "sample"), ("qwen3_5_text", "reject"), ("deepseek_v32", "sample")]
SLOW = [(family, rule) for family in KINDS for rule in speculative.RULES]


@pytest.mark.parametrize(
    "family, rule",
    QUICK + [pytest.param(*x, marks=pytest.mark.slow) for x in SLOW if x not in QUICK],
)
def test_a_model_that_drafts_for_itself_is_always_right(family, rule):
    """With prompts in parts, shared prefixes, several samples; who joins and leaves."""
    data = checkpoint(family)
    work = asked(data.config.vocab, 4)
    engine = twin(data, verify=rule, max_running=4, budget=24)
    texts = served(engine, work)
    tally = engine.speculation.tally
    assert tally.accepted == tally.guesses > 40
    assert tally.a_round > 2
    if rule == "sample":
        assert texts == served(plainly(data), work)
    assert not engine.speculation.drafter.held
    assert engine.speculation.drafter.slots.held == 0


class TwoSlots(speculative.DraftModel):
    """Has room for two requests, whatever the memory."""

    def slot_bytes(self, max_len):
        return 0

    def open(self, slots, max_len):
        super().open(2, max_len)


@pytest.mark.parametrize(
    "family, kv_memory",
    [pytest.param("qwen3", 74_000, marks=pytest.mark.slow), ("qwen3_5_text", 56_000)],
)
def test_it_goes_on_after_preemption_and_without_a_slot_for_everyone(family, kv_memory):
    data = checkpoint(family)
    own, work = model.Model(data.config, data.tensors), asked(data.config.vocab, most=40)
    engine = plainly(
        data, speculative=TwoSlots(own, own), spec_tokens=5, kv_memory=kv_memory, max_running=4,
        budget=24, max_len=96,
    )  # fmt: skip
    drafter = engine.speculation.drafter
    preempted = without = 0

    def look(record):
        nonlocal preempted, without
        preempted += len(record.preempted)
        without += len(engine.scheduler.running) - len(drafter.held)
        assert drafter.held.keys() <= set(engine.scheduler.running)

    engine.watch = look
    assert served(engine, work) == served(plainly(data), work)
    tally = engine.speculation.tally
    assert preempted > 0 and without > 0
    assert tally.accepted == tally.guesses > 30


def test_a_draft_model_is_named_by_its_path():
    data, lines = checkpoint("qwen3"), []
    name = f"draft:{GOLDEN / 'qwen3'}"
    engine = plainly(data, speculative=name, spec_tokens=3, say=lines.append)
    work = asked(data.config.vocab, 3)
    assert served(engine, work) == served(plainly(data), work)
    tally = engine.speculation.tally
    assert tally.accepted == tally.guesses > 0
    [own] = [line for line in lines if "draft's own" in line]
    slots, each = len(engine.speculation.drafter.slots.free), 2**22 // 2
    assert own.startswith(f"cache: {slots} requests of draft's own, ")
    bytes_each = engine.speculation.drafter.slot_bytes(engine.config.positions)
    assert slots == each // bytes_each
    assert engine.speculation.drafter.cache.nbytes == slots * bytes_each


def test_another_model_guesses_and_the_text_is_the_targets():
    """One that thinks otherwise, of a smaller vocabulary, with states where the target has none."""
    data, other = checkpoint("qwen3"), checkpoint("qwen3_5_text")
    work = asked(data.config.vocab, 3)
    drafter = speculative.DraftModel(
        model.Model(data.config, data.tensors), model.Model(other.config, other.tensors)
    )
    engine = plainly(data, speculative=drafter, spec_tokens=4, budget=24)
    assert served(engine, work) == served(plainly(data), work)
    assert engine.speculation.tally.guesses > 40


def test_what_cannot_be_a_draft_model_is_refused_in_a_sentence(tmp_path):
    def refusal(name, **settings):
        with pytest.raises(ValueError) as refused:
            plainly(checkpoint("qwen3"), speculative=f"draft:{name}", **settings)
        assert "\n" not in str(refused.value)
        return str(refused.value)

    assert "no such file or folder" in refusal("nobody/knows/it")
    folder = tmp_path / "changed"
    shutil.copytree(GOLDEN / "qwen3", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 90}))
    assert refusal(folder) == (
        f"speculative draft:{folder}: its vocabulary has 90 ids, that of qwen3 96"
    )
    (folder / "config.json").write_text(json.dumps(config))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert refusal(folder).startswith(f"speculative draft:{folder}: ")
    message = refusal(GOLDEN / "qwen3", kv_memory=40_000)
    assert message.startswith("kv_memory 40,000 bytes: draft needs ")


@pytest.mark.parametrize("settings", [{"spec_tokens": 6}, {"verify": "reject"}])
def test_n_grams_of_prompts_that_repeat_and_of_others(settings):
    data, draw = checkpoint("qwen3"), random.Random(1)
    work = []
    for i in range(4):
        prompt = [draw.randrange(3, 96) for _ in range(4)] * (1 + 3 * (i % 2))
        params = SamplingParams(temperature=0.0, max_tokens=25, ignore_eos=True, n=1 + (i == 1))
        work.append((prompt, params))
    engine = plainly(data, speculative="ngram", budget=24, max_running=4, **settings)
    assert served(engine, work) == served(plainly(data), work)
    assert not engine.speculation.drafter.known
    if "spec_tokens" in settings:
        assert engine.speculation.tally.accepted > 5


# ---------------------------------------------------------------- a linear head


def recorded(data: model.Checkpoint, base: dict, count: int = 40) -> tuple[Engine, list]:
    """An engine, and what its model computed over answers of its own."""
    engine, draw = Engine(data, **base, speculative=Recorder()), random.Random(3)
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    prompts = [[draw.randrange(3, data.config.vocab) for _ in range(8)] for _ in range(count)]
    requests = [engine.add(prompt, params) for prompt in prompts]
    while engine.scheduler.busy:
        engine.step()
    texts = [engine.speculation.drafter.text(request) for request in requests]
    assert all(text.tokens == r.tokens[: len(text.hidden) + 1] for text, r in zip(texts, requests))
    return engine, texts


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5_text"])
def test_a_linear_head_changes_nothing_that_comes_out(family):
    """Gemma's: 0.88 of first guesses on other answers are right, and 0.15 by a token one off (what
    comes after a random model's token is nearly told by that token; a hidden state that is one off
    shows in test_speculative_linear.py, and with real weights below)."""
    data = checkpoint(family)
    base = {"device": "cpu", "dtype": "float32", "block_size": 8, "kv_memory": 2**22}
    engine, texts = recorded(data, base | {"prefix_cache": False})
    with torch.inference_mode():
        head, rates = speculative.fit(engine.model, texts[5:], texts[:5], units=0)
        shifts = [right(head, texts[:5], token=shift) for shift in (-1, 1)]
    work = workload(data.config.vocab)
    plain = served(Engine(data, **base), work)
    engine = Engine(data, **base, speculative=head, spec_tokens=3)
    assert served(engine, work) == plain
    tally = engine.speculation.tally
    assert tally.guesses > tally.accepted > 0
    before = tally.drafts  # the prompts are found now: a head is ready after one row
    assert served(engine, work) == plain
    assert engine.counts.reused_tokens > 0 and tally.drafts == 2 * before
    if family == "gemma3":
        assert rates[0] > 0.8 and max(shifts) < 0.3
        assert tally.accepted / tally.guesses > 0.4


def test_a_linear_head_after_a_preemption():
    """Blocks for two requests of five: who gave his up computes again, and its state is new."""
    data = checkpoint("gemma3")
    base = {"device": "cpu", "dtype": "float32", "block_size": 8, "max_len": 64}
    engine, texts = recorded(data, base | {"prefix_cache": False, "kv_memory": 2**22})
    with torch.inference_mode():
        head, _ = speculative.fit(engine.model, texts, texts[:5], units=0)
    work = workload(data.config.vocab, seed=1, count=9)
    plain = served(Engine(data, **base, kv_memory=2**22), work)
    engine = Engine(data, **base, kv_memory=40_000, speculative=head, spec_tokens=3)
    assert served(engine, work) == plain
    assert engine.counts.preemptions > 0 and engine.speculation.tally.accepted > 0


def test_fit_writes_the_same_file_again_and_the_engine_takes_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(speculative, "UNITS", 32)
    monkeypatch.setattr(generate, "SUBJECTS", generate.SUBJECTS[:4])
    settings = {"device": "cpu", "dtype": "float32", "max_len": 128, "kv_memory": 2**23}
    files = [tmp_path / "one", tmp_path / "other"]
    for file in files:
        engine = Engine(
            generate.byte_checkpoint(), **settings, prefix_cache=False, speculative=Recorder()
        )
        said = generate.fit(engine, str(file), generate.Say(True))
        assert "for a tiny random model, on" in said and f"linear:{file}" in said
    assert files[0].read_bytes() == files[1].read_bytes()
    params = SamplingParams(max_tokens=20, seed=1, temperature=0.5)
    plain = Engine(generate.byte_checkpoint(), **settings).generate("Octavo", params)
    engine = Engine(
        generate.byte_checkpoint(), **settings, speculative=f"linear:{files[0]}", spec_tokens=4
    )
    assert engine.generate("Octavo", params)[0].token_ids == plain[0].token_ids
    assert engine.speculation.tally.guesses > 0


@pytest.mark.real
@pytest.mark.slow
def test_a_head_for_the_real_model_and_an_off_by_one(tmp_path, monkeypatch):
    """On 24 answers: 0.25 of first guesses on others are right; by a state that is one late 0.20,
    by a token that is one off 0.05. (A state that is one early tells as much, if there were one.)"""
    monkeypatch.setattr(generate, "SUBJECTS", generate.SUBJECTS[:5])
    engine = Engine(device="cpu", max_len=512, prefix_cache=False, speculative=Recorder())
    fits, known = [], speculative.fit
    monkeypatch.setattr(
        speculative, "fit", lambda *data: fits.append((data, known(*data))) or fits[0][1]
    )
    generate.fit(engine, str(tmp_path / "head"), generate.Say(True))
    (_, _, held), (head, rates) = fits[0]
    with torch.inference_mode():
        good = right(head, held)
        late = right(head, held, feature=-1)
        tokens = [right(head, held, token=shift) for shift in (-1, 1)]
    assert rates[0] > 0.15 and abs(good - rates[0]) < 0.02
    assert late < 0.9 * good and max(tokens) < 0.4 * good
    engine = Engine(
        device="cpu", dtype="float32", max_len=512, speculative=f"linear:{tmp_path / 'head'}",
        spec_tokens=2,
    )  # fmt: skip
    plain = Engine(device="cpu", dtype="float32", max_len=512)
    question = [{"role": "user", "content": "How do birds find their way?"}]
    params = SamplingParams(max_tokens=100, temperature=0)
    assert engine.generate(question, params)[0].text == plain.generate(question, params)[0].text
    assert engine.speculation.tally.accepted > 0


@pytest.mark.parametrize(
    "more", [["--prompt", "x"], ["--json"], ["--temperature", "0"], ["--speculative", "ngram"]]
)
def test_fit_takes_no_flags_of_an_answer(more, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        generate.main(["--fit", str(tmp_path / "head"), "--model", str(tmp_path / "none"), *more])
    assert ended.value.code == 2 and "--fit" in capsys.readouterr().err


def test_fit_names_a_file_that_cannot_be_written(tmp_path, capsys):
    assert generate.main(["--fit", str(tmp_path / "no" / "head")]) == 1
    assert "no file that can be written" in capsys.readouterr().err
