"""The MTP head in speculative.py, against its formula written out pair by pair: all pairs at
once, every head's own key and value, rope as a product of complex numbers, no cache."""

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import model
import speculative
from sample import Row, SamplingParams
from speculative import MTP
from tiny import garbage, with_head

GOLDEN = Path(__file__).parent / "golden"

torch.set_num_threads(1)
FAMILIES = ["deepseek_v3", "deepseek_v3_plain", "deepseek_v32", "qwen3_next", "qwen3_5_text"]
TWO = ["deepseek_v3", "qwen3_next"]


# ---------------------------------------------------------------- the formula, in float64


class Formula:
    """The logits and what goes on of a head, of pairs (feature i, token i + 1) at positions i."""

    def __init__(self, family: str, tensors: dict):
        self.c = json.loads((GOLDEN / family / "config.json").read_text())
        self.w = {name: x.double() for name, x in tensors.items()}
        self.qwen = "qwen" in family
        self.less = 1.0 if self.qwen else 0.0
        top = "mtp." if self.qwen else f"model.layers.{self.c['num_hidden_layers']}."
        self.layer = "mtp.layers.0." if self.qwen else top
        own = "fc pre_fc_norm_embedding pre_fc_norm_hidden norm" if self.qwen else (
            "eh_proj enorm hnorm shared_head.norm")  # fmt: skip
        self.fc, self.enorm, self.hnorm, self.last = (f"{top}{x}.weight" for x in own.split())
        self.embedding = self.w.get(
            f"{top}embed_tokens.weight", self.w["model.embed_tokens.weight"]
        )
        head = self.w.get("lm_head.weight", self.w["model.embed_tokens.weight"])
        self.head = self.w.get(f"{top}shared_head.head.weight", head)

    def norm(self, x, name):
        weight = self.w[name] + self.less
        return x * weight / (x.pow(2).mean(-1, keepdim=True) + self.c["rms_norm_eps"]).sqrt()

    def turn(self, x, positions, neighbours):
        """x (n, R) turned pair by pair as complex numbers."""
        n, R = x.shape
        theta = (self.c.get("rope_parameters") or self.c)["rope_theta"]
        angles = positions[:, None].double() * theta ** (-torch.arange(0, R, 2).double() / R)
        if neighbours:
            pairs = torch.complex(x[:, 0::2], x[:, 1::2])
        else:
            pairs = torch.complex(x[:, : R // 2], x[:, R // 2 :])
        turned = pairs * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((turned.real, turned.imag), -1)

    def mix(self, scores, values, seen):
        """softmax over the pairs that are seen: scores (n, n), values (n, D), seen (n, n)."""
        return torch.where(seen, scores, -torch.inf).softmax(-1) @ values

    def latent(self, x, positions):
        c, w, n = self.c, lambda name: self.w[f"{self.layer}self_attn.{name}.weight"], len(x)
        H, D, R, rank = (c[k] for k in ("num_attention_heads", "qk_nope_head_dim",
                                        "qk_rope_head_dim", "kv_lora_rank"))  # fmt: skip
        near, eps = c.get("rope_interleave", True), 1e-6

        def normed(y, weight):
            return y * weight / (y.pow(2).mean(-1, keepdim=True) + eps).sqrt()

        inner = x
        if c["q_lora_rank"]:
            inner = normed(x @ w("q_a_proj").T, w("q_a_layernorm"))
        queries = inner @ w("q_b_proj" if c["q_lora_rank"] else "q_proj").T
        down = x @ w("kv_a_proj_with_mqa").T
        latents = normed(down[:, :rank], w("kv_a_layernorm"))
        shared = self.turn(down[:, rank:], positions, near)
        up = (latents @ w("kv_b_proj").T).view(n, H, D + c["v_head_dim"])
        seen = torch.ones(n, n, dtype=torch.bool).tril()
        if "index_topk" in c:
            seen = self.indexed(x, inner, positions, w) & seen
        outs = []
        for h in range(H):
            q = queries.view(n, H, D + R)[:, h]
            q = torch.cat((q[:, :D], self.turn(q[:, D:], positions, near)), -1)
            k = torch.cat((up[:, h, :D], shared), -1)
            outs.append(self.mix(q @ k.T / (D + R) ** 0.5, up[:, h, D:], seen))
        return torch.cat(outs, -1) @ w("o_proj").T

    def indexed(self, x, inner, positions, w):
        c, n = self.c, len(x)
        heads, dim, R = c["index_n_heads"], c["index_head_dim"], c["qk_rope_head_dim"]
        q = (inner @ w("indexer.wq_b").T).view(n, heads, dim)
        k = x @ w("indexer.wk").T
        bias = self.w[f"{self.layer}self_attn.indexer.k_norm.bias"]
        k = k - k.mean(-1, keepdim=True)
        k = k / (k.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * w("indexer.k_norm") + bias
        k = torch.cat((self.turn(k[:, :R], positions, False), k[:, R:]), -1)
        scores = torch.zeros(n, n, dtype=torch.float64)
        weights = x @ w("indexer.weights_proj").T
        for h in range(heads):
            one = torch.cat((self.turn(q[:, h, :R], positions, False), q[:, h, R:]), -1)
            scores += weights[:, h, None] * (one @ k.T).clamp(min=0)
        chosen = torch.zeros(n, n, dtype=torch.bool)
        for i in range(n):
            best = sorted(range(i + 1), key=lambda j: (-scores[i, j].item(), j))
            chosen[i, best[: c["index_topk"]]] = True
        return chosen

    def gated(self, x, positions):
        c, prefix, n = self.c, f"{self.layer}self_attn.", len(x)
        H, G, D = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        R = int(D * c.get("partial_rotary_factor", 0.25))
        q, k, v = (x @ self.w[f"{prefix}{p}_proj.weight"].T for p in "qkv")
        q, k, v = q.view(n, H, 2 * D), k.view(n, G, D), v.view(n, G, D)
        seen, outs = torch.ones(n, n, dtype=torch.bool).tril(), []

        def placed(y, name):
            y = self.norm(y, f"{prefix}{name}_norm.weight")
            return torch.cat((self.turn(y[:, :R], positions, False), y[:, R:]), -1)

        for h in range(H):
            own, gate, g = q[:, h, :D], q[:, h, D:], h // (H // G)
            scores = placed(own, "q") @ placed(k[:, g], "k").T / D**0.5
            outs.append(self.mix(scores, v[:, g], seen) * gate.sigmoid())
        return torch.cat(outs, -1) @ self.w[f"{prefix}o_proj.weight"].T

    def mlp(self, x, prefix):
        gate, up, down = (self.w[f"{prefix}{p}_proj.weight"] for p in ("gate", "up", "down"))
        inner = x @ gate.T
        return (inner * inner.sigmoid() * (x @ up.T)) @ down.T

    def experts(self, x):
        prefix, c = f"{self.layer}mlp.", self.c
        if f"{prefix}gate.weight" not in self.w:
            return self.mlp(x, prefix)
        outs = []
        for row in x:  # one row after the other, one expert after the other
            scores = self.w[f"{prefix}gate.weight"] @ row
            if self.qwen:
                weights = order = scores.softmax(-1)
                open_ones, scale = range(len(scores)), 1.0
                beside = self.mlp(row, f"{prefix}shared_expert.")
                beside = (self.w[f"{prefix}shared_expert_gate.weight"] @ row).sigmoid() * beside
            else:
                weights = scores.sigmoid()
                order = weights + self.w[f"{prefix}gate.e_score_correction_bias"]
                size = len(scores) // c["n_group"]
                groups = [range(g * size, (g + 1) * size) for g in range(c["n_group"])]
                groups.sort(key=lambda group: -sum(sorted(order[list(group)].tolist())[-2:]))
                open_ones = [e for group in groups[: c["topk_group"]] for e in group]
                scale, beside = (
                    c["routed_scaling_factor"],
                    self.mlp(row, f"{prefix}shared_experts."),
                )
            chosen = sorted(open_ones, key=lambda e: -order[e].item())[: c["num_experts_per_tok"]]
            total = sum(weights[e] for e in chosen) if c["norm_topk_prob"] else 1.0
            for e in chosen:
                out = self.mlp(row, f"{prefix}experts.{e}.")
                beside = beside + scale * weights[e] / total * out
            outs.append(beside)
        return torch.stack(outs)

    def states(self, features, tokens, base=0):
        """What goes on from each pair: features (n, E), tokens n."""
        e = self.norm(self.embedding[torch.tensor(tokens)], self.enorm)
        x = torch.cat((e, self.norm(features.double(), self.hnorm)), -1) @ self.w[self.fc].T
        positions = torch.arange(base, base + len(x))
        attend = self.gated if self.qwen else self.latent
        x = x + attend(self.norm(x, f"{self.layer}input_layernorm.weight"), positions)
        x = x + self.experts(self.norm(x, f"{self.layer}post_attention_layernorm.weight"))
        return self.norm(x, self.last)

    def chain(self, features, tokens, count, base=0):
        """Logits of `count` guesses, each the best one: tokens are those after the features."""
        features, tokens, logits = features.double(), list(tokens), []
        while True:
            state = self.states(features, tokens, base)[-1:]
            logits.append((state @ self.head.T)[0])
            if len(logits) == count:
                return torch.stack(logits)
            features = torch.cat((features, state))
            tokens.append(logits[-1].argmax().item())


# ---------------------------------------------------------------- a head without an engine


class Asked:
    """A request as a drafter sees it; eq by identity."""

    def __init__(self, tokens):
        self.tokens = list(tokens)


class Heard(MTP):
    """An MTP head that notes what it scores, and the positions at which it ran."""

    heard: list
    positions: list

    def score(self, x):
        logits = super().score(x)
        self.heard.append(logits)
        return logits

    def run(self, features, tokens, step):
        self.positions += step.positions.tolist()
        return super().run(features, tokens, step)


LOADED: dict = {}


def head_of(family: str, slots: int = 4, kind=Heard):
    """A drafter with a cache full of garbage, and its formula."""
    if family not in LOADED:
        checkpoint = with_head(model.load(GOLDEN / family))
        target = model.Model(checkpoint.config, checkpoint.tensors)
        LOADED[family] = target, checkpoint, Formula(family, checkpoint.tensors)
    target, checkpoint, formula = LOADED[family]
    drafter = kind(target, checkpoint)
    drafter.open(slots, 64)
    garbage(drafter.cache)
    drafter.heard, drafter.positions = [], []
    return drafter, formula


def row(request, guesses):
    params = SamplingParams(temperature=0).with_defaults({})
    return Row(params, 0, len(request.tokens) + len(guesses), request.tokens + guesses)


def work(draw: random.Random, n: int, vocab: int = 96):
    """n tokens, and features of all but the last."""
    features = torch.randn(
        n - 1, 32, generator=torch.Generator().manual_seed(draw.randrange(10**6))
    )
    return [draw.randrange(vocab) for _ in range(n)], features


def guessed(drafter, requests, counts):
    """Logits (k, V) of each request's guesses, and the drafts."""
    drafter.heard.clear()
    drafts = drafter.propose(requests, counts, row)
    logits = [[] for _ in requests]
    for j, heard in enumerate(drafter.heard):
        going = [i for i, count in enumerate(counts) if count > j]
        for i, x in zip(going, heard, strict=True):
            logits[i].append(x)
    for own, draft in zip(logits, drafts):
        assert draft.ids == [x.argmax().item() for x in own]
    return [torch.stack(own).double() for own in logits], drafts


def close(found, wanted, atol=1e-4):
    return torch.allclose(found.double(), wanted.double(), atol=atol, rtol=0)


# ---------------------------------------------------------------- against the formula


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_each_pair_and_a_chain_of_guesses_are_as_the_formula_has_them(family):
    drafter, formula = head_of(family)
    tokens, features = work(random.Random(1), 23)
    held = drafter.hold("all pairs")
    step = drafter.prepare([(held, tokens[1:])])
    state, x = drafter.run(drafter.fuse([features]), step.tokens, step)
    wanted = formula.states(features, tokens[1:])
    assert close(state, wanted) and close(drafter.score(x), wanted @ formula.head.T)
    assert drafter.positions == list(range(22))
    assert wanted.std() > 0.5  # or anything would be close

    request = Asked(tokens)
    drafter.positions.clear()
    drafter.learn(request, 0, [features])
    (logits,), _ = guessed(drafter, [request], [4])
    assert close(logits, formula.chain(features, tokens[1:], 4))
    assert drafter.positions == list(range(22 + 3))  # pair i at position i, and on from there


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32", "qwen3_next"])
@torch.inference_mode()
def test_what_is_learnt_in_chunks_is_what_is_learnt_at_once(family):
    drafter, formula = head_of(family)
    tokens, features = work(random.Random(2), 31)
    request, at = Asked(tokens), 0
    drafter.CHUNK = 6
    for n in (7, 1, 2, 13, 0, 5, 2):
        drafter.learn(request, at, [features[at : at + n]])
        drafter.keep([request])
        assert drafter.held[request].pending <= 6
        at += n
    assert at == 30 and drafter.held[request].computed > 20
    (logits,), _ = guessed(drafter, [request], [3])
    assert close(logits, formula.chain(features, tokens[1:], 3))


@torch.inference_mode()
def test_a_prompt_of_any_length_leaves_a_row_to_guess_from():
    drafter, _ = head_of("qwen3_5_text")
    drafter.CHUNK = 8
    for n in range(2, 20):
        tokens, features = work(random.Random(n), n)
        request = Asked(tokens)
        drafter.learn(request, 0, [features])
        drafter.keep([request])
        assert drafter.most_for(request) == drafter.most
        assert len(drafter.propose([request], [1], row)[0].ids) == 1
        drafter.keep([])


@pytest.mark.parametrize("family", TWO)
@torch.inference_mode()
def test_after_rejections_the_cache_holds_true_entries_again(family):
    drafter, formula = head_of(family)
    draw = random.Random(3)
    tokens, features = work(draw, 9)
    request = Asked(tokens)
    drafter.learn(request, 0, [features])
    for accepted in (0, 3, 1, 0, 2, 3, 0):
        (logits,), (draft,) = guessed(drafter, [request], [3])
        assert close(logits, formula.chain(features, request.tokens[1:], 3))
        # as many stay, then comes another one: features of all rows but that one's
        other = (draft.ids[accepted] + 1) % 96 if accepted < 3 else draw.randrange(96)
        _, more = work(draw, accepted + 2)
        drafter.learn(request, len(request.tokens) - 1, [more])
        features = torch.cat((features, more))
        request.tokens += [*draft.ids[:accepted], other]
        assert len(features) == len(request.tokens) - 1
        drafter.keep([request])


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32", "qwen3_next"])
@torch.inference_mode()
def test_a_cold_start_has_true_positions_and_a_context_from_there(family):
    drafter, formula = head_of(family)
    tokens, features = work(random.Random(4), 30)
    request, base = Asked(tokens), 11
    drafter.learn(request, base, [features[base:]])
    (logits,), _ = guessed(drafter, [request], [3])
    assert close(logits, formula.chain(features[base:], tokens[base + 1 :], 3, base))
    assert drafter.positions == list(range(base, 29 + 2))
    assert not close(logits[0], formula.chain(features, tokens[1:], 1)[0])  # a warm one sees more

    gap = Asked(tokens)  # some features never came: what is known begins after them
    drafter.learn(gap, 0, [features[:5]])
    drafter.learn(gap, base, [features[base:]])
    (again,), _ = guessed(drafter, [gap], [3])
    assert close(again, logits, 1e-5)
    assert (drafter.slots.held, drafter.held[gap].base) == (2, base)


@pytest.mark.parametrize("family", TWO)
@torch.inference_mode()
def test_several_requests_are_guessed_for_as_each_alone(family):
    drafter, formula = head_of(family)
    draw = random.Random(5)
    requests, counts, wanted = [], [3, 1, 4, 2], []
    for n, base, count in zip((12, 3, 25, 9), (0, 0, 7, 2), counts):
        tokens, features = work(draw, n)
        requests.append(Asked(tokens))
        drafter.learn(requests[-1], base, [features[base:]])
        wanted.append(formula.chain(features[base:], tokens[base + 1 :], count, base))
    logits, drafts = guessed(drafter, requests, counts)
    assert [len(draft.ids) for draft in drafts] == counts
    for own, theirs in zip(logits, wanted):
        assert close(own, theirs)
    drafter.slots.check(list(drafter.held.values()))


@torch.inference_mode()
def test_under_reject_each_guess_comes_with_the_law_it_was_drawn_from():
    drafter, formula = head_of("qwen3_next")
    tokens, features = work(random.Random(6), 12)
    request = Asked(tokens)
    params = SamplingParams(temperature=0.7).with_defaults({})

    def drafted(request, guesses):
        place = len(request.tokens) + len(guesses)
        return Row(params, 5, place, request.tokens + guesses, domain=speculative.DRAFT)

    drafter.learn(request, 0, [features])
    drafter.heard.clear()
    (draft,) = drafter.propose([request], [3], drafted)
    assert len(draft.ids) == 3 and draft.beliefs.shape == (3, 96)
    for logits, belief in zip(drafter.heard, draft.beliefs):
        assert close(belief, (logits[0].double() / 0.7).softmax(-1), 1e-6)
    first = formula.chain(features, tokens[1:], 1)[0]
    assert close(draft.beliefs[0], (first / 0.7).softmax(-1), 1e-3)


# ---------------------------------------------------------------- slots


@torch.inference_mode()
def test_who_finds_no_slot_is_not_guessed_for_until_there_is_one():
    drafter, formula = head_of("qwen3_5_text", slots=1)
    draw = random.Random(8)
    (one, features), (two, more) = work(draw, 10), work(draw, 20)
    first, second = Asked(one), Asked(two)
    drafter.learn(first, 0, [features])
    drafter.learn(second, 0, [more[:12]])
    assert (drafter.most_for(first), drafter.most_for(second)) == (drafter.most, 0)
    drafter.keep([second])  # the first one ended
    assert drafter.slots.held == 0 and not drafter.held
    drafter.learn(second, 12, [more[12:]])
    assert drafter.most_for(second) == drafter.most
    (logits,), _ = guessed(drafter, [second], [2])
    assert close(logits, formula.chain(more[12:], two[13:], 2, 12))
    drafter.slots.check(list(drafter.held.values()))
    drafter.keep([])
    assert drafter.slots.held == 0


@torch.inference_mode()
def test_nobody_is_guessed_for_whose_last_features_are_not_known():
    drafter, _ = head_of("qwen3_5_text")
    tokens, features = work(random.Random(9), 10)
    request = Asked(tokens)
    assert drafter.most_for(request) == 0
    for n in range(9):  # in its prompt
        drafter.learn(request, n, [features[n : n + 1]])
        assert drafter.most_for(request) == (drafter.most if n == 8 else 0)
    request.tokens += [3, 4]  # a grammar left no choice: two more rows come first
    assert drafter.most_for(request) == 0
    drafter.keep([request])
    drafter.learn(request, 9, [features[:2]])
    assert drafter.most_for(request) == drafter.most
    drafter.propose([request], [2], row)
    assert drafter.most_for(request) == 0  # nothing is new
    drafter.learn(request, 11, [features[:0]])  # no row of it stayed
    assert drafter.most_for(request) == 0 and drafter.held[request].computed == 11


# ---------------------------------------------------------------- what a checkpoint brings


def made(checkpoint):
    return speculative.drafter(
        "mtp", model.Model(checkpoint.config, checkpoint.tensors), checkpoint
    )


def changed(family: str, **tensors):
    """A checkpoint with a head, some tensors of it replaced, or gone (None). Dots are __."""
    checkpoint = with_head(model.load(GOLDEN / family))
    for name, x in tensors.items():
        if x is None:
            del checkpoint.tensors[name]
        else:
            checkpoint.tensors[name] = x
    return checkpoint


COPIES = ("model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight")


def test_a_head_shares_the_target_s_embedding_and_head_unless_it_has_others():
    copied, absent = changed("deepseek_v3"), changed("deepseek_v3", **dict.fromkeys(COPIES))
    for checkpoint in (copied, absent, changed("qwen3_5_text")):
        drafter = made(checkpoint)
        assert drafter.embedding is drafter.target.embedding
        assert drafter.head is drafter.target.head
    draw = torch.Generator().manual_seed(1)
    others = {name: torch.randn(96, 32, generator=draw) for name in COPIES}
    checkpoint = changed("deepseek_v3", **others)
    drafter, formula = made(checkpoint), Formula("deepseek_v3", checkpoint.tensors)
    drafter.open(1, 64)
    tokens, features = work(random.Random(7), 9)
    with torch.inference_mode():
        step = drafter.prepare([(drafter.hold("it"), tokens[1:])])
        state, _ = drafter.run(features, step.tokens, step)
        wanted = formula.states(features, tokens[1:])
        assert close(state, wanted) and close(drafter.score(state), wanted @ formula.head.T)


MTP = "^speculative mtp: "  # what a refusal begins with


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_of_a_head_is_needed_and_named_if_it_is_missing(family):
    checkpoint = with_head(model.load(GOLDEN / family))
    target = model.Model(checkpoint.config, checkpoint.tensors)
    whole = checkpoint.tensors
    own = [name for name in whole if name.startswith(checkpoint.config.ignored)]
    needed = [name for name in own if not name.endswith(("embed_tokens.weight", ".head.weight"))]
    assert len(needed) > 12
    for name in needed:
        checkpoint.tensors = {key: x for key, x in whole.items() if key != name}
        with pytest.raises(
            ValueError, match=f"{MTP}the checkpoint has no {name}, a part of its MTP"
        ):
            speculative.drafter("mtp", target, checkpoint)


@pytest.mark.parametrize("family", TWO)
def test_without_a_head_nothing_begins(family):
    with pytest.raises(ValueError, match="the checkpoint has no .*, which many re-uploads lack"):
        made(model.load(GOLDEN / family))


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "llama3"])
def test_families_without_known_heads_are_refused(family):
    with pytest.raises(ValueError, match=MTP + "a head of DeepSeek-V3's or Qwen3-Next's kind"):
        made(model.load(GOLDEN / family))


def test_heads_of_another_shape_are_refused_by_name():
    more = {"mtp.layers.1.input_layernorm.weight": torch.ones(32)}
    with pytest.raises(ValueError, match=MTP + "a head of 2 layers is not known, only one of 1"):
        made(changed("qwen3_next", **more))
    with pytest.raises(ValueError, match=MTP + "mtp.embed_tokens.weight is not known in a head"):
        made(changed("qwen3_next", **{"mtp.embed_tokens.weight": torch.ones(96, 32)}))
    with pytest.raises(ValueError, match=r"mtp.fc.weight is \[32, 32\], .* makes it \[32, 64\]"):
        made(changed("qwen3_next", **{"mtp.fc.weight": torch.ones(32, 32)}))
    wrong = {"model.layers.3.self_attn.q_b_proj.weight": torch.ones(72, 8)}
    with pytest.raises(
        ValueError, match=MTP + r"model.layers.3.self_attn.q_b_proj.weight is \[72, 8\]"
    ):
        made(changed("deepseek_v3", **wrong))
    made(changed("deepseek_v3", **{"model.layers.3.self_attn.rotary_emb.inv_freq": torch.ones(4)}))


@pytest.mark.parametrize("count", [0, 2])
def test_no_further_layer_or_several_are_refused(count):
    raw = json.loads((GOLDEN / "deepseek_v3" / "config.json").read_text())
    checkpoint = model.load(GOLDEN / "deepseek_v3")
    checkpoint.config = model.Config.from_hf(raw | {"num_nextn_predict_layers": count})
    wanted = {0: r"without a head \(num_nextn_predict_layers is 0\)", 2: "of 2 layers is not known"}
    with pytest.raises(ValueError, match=wanted[count]):
        made(checkpoint)


def test_a_head_whose_mlp_is_dense_is_read_as_such():
    checkpoint = changed("qwen3_next")
    inner = "mtp.layers.0.mlp."
    for name in [x for x in checkpoint.tensors if x.startswith(inner)]:
        del checkpoint.tensors[name]
    draw = torch.Generator().manual_seed(2)
    for name, shape in (("gate", (48, 32)), ("up", (48, 32)), ("down", (32, 48))):
        checkpoint.tensors[f"{inner}{name}_proj.weight"] = torch.randn(shape, generator=draw) / 6
    drafter, formula = made(checkpoint), Formula("qwen3_next", checkpoint.tensors)
    drafter.open(1, 64)
    tokens, features = work(random.Random(7), 9)
    with torch.inference_mode():
        step = drafter.prepare([(drafter.hold("it"), tokens[1:])])
        state, _ = drafter.run(features, step.tokens, step)
        assert close(state, formula.states(features, tokens[1:]))


@pytest.mark.parametrize("family", TWO)
def test_its_cache_takes_what_it_says(family):
    drafter, _ = head_of(family, slots=3)
    assert 3 * drafter.slot_bytes(64) == drafter.cache.nbytes


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_5"])
def test_a_head_is_read_from_a_folder(family, tmp_path):
    """Beside pictures, too: of Qwen3.5 the head's names have no prefix, and those of text one."""
    tensors = with_head(model.load(GOLDEN / family)).tensors
    shutil.copy(GOLDEN / family / "config.json", tmp_path)
    stored = {
        f"model.language_model.{k[6:]}" if k[:6] == "model." else k: x for k, x in tensors.items()
    }
    stored = {k: x.clone() for k, x in (stored if "qwen" in family else tensors).items()}
    save_file(stored, tmp_path / "model.safetensors")
    checkpoint = model.load(tmp_path)
    assert checkpoint.tensors.keys() == tensors.keys()
    assert torch.equal(made(checkpoint).norm, made(replace(checkpoint, tensors=tensors)).norm)


def test_its_layer_is_like_the_one_that_attends_wherever_that_is():
    """Of three layers the first attends, with biases; the others have states."""
    checkpoint = with_head(model.load(GOLDEN / "qwen3_next_odd"))
    assert [spec.kind for spec in checkpoint.config.specs] == ["full", "linear", "linear"]
    drafter = made(checkpoint)
    assert drafter.specs == checkpoint.config.specs[:1]
    assert drafter.layer.mixer.qkv_bias is not None
