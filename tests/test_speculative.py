"""speculative.py by itself: verification, and who guesses."""

import random
from pathlib import Path

import pytest
import torch

import kv_cache
import model
import speculative
import tiny
from sample import DRAFT, TARGET, Row, SamplingParams, distribution

GOLDEN = Path(__file__).parent / "golden"


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


def test_n_grams_of_who_ended_are_forgotten():
    drafter = speculative.NGram()
    one, other = Asking([1, 2, 1]), Asking([1, 3, 1])
    drafter.propose([one, other], [1, 1], None)
    drafter.keep([other])
    assert list(drafter.known) == [other]
    drafter.keep([])
    assert not drafter.known


# ---------------------------------------------------------------- another model guesses


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
            [id] = speculative.draw(
                p, [speculative.noise_key(made.seed, made.domain, made.position)]
            ).tolist()
        else:
            [id] = speculative.sample(own.logits(hidden[-1:]), [made])[0]
        guesses.append(id)
    return guesses


def text(own: model.Model, draw: random.Random, n: int) -> list[int]:
    return [draw.randrange(3, own.config.vocab) for _ in range(n)]


def rows_of(drafter, monkeypatch) -> list[int]:
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
            running.append(Asking(text(own, draw, draw.randrange(1, 30))))
        ready(drafter, running)
        some = draw.sample(running, draw.randrange(1, 4))
        counts = [draw.randrange(1, 5) for _ in some]
        drafts = drafter.propose(some, counts, row)
        for request, count, draft in zip(some, counts, drafts):
            assert draft.ids == alone(own, request.tokens, count, row)
            request.tokens += draft.ids[: draw.randrange(count + 1)]
        for request in running:
            request.tokens += text(own, draw, draw.choice([1, 1, 2, 20]))


def test_who_wants_fewer_guesses_is_in_fewer_passes(monkeypatch):
    own = tiny.build()
    drafter, draw = guesser(own), random.Random(1)
    asking = [Asking(text(own, draw, 5)) for _ in range(3)]
    ready(drafter, asking)
    passes = rows_of(drafter, monkeypatch)
    drafts = drafter.propose(asking, [3, 1, 2], at())
    assert [len(draft.ids) for draft in drafts] == [3, 1, 2]
    assert passes == [15, 2, 1]  # what it has not read of each, then a row a guess


def test_a_long_prompt_is_read_in_parts_and_not_guessed_for_before(monkeypatch):
    own = tiny.build()
    drafter, draw = guesser(own), random.Random(2)
    monkeypatch.setattr(drafter, "CHUNK", 32)
    long, short = Asking(text(own, draw, 100)), Asking(text(own, draw, 6))
    passes = rows_of(drafter, monkeypatch)
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
    asking = [Asking(text(own, draw, n)) for n in (25, 40, 30)]
    drafter.keep(asking)
    assert [drafter.held[one].computed for one in asking] == [24, 8, 0]
    drafter.keep(asking)
    assert [drafter.held[one].computed for one in asking] == [24, 39, 1]


def test_guesses_that_came_true_are_not_computed_again(monkeypatch):
    own = tiny.build()
    drafter, asking = guesser(own), Asking([5, 6, 7])
    ready(drafter, [asking])
    [draft] = drafter.propose([asking], [4], at())
    passes = rows_of(drafter, monkeypatch)
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
    passes = rows_of(drafter, monkeypatch)
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
    assert refusal(f"draft:{nowhere}") == f"speculative draft:{nowhere}: {nowhere}: no such file"
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
