"""speculative.py in the engine: guesses change how long a text takes, and nothing else."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch

import model
from generate import Engine, SamplingParams
from speculative import DFlash, Draft, Drafter, Eagle
from test_speculative import (
    dflash_close, dflash_cycle, dflash_cyclic, dflash_fields, dflash_fitted, dflash_taps,
    dflash_tensors, dflash_watched,
)  # fmt: skip

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


# ---------------------------------------------------------------- DFlash

DFLASH = {  # family: its layers, whose features a head reads, memory that requests contend for
    "qwen3": (3, [2, 0, 1], 2**17),
    "qwen2_sliding": (3, [2, 0, 1], 7 * 2**13),
    "qwen3_5_text": (4, [3, 0, 2], 5 * 2**14),
}
BASE = {"device": "cpu", "dtype": "float32", "block_size": 8, "kv_memory": 2**22}


def dflash_head(family: str, folder: Path) -> str:
    layers, ids, _ = DFLASH[family]
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}
    own = {"dflash_config": {"target_layer_ids": ids}, "num_target_layers": layers}
    small = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    fields = dflash_fields(**kinds, **own, **small, use_sliding_window=True)
    return tiny.written(folder, fields, dflash_tensors(fields))


def shared_work(vocab: int, count: int = 5) -> list:
    """Requests of a common beginning, some greedy, some seeded, one of two samples."""
    work, common = workload(vocab, count=count), [7 + i for i in range(20)]
    return [(common[: 20 * (i % 2)] + prompt, params) for i, (prompt, params) in enumerate(work)]


def some(*quick: str) -> list:
    """These families; the others are slow."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow)
            for name in DFLASH]  # fmt: skip


@pytest.mark.parametrize("family", some("qwen2_sliding", "qwen3_5_text"))
def test_dflash_changes_nothing_that_comes_out(family, tmp_path):
    """Greedy and seeded, in chunks, preempted, with prefix hits, not all in the head's cache."""
    data, path = checkpoint(family), dflash_head(family, tmp_path)
    work = shared_work(data.config.vocab, 8)
    plain = served(Engine(data, **BASE), work)
    crowded = {"budget": 9, "max_running": 6, "max_len": 64, "kv_memory": DFLASH[family][2]}
    engine = Engine(data, **BASE | crowded, speculative=f"dflash:{path}", spec_tokens=4)
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
    work = shared_work(data.config.vocab, 8)
    if rule == "reject":
        work = [(prompt, replace(params, temperature=0)) for prompt, params in work]
    if "max_running" in settings:
        work = [(prompt, replace(params, n=1)) for prompt, params in work]
    plain = served(Engine(data, **BASE), work)
    settings = BASE | settings | {"speculative": f"dflash:{path}", "verify": rule}
    engine = Engine(data, **settings, spec_tokens=4)
    assert served(engine, work) == plain
    assert engine.speculation.tally.guesses > 200
    free = Engine(data, **settings)  # as many as it thinks worth it
    assert served(free, work) == plain


def told(head: DFlash, fresh: DFlash, answers: dict) -> list:
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


@pytest.mark.parametrize("family", some("qwen3_5_text"))
def test_dflash_knows_in_the_engine_what_it_would_know_by_itself(family, tmp_path):
    """Chunks, batches, accepted and rejected guesses, prefix hits: the context is always right."""
    data, path = checkpoint(family), dflash_head(family, tmp_path)
    work = shared_work(data.config.vocab)[:4]
    plain = served(Engine(data, **BASE), work)
    answers = {(tuple(tokens[:n]), index): tokens for n, index, tokens, _ in plain}
    settings = BASE | {"budget": 9, "kv_memory": 2**18, "max_len": 64, "max_running": 3}
    engine = Engine(data, **settings, speculative=f"dflash:{path}", spec_tokens=4)
    fresh = DFlash(path, model.Model(data.config, data.tensors))
    fresh.open(1, 64)
    bases = told(engine.speculation.drafter, fresh, answers)
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
    plain = served(Engine(data, **BASE), work)
    for rule in ("sample", "reject"):
        engine = Engine(data, **BASE, speculative=f"dflash:{path}", spec_tokens=4, verify=rule)
        assert served(engine, work) == plain
        tally = engine.speculation.tally
        assert tally.accepted > 0.95 * tally.guesses and tally.a_round > 4
