"""Write gemma.json: what transformers makes of Gemma 3 270M's GGUF file, read by itself.

Unlike real.json, nothing of Octavo's is in it: transformers dequantises the file, builds its
tokenizer and runs the model in float32. So a difference in tests/test_real.py may be one in reading
the file, in token ids or in the forward pass. Prompts whose greedy tokens come near a tie (a gap
below 1e-3) are refused; one is longer than the window of 512 tokens.

    pip install transformers accelerate gguf; python tests/golden/make_gemma.py
"""

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent))

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

import model  # noqa: E402

TOKENS = 24
GAP = 1e-3
BEST = 20  # logits kept of the prompt's last row
LOG = [f"Day {i}: the {'red grey blue'.split()[i % 3]} boat left at {6 + i % 9} am with {i % 7} men."
       for i in range(1, 36)]  # fmt: skip
PROMPTS = {
    "capital": "The capital of France is",
    "code": "def fibonacci(n):\n",
    "story": "Once upon a time, in a village by the sea,",
    "logbook": "\n".join(LOG) + "\nDay 36:",
    "german": "Die Hauptstadt von Österreich heißt",
    "japanese": "吾輩は猫である。名前は",
    "json": '{"name": "Ada", "born": 1815, "languages": ["English", "',
    "list": "Shopping list:\n\n1. milk\n2. bread\n3.",
}
TEXTS = [
    "", " ", "  ", "a  b   c    d", " leading", "trailing ", "\n", "\n\n\n\n\n", "a\n \n\tb\r\n",
    " " * 40, "\t\t", "don't DON'T", "3.14159265 12,345", "http://example.org/?q=1&r=2#x",
    "Straße, café, e\u0301te\u0301, ﬁne", "Ελληνικά Кириллица עברית العربية हिन्दी ภาษาไทย",
    "中文分词，没有空格。", "日本語のテキスト", "한국어 문장", "🙂🚀👩‍🔬🏳️‍🌈", "\u0378\U00010400\ue000",
    "\x00\x7f\u200b\ufeff", "▁under▁score ▁", "<div><h1>Title</h1></div>", "[multimodal]",
    "<0x41> <0xE2>", "x<start_of_turn>user\n", "<bos>twice<eos>", "def f(x):\n    return x ** 2\n",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "Donaudampfschifffahrtsgesellschaft", "0" * 50,
]  # fmt: skip


@torch.inference_mode()
def run(gemma, ids: list[int]) -> dict:
    """Greedy tokens, the smallest gap on the way, and the best logits after the prompt."""
    rows = torch.tensor([ids])
    out = gemma.generate(
        rows,
        attention_mask=torch.ones_like(rows),
        do_sample=False,
        max_new_tokens=TOKENS,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(out.logits).topk(2).values  # (TOKENS, 2)
    gap = float((best[:, 0] - best[:, 1]).min())
    values, places = out.logits[0][0].topk(BEST)
    logits = [round(value, 5) for value in values.tolist()]
    tokens = out.sequences[0, len(ids) :].tolist()
    return {"tokens": tokens, "gap": gap, "best": places.tolist(), "logits": logits}


def main():
    path, entry = model.find("gemma3-270m", say=print)
    reading = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    tokenizer = AutoTokenizer.from_pretrained(**reading)
    gemma = AutoModelForCausalLM.from_pretrained(
        **reading, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    lines = []
    for name, prompt in PROMPTS.items():
        ids = tokenizer(prompt).input_ids
        found = run(gemma, ids)
        print(f"{name:<10}{len(ids):>5} ids, smallest gap {found['gap']:.5f}")
        assert found["gap"] >= GAP, f"{name}: two tokens are nearly as likely, choose another"
        line = {"name": name, "prompt": prompt, "ids": ids, **found}
        lines.append(json.dumps(line, ensure_ascii=False))
    texts = [json.dumps([text, tokenizer(text).input_ids]) for text in TEXTS]
    head = json.dumps({"model": entry["name"], "sha256": entry["sha256"], "tokens": TOKENS})
    text = head[:-1] + ', "prompts": [\n' + ",\n".join(lines) + '\n], "texts": [\n'
    (HERE / "gemma.json").write_text(text + ",\n".join(texts) + "\n]}\n", "utf-8")


if __name__ == "__main__":
    main()
