"""speculative.py without an engine: each drafter against a slower one."""

from dataclasses import dataclass
from functools import cache

import pytest
import tiny
import torch

import kv_cache
import model
import speculative
from sample import DRAFT, Row, SamplingParams

# ---------------------------------------------------------------- EAGLE-3

EAGLE_WIDE, EAGLE_VOCAB = 32, 96  # of the target, as `tiny.eagle` has them


@cache
def eagle_target(layers: int = 7) -> model.Model:
    """A target of enough layers to read three of them."""
    config = {
        "model_type": "llama", "num_hidden_layers": layers, "hidden_size": EAGLE_WIDE,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64,
        "vocab_size": EAGLE_VOCAB, "max_position_embeddings": 256,
    }  # fmt: skip
    checkpoint = model.random(model.Config.from_hf(config), 3)
    target = model.Model(checkpoint.config, checkpoint.tensors)
    target.tensors = checkpoint.tensors
    return target


def eagle(folder, fields: dict, tensors: dict, target=None, slots: int = 4) -> speculative.Eagle:
    """The head in a folder, with every row it scores in `scored`."""
    found = speculative.drafter(
        f"eagle:{tiny.written(folder, fields, tensors)}", target or eagle_target(), None
    )
    found.open(slots, 64)
    tiny.garbage(found.cache)
    score, found.scored = found.score, []
    found.score = lambda x: found.scored.append(score(x)) or found.scored[-1]
    return found


@dataclass(eq=False)
class Reading:
    tokens: list


def eagle_tokens(n: int, seed: int = 0) -> list[int]:
    return torch.randint(EAGLE_VOCAB, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def eagle_norm(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def eagle_turned(x, positions, theta, factor=1.0):
    """Each pair (j, j + d / 2) of x (T, H, d) turned by its angle: as a product of complex
    numbers."""
    half = x.shape[-1] // 2
    speeds = torch.tensor([theta ** (-j / half) / factor for j in range(half)]).double()
    turn = torch.polar(torch.ones(len(x), half).double(), positions.double()[:, None] * speeds)
    z = torch.complex(x[..., :half], x[..., half:]) * turn[:, None]
    return torch.cat((z.real, z.imag), -1)


def seen_before(q, k, v):
    """Causal attention of q (T, H, d) to k, v (T, G, d), whole matrices."""
    T, H, d = q.shape
    k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) / d**0.5
    scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).reshape(T, -1)


