"""speculative.Linear: a head that is solved for. What `fit` finds, the file it goes to, its door."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import speculative
from sample import Row, SamplingParams
from speculative import Linear, Text, agreement, fit

E, V = 16, 40
torch.set_num_threads(1)

GREEDY = SamplingParams(temperature=0).with_defaults({})


def normed(x):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


class Exact:
    """A target whose next hidden state is a linear function of its last one and of a token."""

    def __init__(self, tied: bool = True):
        draw = torch.Generator().manual_seed(1)
        self.embedding = torch.randn(V, E, generator=draw)
        self.rows = self.embedding if tied else torch.randn(V, E, generator=draw)  # its head's
        self.config = SimpleNamespace(width=E, vocab=V, tied=tied)
        self.a, self.b = (torch.randn(E, E, generator=draw) / 4 for _ in range(2))

    def logits(self, hidden):
        return hidden @ self.rows.T

    def next(self, hidden, token: int):
        return self.a @ normed(hidden) + self.b @ normed(self.embedding[token])

    def text(self, seed: int, length: int = 20) -> Text:
        """Begins with two tokens and a state at random, and goes on by itself."""
        draw = torch.Generator().manual_seed(seed)
        tokens = torch.randint(V, (2,), generator=draw).tolist()
        hidden = [torch.randn(E, generator=draw)]
        while len(tokens) < length:
            hidden.append(self.next(hidden[-1], tokens[-1]))
            tokens.append(int(self.logits(hidden[-1]).argmax()))
        return Text(tokens, torch.stack(hidden), 1)


@dataclass(eq=False)
class Request:
    tokens: list[int]


def texts(target, seeds) -> list[Text]:
    return [target.text(seed) for seed in seeds]


@pytest.fixture(scope="module")
def exact() -> tuple[Exact, Linear, list[float]]:
    target = Exact()
    return target, *fit(target, texts(target, range(300)), texts(target, range(300, 320)), units=8)


# ---------------------------------------------------------------- by hand


def test_features_are_both_normed_a_one_and_sums_behind_a_relu():
    random = torch.tensor([[1.0, 0, 0, 0, 0], [0, 0, 0, -1, 1]])
    seen = speculative.mixed(torch.tensor([[3.0, -4]]), torch.tensor([[0.0, 2]]), random)
    h, e = [0.8485, -1.1314], [0.0, 1.4142]
    assert seen[0].tolist() == pytest.approx([*h, *e, 1, 0.8485, 0], abs=1e-4)


def test_the_likeliest_next_state_is_found_where_it_is_linear(exact):
    target, head, rates = exact
    assert rates == [1, 1]
    matrix = head.parts["matrix"]
    seen = torch.randn(50, 2 * E, generator=torch.Generator().manual_seed(5))
    one = torch.ones(50, 1)
    mixed = speculative.mixed(seen[:, :E], seen[:, E:], head.random)
    h, e = normed(seen[:, :E]), normed(seen[:, E:])
    wanted = h @ target.a.T + e @ target.b.T
    assert torch.allclose(mixed @ matrix.T, wanted, atol=0.02)
    assert mixed.shape == (50, 2 * E + len(one[0]) + 8)


def test_a_whole_draft_is_what_comes(exact):
    """From the newest state and token alone, and then from its own."""
    target, head, _ = exact
    head.open(2, 64)
    text = target.text(500)
    works = [(text.tokens[:6], 0), (text.tokens[:9], 4)]  # one with a beginning that was found
    requests = [Request(tokens) for tokens, _ in works]
    for request, (tokens, start) in zip(requests, works):
        assert head.most_for(request) == 0
        head.learn(request, start, [text.hidden[start : len(tokens) - 1]])
        assert head.most_for(request) == head.most

    def rows(request, guesses):
        return Row(GREEDY, 0, len(request.tokens) + len(guesses), request.tokens + guesses)

    drafts = head.propose(requests, [5, 3], rows)
    assert drafts[0].ids == text.tokens[6:11] and drafts[1].ids == text.tokens[9:12]
    requests[0].tokens = text.tokens[:8]  # two more came
    assert head.most_for(requests[0]) == 0
    head.learn(requests[0], 5, [text.hidden[5:7]])
    assert head.propose(requests[:1], [4], rows)[0].ids == text.tokens[8:12]
    head.keep(requests[1:])
    assert head.most_for(requests[0]) == 0 and list(head.held) == requests[1:]


def test_it_says_only_ids_that_it_was_fitted_on(exact):
    target, _, _ = exact
    some = texts(target, range(3))
    head, _ = fit(target, some, some[:1], units=0)
    known = sorted({id for text in some for id in text.tokens})
    assert head.ids.tolist() == known and 3 < len(known) < V
    logits = head.score(torch.ones(2, E))
    assert logits.isfinite().nonzero()[:, 1].tolist() == known * 2
    assert torch.allclose(logits[0, known], (torch.ones(1, E) @ target.embedding[known].T)[0])


def test_a_target_with_a_head_of_its_own():
    target = Exact(tied=False)
    made, rates = fit(target, texts(target, range(300)), texts(target, range(300, 320)), units=0)
    assert rates == [1, 1]


def test_agreement_counts_a_second_guess_where_the_first_is_right(exact):
    target, head, _ = exact
    text = target.text(700, length=7)  # guesses of tokens 2 .. 6: five places, then four
    assert agreement(head, [text], 3) == [1, 1, 1]
    wrong = Text([*text.tokens[:4], (text.tokens[4] + 1) % V, *text.tokens[5:]], text.hidden, 1)
    first, second = agreement(head, [wrong], 2)
    assert first == 3 / 5 and second == 1 / 2  # not of token 4, and not after it
    assert agreement(head, [Text(text.tokens, text.hidden, 5)], 2) == [1, 0]  # the last one only


def test_the_penalty_is_what_is_best_on_other_texts(monkeypatch, exact):
    target = exact[0]
    train, held = texts(target, range(30)), texts(target, range(30, 50))
    both = {}
    for penalty in (1e-6, 1e4):
        monkeypatch.setattr(speculative, "PENALTIES", (penalty,))
        both[penalty] = fit(target, train, held, units=0)[1]
    assert both[1e-6] > both[1e4]
    for order in ((1e-6, 1e4), (1e4, 1e-6)):
        monkeypatch.setattr(speculative, "PENALTIES", order)
        assert fit(target, train, held, units=0)[1] == both[1e-6]


def test_a_recorder_begins_again_where_a_request_does():
    """Positions 3 and 4 of one whose beginning was found; then all, for it was preempted."""
    recorder, request = speculative.Recorder(), Request(list(range(7)))
    request.prompt_tokens = 5
    state = torch.arange(14.0).view(7, 2)
    recorder.learn(request, 3, [state[3:4]])
    recorder.learn(request, 4, [state[4:5]])
    text = recorder.text(request)
    assert (text.tokens, text.first, text.hidden.tolist()) == ([3, 4, 5], 2, state[3:5].tolist())
    recorder.learn(request, 0, [state[:6]])
    text = recorder.text(request)
    assert (text.tokens, text.first, text.hidden.tolist()) == ([*range(7)], 5, state[:6].tolist())


# ---------------------------------------------------------------- an off-by-one shows


def right(head: Linear, texts: list[Text], feature: int = 0, token: int = 0) -> float:
    """How often a first guess is right, if states or tokens were taken from so many further on."""
    hits = []
    for text in texts:
        ids = torch.tensor(text.tokens)
        at = torch.arange(max(text.first - 1, 1), len(ids) - 3)
        _, x = head.run(text.hidden[at + feature].to(head.dtype), ids[at + 1 + token], None)
        hits += (head.score(x).argmax(-1) == ids[at + 2]).tolist()
    return sum(hits) / len(hits)


def test_a_shift_by_one_is_no_better_than_noise(exact):
    target, head, _ = exact
    held = [target.text(seed, length=8) for seed in range(700, 750)]
    assert right(head, held) == 1
    for shift in (-1, 1):
        assert right(head, held, feature=shift) < 0.25
        assert right(head, held, token=shift) < 0.25


# ---------------------------------------------------------------- the file, and its door


@pytest.fixture
def saved(exact, tmp_path):
    path = tmp_path / "head"
    exact[1].save(str(path), model="exact", right="1 1")
    return path


CHECKPOINT = SimpleNamespace(name="exact")


def test_what_was_saved_is_what_is_loaded(exact, saved):
    target, head, _ = exact
    drafter = speculative.drafter(f"linear:{saved}", target, CHECKPOINT)
    assert type(drafter) is Linear and set(drafter.parts) == set(head.parts)
    assert all(torch.equal(drafter.parts[name], head.parts[name]) for name in head.parts)
    state, tokens = torch.randn(5, E), torch.arange(5)
    one, other = (h.score(h.run(state, tokens, None)[1]) for h in (head, drafter))
    assert torch.equal(one, other)


def test_rows_of_a_head_come_from_the_checkpoint(tmp_path):
    target = Exact(tied=False)
    some = texts(target, range(3))
    head, _ = fit(target, some, some, units=0)
    head.save(str(tmp_path / "head"), model="exact")
    checkpoint = SimpleNamespace(name="exact", tensors={"lm_head.weight": target.rows})
    loaded = Linear.load(str(tmp_path / "head"), target, checkpoint)
    x = torch.randn(3, E)
    ours, its = (one.score(x)[:, head.ids] for one in (loaded, head))
    assert torch.allclose(ours, its, atol=1e-5)


REFUSED = {  # what is wrong with a file -> words of the refusal
    "missing": "no safetensors file",
    "folder": "no safetensors file",
    "text": "no safetensors file",
    "truncated": "no safetensors file",
    "width": "it was fitted for width 16, the model has 8",
    "vocab": "it was fitted for vocab 40, the model has 39",
    "model": "it was fitted for model exact, the model has other",
    "metadata": "it was fitted for width none",
    "tensor": "it has no tensor 'matrix'",
    "shape": r"matrix is \(16, 40\), not \(16, 41\)",
    "type": "its ids are not integers from 0 to 39",
    "range": "its ids are not integers from 0 to 39",
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_file_that_is_none_or_another_model_s_is_refused(what, saved):
    target, name, path = Exact(), "exact", saved
    about = {"octavo": '{"width": 16, "vocab": 40, "model": "exact"}'}
    parts = load_file(saved)
    if what == "missing":
        path = saved.parent / "nothing"
    elif what == "folder":
        path = saved.parent
    elif what == "text":
        saved.write_text("not tensors")
    elif what == "truncated":
        saved.write_bytes(saved.read_bytes()[:-9])
    elif what == "width":
        target.config.width = 8
    elif what == "vocab":
        target.config.vocab = 39
    elif what == "model":
        name = "other"
    elif what == "metadata":
        save_file(parts, saved)
    else:
        if what == "tensor":
            del parts["matrix"]
        elif what == "shape":
            parts["matrix"] = parts["matrix"][:, 1:].contiguous()
        elif what == "type":
            parts["ids"] = parts["ids"].float()
        elif what == "range":
            parts["ids"] = parts["ids"] + 1000
        save_file(parts, saved, about)
    with pytest.raises(ValueError, match=REFUSED[what]) as refused:
        speculative.drafter(f"linear:{path}", target, SimpleNamespace(name=name))
    assert str(refused.value).startswith(f"speculative linear:{path}: ")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["linear", "linear:"])
def test_a_path_is_needed(name):
    with pytest.raises(ValueError, match="linear:FILE"):
        speculative.drafter(name, Exact(), CHECKPOINT)
