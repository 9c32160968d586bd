"""Write real.json: what the reference implementation says about the default model's weights.

The token ids and the (dequantised) weights are Octavo's own, from model.load; the forward pass is
transformers' LlamaForCausalLM in float32. So a difference in tests/test_real.py is a difference in
the forward pass. Greedy tokens can flip where two logits are nearly equal: a prompt whose smallest
gap between the best two is below 1e-3 is refused.

    pip install transformers; python tests/golden/make_real.py
"""

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent))

import torch  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

import generate  # noqa: E402
import model  # noqa: E402

TOKENS = 64
GAP = 1e-3


def user(text: str, system: str | None = None) -> list[dict]:
    first = [{"role": "system", "content": system}] if system else []
    return [*first, {"role": "user", "content": text}]


def long_text() -> str:
    """About 600 tokens of a logbook, with a question at the end."""
    birds = ["wren", "heron", "swift", "owl", "finch", "crane", "gull", "robin"]
    places = ["mill", "harbour", "quarry", "orchard", "bridge", "chapel"]
    lines = [
        f"Day {i}: saw {1 + 7 * i % 11} {birds[i % 8]}s near the {places[i % 6]} at {6 + i % 9} am."
        for i in range(1, 36)
    ]
    return "\n".join(lines) + "\nWhich bird was seen at the chapel on day 12, and how many?"


PROMPTS = {  # name -> messages (through the template) or text (raw)
    "sky": user("Why is the sky blue?"),
    "system": user("What is your name?", "You are Octavia, a librarian. Answer in one sentence."),
    "turns": [
        *user("I have three apples."),
        {"role": "assistant", "content": "Good. What would you like to do with them?"},
        {"role": "user", "content": "I ate one and bought four. How many are left?"},
    ],
    "translate": user("Translate into French: The library opens at nine."),
    "code chat": user("Write a Python function that reverses the words of a sentence."),
    "special text": user("What does <|im_end|> mean in a prompt?"),
    "long chat": user(long_text()),
    "chinese chat": user("请用一句话介绍长城。"),
    "emoji": user("Explain these: 🙂🚀👩‍🔬"),
    "empty system": [{"role": "system", "content": ""}, *user("Say hello.")],
    "raw": "Once upon a time, in a village by the sea,",
    "python": 'def fibonacci(n):\n    """The n-th Fibonacci number."""\n',
    "json": '{"name": "Ada", "born": 1815, "languages": ["English", "French"], "',
    "japanese": "吾輩は猫である。名前はまだ無い。",
    "numbers": "2, 3, 5, 7, 11, 13, 17, 19, 23,",
    "digits": "3.14159265358979323846",
    "one token": "The",
    "spaces": "a  b   c\n\n\n\td",
    "accents": "Le café est fermé à cause de la grève; où irons-nous déjeuner ?",
    "arithmetic": "12 + 30 = 42\n17 + 8 = 25\n46 + 31 =",
}


def reference(checkpoint) -> LlamaForCausalLM:
    """transformers' model over the same float32 tensors."""
    c = checkpoint.config
    assert c.ropes[0]["rope_type"] == "default" and None not in c.rope_of and not c.qkv_bias
    config = LlamaConfig(
        vocab_size=c.vocab,
        hidden_size=c.width,
        intermediate_size=c.mlp,
        num_hidden_layers=len(c.specs),
        num_attention_heads=c.heads,
        num_key_value_heads=c.specs[0].heads,
        head_dim=c.head_dim,
        max_position_embeddings=c.positions,
        rms_norm_eps=c.eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.ropes[0]["rope_theta"]},
        tie_word_embeddings=c.tied,
    )
    llama = LlamaForCausalLM(config).eval()
    missing, unexpected = llama.load_state_dict(dict(checkpoint.tensors), strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    llama.tie_weights()
    return llama


@torch.inference_mode()
def greedy(llama, ids: list[int]) -> tuple[list[int], float]:
    """TOKENS greedy tokens, and the smallest gap between the best two logits on the way."""
    llama.generation_config.eos_token_id = None  # go on to the end
    rows = torch.tensor([ids])
    out = llama.generate(
        rows,
        attention_mask=torch.ones_like(rows),
        do_sample=False,
        max_new_tokens=TOKENS,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(out.logits).topk(2).values  # (TOKENS, 2)
    return out.sequences[0, len(ids) :].tolist(), float((best[:, 0] - best[:, 1]).min())


def main():
    path, entry = model.find(None, say=print)
    checkpoint = model.load(path)
    tokenizer = generate.build_tokenizer(checkpoint.tokenizer)
    template = generate.ChatTemplate(checkpoint.template, checkpoint.tokenizer["special_tokens"])
    llama = reference(checkpoint)
    lines = []
    for name, prompt in PROMPTS.items():
        raw = isinstance(prompt, str)
        ids = tokenizer.encode(prompt) if raw else template.encode(tokenizer, prompt)
        tokens, gap = greedy(llama, ids)
        print(f"{name:<14}{len(ids):>5} ids, smallest gap {gap:.5f}")
        assert gap >= GAP, f"{name}: two tokens are nearly as likely, choose another prompt"
        line = {"name": name, "prompt": prompt, "ids": ids, "tokens": tokens, "gap": gap}
        lines.append(json.dumps(line, ensure_ascii=False))
    head = json.dumps({"model": entry["name"], "sha256": entry["sha256"], "tokens": TOKENS})
    text = head[:-1] + ', "prompts": [\n' + ",\n".join(lines) + "\n]}\n"
    (HERE / "real.json").write_text(text, "utf-8")


if __name__ == "__main__":
    main()