def eagle_streams(target, tokens) -> list:
    """The residual stream entering each layer of a Llama, and after the last: by itself."""
    T = {name: x.double() for name, x in target.tensors.items()}
    x, positions = T["model.embed_tokens.weight"][tokens], torch.arange(len(tokens))
    found = [x]
    for i in range(len(target.layers)):
        p = f"model.layers.{i}."
        y = eagle_norm(x, T[p + "input_layernorm.weight"], 1e-6)
        q, k, v = (y @ T[f"{p}self_attn.{n}_proj.weight"].T for n in "qkv")
        q, k, v = (z.unflatten(-1, (-1, 8)) for z in (q, k, v))
        q, k = (eagle_turned(z, positions, 1e4) for z in (q, k))
        x = x + seen_before(q, k, v) @ T[p + "self_attn.o_proj.weight"].T
        y = eagle_norm(x, T[p + "post_attention_layernorm.weight"], 1e-6)
        gate, up = (y @ T[f"{p}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        x = x + (torch.nn.functional.silu(gate) * up) @ T[p + "mlp.down_proj.weight"].T
        found.append(x)
    return found


class SlowEagle:
    """EAGLE-3 by itself: every row again for each guess."""

    def __init__(self, fields, tensors, embedding=None):
        self.fields, self.T = fields, {k: v.double() for k, v in tensors.items()}
        self.eps, self.theta = fields["rms_norm_eps"], fields["rope_theta"]
        self.embedding = self.T.get("embed_tokens.weight", embedding)
        ids = torch.arange(len(tensors["lm_head.weight"]))
        self.ids = ids + tensors["d2t"] if "d2t" in tensors else ids

    def linear(self, x, name):
        y = x @ self.T[f"{name}.weight"].T
        return y + self.T[f"{name}.bias"] if f"{name}.bias" in self.T else y

    def norm(self, x, name):
        return eagle_norm(x, self.T[f"{name}.weight"], self.eps)

    def fused(self, parts):
        if self.fields.get("fc_norm"):
            parts = [self.norm(x, f"fc_norm.{i}") for i, x in enumerate(parts)]
        x = torch.cat(parts, -1)
        return self.linear(self.norm(x, "input_norm") if "input_norm.weight" in self.T else x, "fc")

    def layer(self, g, tokens, base):
        """State to go on from, and logits of all V: of g (T, D), of positions from base on."""
        token = self.norm(self.embedding[tokens], "midlayer.input_layernorm")
        hidden = self.norm(g, "midlayer.hidden_norm")
        both = torch.cat((token, hidden), -1)
        d = self.fields.get("head_dim", g.shape[1] // self.fields["num_attention_heads"])
        q, k, v = (
            self.linear(both, f"midlayer.self_attn.{n}_proj").unflatten(-1, (-1, d)) for n in "qkv"
        )
        if "midlayer.self_attn.q_norm.weight" in self.T:
            q, k = (self.norm(x, f"midlayer.self_attn.{n}_norm") for x, n in ((q, "q"), (k, "k")))
        at = torch.arange(base, base + len(g))
        factor = (self.fields.get("rope_scaling") or {}).get("factor", 1.0)
        q, k = (eagle_turned(x, at, self.theta, factor) for x in (q, k))
        y = hidden if self.fields.get("norm_before_residual") else g
        y = y + self.linear(seen_before(q, k, v), "midlayer.self_attn.o_proj")
        x = self.norm(y, "midlayer.post_attention_layernorm")
        x = torch.nn.functional.silu(self.linear(x, "midlayer.mlp.gate_proj")) * self.linear(
            x, "midlayer.mlp.up_proj"
        )
        z = y + self.linear(x, "midlayer.mlp.down_proj")
        out = self.norm(z, "norm")
        logits = torch.full((len(g), self.fields["vocab_size"]), -torch.inf).double()
        logits[:, self.ids] = self.linear(out, "lm_head")
        return out if self.fields.get("norm_output") else z, logits

    def chain(self, parts, tokens, count, base=0):
        """Most likely guesses and their logits, after true parts (n, W) and tokens 1 .. n."""
        g, tokens, ids, rows = self.fused(parts), list(tokens), [], []
        for _ in range(count):
            state, logits = self.layer(g, tokens, base)
            rows.append(logits[-1])
            ids.append(int(logits[-1].argmax()))
            g, tokens = torch.cat((g, state[-1:])), [*tokens, ids[-1]]
        return ids, torch.stack(rows)


def most_likely(request, guesses):
    place = len(request.tokens) + len(guesses)
    return Row(SamplingParams(temperature=0.0), 0, place, request.tokens + guesses)


def eagle_parts(target, tokens, taps) -> list:
    """What the model's own pass leaves after these layers."""
    rows = kv_cache.ContiguousCache(target.config.specs, 1, 128)
    step = rows.prepare([(tiny.request(tokens), len(tokens))])
    return target(step.tokens, step.positions, step, taps)[1]


def eagle_learns(drafter, request, start: int, end: int, target=None):
    """Let it learn positions start .. end - 1 of a request."""
    parts = eagle_parts(target or eagle_target(), request.tokens[:end], drafter.taps)
    drafter.learn(request, start, [x[start:end] for x in parts])


def eagle_close(found, wanted, atol=2e-4):
    """Equal, also in what is -inf."""
    assert torch.equal(found.isinf(), wanted.isinf())
    where = wanted.isfinite()
    assert torch.allclose(found[where].double(), wanted[where], atol=atol, rtol=1e-4)


EAGLE_VARIANTS = {
    "plain": {},
    "normed_residual": {"norm_before_residual": True},
    "normed_output": {"norm_output": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True, "norm_output": True},
    "own_embedding": {"own": True, "hidden_size": 24, "target_hidden_size": EAGLE_WIDE},
    "whole_vocabulary": {"draft_vocab_size": None},
    "bias": {"attention_bias": True, "mlp_bias": True},
    "heads": {"head_dim": 6, "num_attention_heads": 6, "num_key_value_heads": 3},
    "rope": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_theta": 50.0},
    "two_layers": {"eagle_aux_hidden_state_layer_ids": [3, 7]},
    "layers_left": {"eagle_aux_hidden_state_layer_ids": [1, 2, 5]},
}
EAGLE_ENTERED = {"two_layers": [3, 7], "layers_left": [2, 3, 6]}  # the others: 2, 7 // 2 and 7 - 3


@pytest.mark.parametrize("variant", EAGLE_VARIANTS)
def test_eagle_is_a_slow_one_of_the_streams_that_enter_its_layers(tmp_path, variant):
    fields, tensors = tiny.eagle(**EAGLE_VARIANTS[variant])
    drafter, tokens = eagle(tmp_path, fields, tensors), eagle_tokens(12)
    # the reference reads a pass of its own: a wrong layer, or a wrong row of it, would show
    parts = [
        eagle_streams(eagle_target(), tokens[:-1])[i] for i in EAGLE_ENTERED.get(variant, [2, 3, 4])
    ]
    slow = SlowEagle(fields, tensors, eagle_target().embedding.double())
    request = Reading(tokens)
    eagle_learns(drafter, request, 0, 11)
    # all true pairs: feature i with token i + 1
    held = drafter.held[request]
    step = drafter.prepare([(held, tokens[1:])])
    states, x = drafter.run(drafter.fuse(held.features[0]), step.tokens, step)
    wanted, logits = slow.layer(slow.fused(parts), tokens[1:], 0)
    eagle_close(states, wanted)
    eagle_close(drafter.score(x), logits)
    # and three guesses after them
    held.computed = 0
    drafter.scored.clear()
    (draft,) = drafter.propose([request], [3], most_likely)
    ids, rows = slow.chain(parts, tokens[1:], 3)
    assert draft.ids == ids and draft.beliefs is None
    eagle_close(torch.cat(drafter.scored), rows)


@pytest.mark.parametrize("wrong", [0, 1, 2])
@pytest.mark.parametrize("by", [-1, 1])
def test_eagle_of_another_layer_would_show(tmp_path, wrong, by):
    fields, tensors = tiny.eagle()
    drafter, tokens = eagle(tmp_path, fields, tensors), eagle_tokens(12)
    request, entered = Reading(tokens), [2, 3, 4]
    eagle_learns(drafter, request, 0, 11)
    drafter.propose([request], [1], most_likely)
    entered[wrong] += by
    parts = [eagle_streams(eagle_target(), tokens[:-1])[i] for i in entered]
    slow = SlowEagle(fields, tensors, eagle_target().embedding.double())
    _, rows = slow.chain(parts, tokens[1:], 1)
    known = rows.isfinite()
    assert (drafter.scored[-1][known] - rows[known]).abs().max() > 0.5


@pytest.mark.parametrize("style", ["layers.0.", "model.", "speculators", "nested_ids"])
def test_eagle_by_its_other_names(tmp_path, style):
    own = style == "speculators"
    ids = {"eagle_aux_hidden_state_layer_ids": [2, 5, 6]} if style == "nested_ids" else {}
    fields, tensors = tiny.eagle(own=own, norm_before_residual=own or None, **ids)
    (tmp_path / "plain").mkdir()
    wanted = eagle(tmp_path / "plain", fields, tensors)
    if style == "nested_ids":
        fields["eagle_config"] = ids
        del fields["eagle_aux_hidden_state_layer_ids"]
    if style == "speculators":  # its norm_before_residual is true where nothing is said
        apart = ("draft_vocab_size", "norm_before_residual", "architectures")
        layer = {name: value for name, value in fields.items() if name not in apart}
        fields = {
            "speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"],
            "draft_vocab_size": 40, "transformer_layer_config": layer, "target_hidden_size": None,
        }  # fmt: skip
    if style == "model.":
        tensors = {f"model.{name}": x for name, x in tensors.items()}
    elif style != "nested_ids":
        tensors = {name.replace("midlayer.", "layers.0."): x for name, x in tensors.items()}
    (tmp_path / "other").mkdir()
    found = eagle(tmp_path / "other", fields, tensors)
    assert found.taps == wanted.taps == ((1, 4, 5) if ids else (1, 2, 3))
    request = Reading(eagle_tokens(9))
    for one in (found, wanted):
        eagle_learns(one, request, 0, 8)
    drafts = [one.propose([request], [3], most_likely)[0].ids for one in (found, wanted)]
    assert drafts[0] == drafts[1]
    assert torch.equal(torch.cat(found.scored), torch.cat(wanted.scored))


def test_eagle_whose_layer_norms_its_heads(tmp_path):
    fields, tensors = tiny.eagle(model_type="qwen3", head_dim=8)
    for name in "qk":
        tensors[f"midlayer.self_attn.{name}_norm.weight"] = torch.linspace(0.5, 1.5, 8)
    drafter, tokens = eagle(tmp_path, fields, tensors), eagle_tokens(8)
    request = Reading(tokens)
    eagle_learns(drafter, request, 0, 7)
    (draft,) = drafter.propose([request], [2], most_likely)
    parts = [eagle_streams(eagle_target(), tokens[:-1])[i] for i in (2, 3, 4)]
    ids, rows = SlowEagle(fields, tensors, eagle_target().embedding.double()).chain(
        parts, tokens[1:], 2
    )
    assert draft.ids == ids
    eagle_close(torch.cat(drafter.scored), rows)


def test_eagle_in_a_batch_is_eagle_alone(tmp_path):
    fields, tensors = tiny.eagle(norm_output=True)
    texts = [Reading(eagle_tokens(n, seed=n)) for n in (3, 11, 6)]
    together = eagle(tmp_path, fields, tensors)
    for text in texts:
        eagle_learns(together, text, 0, len(text.tokens) - 1)
    drafts = together.propose(texts, [3, 1, 4], most_likely)
    assert [len(draft.ids) for draft in drafts] == [3, 1, 4]
    rows = [[logits[i] for logits in together.scored[:1]] for i in range(3)]
    rows[0] += [together.scored[1][0], together.scored[2][0]]
    rows[2] += [together.scored[1][1], together.scored[2][1], together.scored[3][0]]
    for text, draft, own in zip(texts, drafts, rows):
        alone = eagle(tmp_path, fields, tensors)
        eagle_learns(alone, text, 0, len(text.tokens) - 1)
        assert alone.propose([text], [len(draft.ids)], most_likely)[0].ids == draft.ids
        eagle_close(torch.stack(own), torch.cat(alone.scored).double())


@pytest.mark.parametrize("ends", [(1, 2, 3, 13), (5, 9, 13), (12, 13)])
def test_eagle_learns_in_pieces_what_it_learns_at_once(tmp_path, ends):
    fields, tensors = tiny.eagle()
    request = Reading(eagle_tokens(14))
    whole, pieces = (eagle(tmp_path, fields, tensors) for _ in range(2))
    pieces.CHUNK = 1  # each piece goes into the cache by itself
    eagle_learns(whole, request, 0, 13)
    start = 0
    for end in ends:
        pieces.keep([request])
        eagle_learns(pieces, request, start, end)
        start = end
    assert pieces.held[request].computed >= ends[-2] - 1  # the last of each piece may wait
    drafts = [one.propose([request], [3], most_likely)[0].ids for one in (whole, pieces)]
    assert drafts[0] == drafts[1]
    eagle_close(torch.cat(pieces.scored), torch.cat(whole.scored).double())


@pytest.mark.parametrize("came", [0, 1, 2, 3])
def test_eagle_after_guesses_were_refused_is_as_if_there_had_been_none(tmp_path, came):
    fields, tensors = tiny.eagle()
    request = Reading(eagle_tokens(9))
    drafter, fresh = (eagle(tmp_path, fields, tensors) for _ in range(2))
    eagle_learns(drafter, request, 0, 8)
    (draft,) = drafter.propose([request], [3], most_likely)
    request.tokens += [*draft.ids[:came], 95 - draft.ids[came] if came < 3 else 7]
    eagle_learns(drafter, request, 8, 9 + came)
    eagle_learns(fresh, request, 0, 9 + came)
    drafter.scored.clear()
    drafts = [one.propose([request], [4], most_likely)[0].ids for one in (drafter, fresh)]
    assert drafts[0] == drafts[1]
    eagle_close(torch.cat(drafter.scored), torch.cat(fresh.scored).double())


@pytest.mark.parametrize("base", [1, 6])
def test_eagle_that_knows_nothing_of_the_beginning(tmp_path, base):
    fields, tensors = tiny.eagle()
    drafter, tokens = eagle(tmp_path, fields, tensors), eagle_tokens(12)
    request = Reading(tokens)
    eagle_learns(drafter, request, base, 11)
    (draft,) = drafter.propose([request], [3], most_likely)
    parts = [eagle_streams(eagle_target(), tokens[:-1])[i][base:] for i in (2, 3, 4)]
    slow = SlowEagle(fields, tensors, eagle_target().embedding.double())
    ids, rows = slow.chain(parts, tokens[base + 1 :], 3, base)
    assert draft.ids == ids
    eagle_close(torch.cat(drafter.scored), rows)


def test_eagle_guesses_ids_of_the_target_and_believes_in_no_other(tmp_path):
    fields, tensors = tiny.eagle(draft_vocab_size=5)
    drafter, request = eagle(tmp_path, fields, tensors), Reading(eagle_tokens(9))
    known = tensors["t2d"].nonzero()[:, 0]
    assert drafter.ids.tolist() == known.tolist() and tensors["d2t"].max() > 0
    eagle_learns(drafter, request, 0, 8)

    def rows(request, guesses):
        place = len(request.tokens) + len(guesses)
        params = SamplingParams(temperature=2.0, repetition_penalty=1.3, presence_penalty=0.5)
        params = params.with_defaults({})
        return Row(params, 5, place, request.tokens + guesses, None, 3, DRAFT)

    (draft,) = drafter.propose([request], [6], rows)
    assert len(draft.ids) == 6 and set(draft.ids) <= set(known.tolist())
    assert len(set(draft.ids)) > 1
    outside = torch.ones(EAGLE_VOCAB).index_fill(0, known, 0).bool()
    assert draft.beliefs.shape == (6, EAGLE_VOCAB) and (draft.beliefs[:, outside] == 0).all()
    assert torch.allclose(draft.beliefs.sum(1), torch.ones(6).double())
    assert (draft.beliefs[:, known] > 0).all()


def eagle_edited(tensors: dict, **changes) -> dict:
    """Tensors with some replaced, or, None, taken away."""
    changes = {name.replace("__", "."): x for name, x in changes.items()}
    return {name: x for name, x in (tensors | changes).items() if x is not None}


EAGLE_DOOR = {
    "fc": (
        lambda f, t: (f, eagle_edited(t, fc__weight=torch.zeros(EAGLE_WIDE, 64))),
        "fc.weight reads 64 numbers of a token, but 3 layers of the target have 96",
    ),
    "fc_rows": (
        lambda f, t: (f, eagle_edited(t, fc__weight=torch.zeros(8, 96))),
        r"fc.weight is \[8, 96\], config.json makes it \[32, 96\]",
    ),
    "vocabulary": (
        lambda f, t: (f | {"vocab_size": 95}, eagle_edited(t, t2d=t["t2d"][:95])),
        "vocab_size 95, but the target has 96 ids",
    ),
    "target": (
        lambda f, t: (f | {"target_hidden_size": 4096}, t), "target_hidden_size 4096, not 32",
    ),
    "missing": (
        lambda f, t: (f, eagle_edited(t, norm__weight=None)), "the checkpoint has no tensor norm.weight",
    ),
    "hidden_norm": (
        lambda f, t: (f, eagle_edited(t, midlayer__hidden_norm__weight=None)), "no tensor .*hidden_norm",
    ),
    "left": (
        lambda f, t: (f, eagle_edited(t, fc__bias=torch.zeros(EAGLE_WIDE))),
        "tensors that the model does not use: fc.bias",
    ),
    "shape": (
        lambda f, t: (f, eagle_edited(t, midlayer__self_attn__q_proj__weight=torch.zeros(EAGLE_WIDE, EAGLE_WIDE))),
        r"q_proj.weight is \[32, 32\], config.json makes it \[32, 64\]",
    ),
    "twice": (
        lambda f, t: (f, t | {"layers.0.hidden_norm.weight": torch.ones(EAGLE_WIDE)}),
        "tensors of the same layer by two names",
    ),
    "d2t": (lambda f, t: (f, eagle_edited(t, d2t=None)), "no tensor d2t"),
    "d2t_same": (
        lambda f, t: (f, eagle_edited(t, d2t=-torch.arange(40))),
        "d2t does not lead to 40 different ids below 96",
    ),
    "d2t_beyond": (
        lambda f, t: (f, eagle_edited(t, d2t=t["d2t"] + 90)), "40 different ids below 96",
    ),
    "d2t_below": (
        lambda f, t: (f, eagle_edited(t, d2t=t["d2t"] - 90)), "40 different ids below 96",
    ),
    "t2d": (
        lambda f, t: (f, eagle_edited(t, t2d=t["t2d"].roll(1))), "t2d does not mark the ids",
    ),
    "t2d_more": (
        lambda f, t: (f, eagle_edited(t, t2d=torch.ones(EAGLE_VOCAB, dtype=torch.bool))), "t2d does not mark",
    ),
    "both_norms": (
        lambda f, t: (f | {"fc_norm": True, "norm_before_fc": True}, t),
        "fc_norm and norm_before_fc: only one",
    ),
    "flag": (lambda f, t: (f | {"norm_output": "yes"}, t), "norm_output is 'yes', neither true"),
    "rope": (
        lambda f, t: (f | {"rope_scaling": {"rope_type": "longrope"}}, t),
        "rope scaling 'longrope' is not one of",
    ),
    "embedding": (
        lambda f, t: tiny.eagle(hidden_size=24), "no embed_tokens, and the target's is 32 wide, not 24",
    ),
    "ids": (
        lambda f, t: (f | {"eagle_aux_hidden_state_layer_ids": [2, 5, 8]}, t),
        r"layer_ids \[2, 5, 8\]: not ascending, of the target's 7 layers",
    ),
    "ids_order": (
        lambda f, t: (f | {"eagle_aux_hidden_state_layer_ids": [2, 5, 4]}, t), "not ascending",
    ),
    "ids_same": (
        lambda f, t: (f | {"eagle_aux_hidden_state_layer_ids": [2, 4, 4]}, t), "not ascending",
    ),
    "ids_embedding": (
        lambda f, t: (f | {"eagle_aux_hidden_state_layer_ids": [0, 3, 4]}, t), "not ascending",
    ),
    "ids_left": (
        lambda f, t: (f | {"eagle_aux_hidden_state_layer_ids": [1, 3, 7]}, t), "not ascending",
    ),
    "ids_words": (
        lambda f, t: (f | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": "low"}}, t),
        "low: not a list of layers",
    ),
    "config": (
        lambda f, t: (f | {"eagle_config": ["low"]}, t), "config.json is malformed",
    ),
    "layers": (lambda f, t: (f | {"num_hidden_layers": 2}, t), "num_hidden_layers 2: EAGLE-3 has"),
    "family": (
        lambda f, t: (f | {"model_type": "deepseek_v3"}, t),
        "model_type 'deepseek_v3' of its layer is not one of llama, mistral, qwen2, qwen3",
    ),
    "last": (
        lambda f, t: (f | {"eagle_config": {"use_aux_hidden_state": False}}, t),
        "use_aux_hidden_state false: it reads the last layer alone",
    ),
    "p_eagle": (
        lambda f, t: (f, t | {"mask_hidden": torch.zeros(1, 96)}), "a P-EAGLE head",
    ),
    "p_eagle_kind": (
        lambda f, t: (f | {"speculators_model_type": "peagle"}, t), "a P-EAGLE head",
    ),
    "p_eagle_flag": (lambda f, t: (f | {"parallel_drafting": True}, t), "a P-EAGLE head"),
}  # fmt: skip


@pytest.mark.parametrize("what", EAGLE_DOOR)
def test_eagle_refuses_by_name(tmp_path, what):
    change, said = EAGLE_DOOR[what]
    path = tiny.written(tmp_path, *change(*tiny.eagle()))
    with pytest.raises(ValueError, match=f"(?s){path}.*{said}"):
        speculative.drafter(f"eagle:{path}", eagle_target(), None)


def test_eagle_of_an_older_kind_or_of_no_kind_is_refused_by_name(tmp_path):
    fields, tensors = tiny.eagle(architectures=["LlamaForCausalLM"], draft_vocab_size=None)
    first = {n.replace("midlayer.", "layers.0."): x for n, x in tensors.items()}
    del first["layers.0.hidden_norm.weight"], first["layers.0.input_layernorm.weight"]
    first["fc.weight"] = torch.zeros(EAGLE_WIDE, 2 * EAGLE_WIDE)
    path = tiny.written(tmp_path, fields, first)
    with pytest.raises(ValueError, match="an EAGLE-1 or EAGLE-2 head, of the last layer alone"):
        speculative.drafter(f"eagle:{path}", eagle_target(), None)
    path = tiny.written(tmp_path, fields | {"architectures": ["EagleLlamaForCausalLM"]}, {})
    with pytest.raises(ValueError, match="an EAGLE-1 or EAGLE-2 head"):
        speculative.drafter(f"eagle:{path}", eagle_target(), None)
    flash = {"fc.weight": first["fc.weight"], "hidden_norm.weight": torch.ones(EAGLE_WIDE)}
    path = tiny.written(tmp_path, fields | {"architectures": ["DFlashDraftModel"]}, flash)
    with pytest.raises(ValueError, match=r"architectures \['DFlashDraftModel'\]: not an EAGLE-3"):
        speculative.drafter(f"eagle:{path}", eagle_target(), None)
    # by its tensors alone, as the first of these were published
    path = tiny.written(tmp_path, fields, tensors)
    assert isinstance(speculative.drafter(f"eagle:{path}", eagle_target(), None), speculative.Eagle)


def test_eagle_of_a_target_with_too_few_layers_must_say_which(tmp_path):
    path = tiny.written(tmp_path, *tiny.eagle())
    with pytest.raises(ValueError, match=r"so \[2, 2, 1\]: not ascending, of the target's 4 lay"):
        speculative.drafter(f"eagle:{path}", eagle_target(4), None)
    path = tiny.written(tmp_path, *tiny.eagle(eagle_aux_hidden_state_layer_ids=[2, 3, 4]))
    assert speculative.drafter(f"eagle:{path}", eagle_target(4), None).taps == (1, 2, 3)


def test_eagle_that_is_not_there_or_not_whole(tmp_path):
    with pytest.raises(ValueError, match="no config.json, so not a model folder"):
        speculative.drafter(f"eagle:{tmp_path}", eagle_target(), None)
    path = tiny.written(tmp_path, *tiny.eagle())
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-7])
    with pytest.raises(ValueError, match="truncated or not safetensors"):
        speculative.drafter(f"eagle:{path}", eagle_target(), None)
    with pytest.raises(ValueError, match="'eagle' is not ngram or .*eagle:PATH"):
        speculative.drafter("eagle", eagle_target(), None)


def test_eagle_in_16_bits(tmp_path):
    """A head is run in the target's numbers, whatever its own are."""
    fields, tensors = tiny.eagle()
    small = {name: x.half() if x.is_floating_point() else x for name, x in tensors.items()}
    path = tiny.written(tmp_path, fields, small)
    drafter = speculative.drafter(f"eagle:{path}", eagle_target(), None)
    assert drafter.fc.data.dtype == drafter.mlp_norm.dtype == torch.float32
