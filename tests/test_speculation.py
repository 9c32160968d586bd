"""speculative.py in the engine: guesses change how long a text takes, and nothing else."""

import random
from pathlib import Path

import pytest
import torch
from test_speculative_linear import right

import generate
import model
import speculative
from generate import Engine, SamplingParams
from speculative import Draft, Drafter, Recorder

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
    """On 25 answers: 0.24 of first guesses on others are right; by a state that is one late 0.15, by
    a token that is one off 0.05. (A state that is one early tells as much, if there were one.)"""
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
    assert late < 0.8 * good and max(tokens) < 0.4 * good
    engine = Engine(
        device="cpu", dtype="float32", max_len=512, speculative=f"linear:{tmp_path / 'head'}",
        spec_tokens=2,
    )  # fmt: skip
    plain = Engine(device="cpu", dtype="float32", max_len=512)
    question = [{"role": "user", "content": "How do birds find their way?"}]
    params = SamplingParams(max_tokens=100, temperature=0)
    assert engine.generate(question, params)[0].text == plain.generate(question, params)[0].text
    assert engine.speculation.tally.stayed[0] / engine.speculation.tally.reached[0] > 0.1


@pytest.mark.parametrize(
    "more", [["--prompt", "x"], ["--json"], ["--temperature", "0"], ["--speculative", "ngram"]]
)
def test_fit_takes_no_flags_of_an_answer(more, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        generate.main(["--fit", str(tmp_path / "head"), *more])
    assert ended.value.code == 2 and "--fit" in capsys.readouterr().err


def test_fit_names_a_file_that_cannot_be_written(tmp_path, capsys):
    assert generate.main(["--fit", str(tmp_path / "no" / "head")]) == 1
    assert "no file that can be written" in capsys.readouterr().err
