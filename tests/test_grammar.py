"""grammar.py: masks by hand and by brute force, schemas against `jsonschema`, the door, old bugs.

    pytest tests/test_grammar.py                                  what needs nothing else
    pytest tests/test_grammar.py -m slow                          random schemas by the hundred
    pytest tests/test_grammar.py -m slow -s --schemas FOLDER      and the schemas of a folder

A folder holds files of the JSON-Schema-Test-Suite (a list of groups: description, schema, tests)
or of MaskBench (one such group); a test is {"description", "data", "valid"}.

The vocabulary of the 256 bytes is the reference of all others: it has nothing to walk.
"""

import collections
import heapq
import json
import random
import re
import time
from pathlib import Path

import numpy as np
import pytest

import grammar
import schemas
from grammar import Call, Grammar, Rule, SchemaError, Vocabulary

GOLDEN = Path(__file__).parent / "golden"
STOP = 256
BYTES = Vocabulary([*(bytes([i]) for i in range(256)), None], [STOP])


def golden(name: str) -> list[dict]:
    with (GOLDEN / name).open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


KEYWORDS, OWN = golden("keywords.jsonl"), golden("schemas.jsonl")
VERDICTS = golden("verdicts.jsonl")  # python tests/schemas.py


# ---------------------------------------------------------------- helpers


def words(*tokens, stops=1):
    """A vocabulary of these texts; the ids after them are stop ids."""
    tokens = [token.encode() if isinstance(token, str) else token for token in tokens]
    return Vocabulary([*tokens, *[None] * stops], range(len(tokens), len(tokens) + stops))


def allowed(matcher) -> list[int]:
    """The ids a mask allows."""
    bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


def texts(matcher) -> list[str]:
    """The tokens a mask allows, `.` for a stop id."""
    tokens = matcher.vocabulary.tokens
    return ["." if tokens[i] is None else tokens[i].decode() for i in allowed(matcher)]


def feed(matcher, text: str | bytes) -> bool:
    """Take a text byte by byte; where one is refused, take all of it back."""
    text = text.encode() if isinstance(text, str) else text
    for i, byte in enumerate(text):
        if not matcher.accept(byte):
            matcher.rollback(i)
            return False
    return True


def after(text, **kind):
    """A matcher of bytes that took this text."""
    matcher = grammar.compile(BYTES, **kind).matcher()
    assert feed(matcher, text), f"{text!r} is refused"
    return matcher


def next_bytes(text, **kind) -> bytes:
    """What may follow a text; a text that may end has STOP, the byte 0, before them."""
    ids = allowed(after(text, **kind))
    return b"\0" * (STOP in ids) + bytes(i for i in ids if i < STOP)


def walk(g, rng, patience=30):
    """A text of allowed tokens, drawn one by one: its ids, with the stop id.

    From the token `patience` on, what ends something is likelier; after twice as many and a few
    a way to the end is searched.
    """
    matcher, ids, known = g.matcher(), [], g.vocabulary.tokens
    while not ids or known[ids[-1]] is not None:
        choice = allowed(matcher)
        assert choice, f"nothing may follow {b''.join(known[i] for i in ids)}"
        if len(ids) > 2 * patience + 20:
            taken = [known.index(bytes([byte])) for byte in way_out(matcher)]
            taken.append(min(g.vocabulary.stop_ids))
        else:
            weights = [
                40 if len(ids) > patience and (not known[i] or known[i][-1:] in b'"}]') else 1
                for i in choice
            ]
            taken = rng.choices(choice, weights)
        for i in taken:
            assert matcher.accept(i), f"{i} was allowed after {ids}"
            ids.append(i)
    assert matcher.finished
    return ids


def way_out(matcher, most=50_000) -> bytes:
    """A text that may end, from where a matcher is; what is nested least is tried first."""
    machine, start = matcher.machine, matcher.history[-1]

    def depth(config):
        stacks, ends = machine.configs[config]
        return -1 if ends else min(nested(frame) for _, frame in stacks)

    def nested(frame):
        steps = 0
        while frame:
            frame, steps = machine.frames[frame][1], steps + 1
        return steps

    texts_, todo = {start: b""}, [(depth(start), 0, start)]
    while todo:
        level, _, config = heapq.heappop(todo)
        if level < 0:
            return texts_[config]
        for byte in {
            lo for n, _ in machine.configs[config][0] for lo, _, _ in machine.look(n).edges
        }:
            then = machine.step(config, byte)
            if then not in texts_:
                texts_[then] = texts_[config] + bytes([byte])
                heapq.heappush(todo, (depth(then), len(texts_[then]), then))
        assert len(texts_) < most, "no end is near"
    raise AssertionError("there is no end")


WALKS = pytest.mark.parametrize("few", [0, None, 10**9], ids=["by levels", "as ever", "by bytes"])


def walk_so(monkeypatch, few):
    """How the trie is walked is a matter of speed: let it be one way for all states."""
    for name in ("FEW", "NARROW", "MANY") if few is not None else ():
        monkeypatch.setattr(grammar, name, few)


# ---------------------------------------------------------------- by hand: masks


def test_a_mask_allows_what_leads_to_a_text_of_the_grammar():
    vocabulary = words("a", "b", "ab", "ba", "abb", "bb", "abbab", "x")
    matcher = grammar.compile(vocabulary, choice=["abba", "ab", "b"]).matcher()
    assert texts(matcher) == ["a", "b", "ab", "abb"]
    assert matcher.accept(0) and texts(matcher) == ["b", "bb"]
    assert matcher.accept(1) and texts(matcher) == ["b", "ba", "."]
    assert matcher.accept(3) and texts(matcher) == ["."] and matcher.finished


def test_bit_i_of_word_w_is_id_32_w_plus_i():
    tokens = [None] * 100
    for i, token in {0: "a", 31: "b", 32: "c", 63: "d", 64: "e", 99: "f"}.items():
        tokens[i] = token.encode()
    vocabulary = Vocabulary(tokens, [5, 40])
    mask = grammar.compile(vocabulary, choice=list("abcdef")).matcher().mask()
    assert mask.dtype == np.int32 and mask.shape == (4,)
    assert mask.tolist() == [1 - 2**31, 1 - 2**31, 1, 1 << 3]
    mask = grammar.compile(vocabulary, choice=["", "b", "f"]).matcher().mask()
    assert mask.tolist() == [(1 << 5) - 2**31, 1 << 8, 0, 1 << 3], "both stop ids at the end"


def test_ids_of_equal_bytes_are_allowed_together():
    matcher = grammar.compile(words("a", "b", "a", "", "a"), choice=["a"]).matcher()
    assert allowed(matcher) == [0, 2, 4]
    for i in (0, 2, 4):
        assert matcher.accept(i) and allowed(matcher) == [5]
        matcher.rollback(1)
    assert not matcher.accept(3), "the id of no bytes leads nowhere"


def test_a_stop_id_with_bytes_is_no_text():
    vocabulary = Vocabulary([b"a", b"</s>", b"</s>"], [1])
    matcher = grammar.compile(vocabulary, choice=["a", "a</s>", "</s>a"]).matcher()
    assert allowed(matcher) == [0, 2] and not matcher.accept(1)
    assert matcher.accept(0) and allowed(matcher) == [1, 2]
    assert matcher.accept(1) and matcher.finished


def test_a_matcher_may_have_stop_ids_of_its_own():
    g = grammar.compile(words("a", "b", "c"), choice=["a", "ab", "b", "ca"])
    matcher, other = g.matcher(stop_ids=[1]), g.matcher()
    assert allowed(matcher) == [0, 2] and not matcher.accept(1)
    assert matcher.accept(0) and allowed(matcher) == [1, 3], "it is no text there"
    assert matcher.accept(1) and matcher.finished
    assert other.accept(0) and other.accept(1) and allowed(other) == [3]


def test_special_ids_and_ids_outside_the_vocabulary_are_refused():
    matcher = grammar.compile(Vocabulary([b"a", None, None], [2]), choice=["a"]).matcher()
    for i in (-1, 1, 2, 3, 99):
        assert not matcher.accept(i), i
    assert allowed(matcher) == [0]
    with pytest.raises(ValueError, match="stop id 3"):
        Vocabulary([b"a", None, None], [3])


def test_after_a_stop_id_nothing_is_accepted():
    matcher = grammar.compile(words("a"), choice=["a", "aa"]).matcher()
    assert matcher.accept(0) and not matcher.finished and matcher.accept(1)
    assert matcher.finished and allowed(matcher) == []
    assert not matcher.accept(0) and not matcher.accept(1)
    matcher.rollback(1)
    assert not matcher.finished and allowed(matcher) == [0, 1]


def test_a_matcher_is_finished_where_it_may_end_and_nothing_can_follow():
    matcher = grammar.compile(words("a", "b"), choice=["a", "ab"]).matcher()
    assert not matcher.finished
    assert matcher.accept(0) and not matcher.finished
    assert matcher.accept(1) and matcher.finished and texts(matcher) == ["."]


def test_rolling_back_is_as_if_it_had_not_happened():
    g = grammar.compile(words("a", "b", "c"), choice=["abc", "acb", "bca"])
    matcher = g.matcher()
    assert [matcher.accept(i) for i in (0, 1, 2)] == [True] * 3
    matcher.rollback(2)
    assert texts(matcher) == ["b", "c"] and matcher.accept(2) and texts(matcher) == ["b"]
    matcher.rollback(2)
    assert texts(matcher) == ["a", "b"]
    matcher.rollback(0)
    for n in (1, -1):
        with pytest.raises(ValueError, match="taken back"):
            matcher.rollback(n)
    assert texts(matcher) == ["a", "b"]


def test_matchers_of_a_grammar_do_not_disturb_each_other():
    g = grammar.compile(words("a", "b"), choice=["aa", "bb"])
    one, other = g.matcher(), g.matcher()
    assert one.accept(0) and other.accept(1)
    assert texts(one) == ["a"] and texts(other) == ["b"]


def test_grammars_of_a_vocabulary_do_not_disturb_each_other():
    vocabulary = words("a", "b", "ab")
    one = grammar.compile(vocabulary, choice=["ab"]).matcher()
    other = grammar.compile(vocabulary, choice=["aa", "b"]).matcher()
    assert texts(one) == ["a", "ab"] and texts(other) == ["a", "b"]
    assert one.accept(0) and other.accept(0)
    assert texts(one) == ["b"] and texts(other) == ["a"]


def test_a_choice_is_one_of_the_texts_whole():
    g = grammar.compile(BYTES, choice=["yes", "no", "", "a.c", "\u540d"])
    for text in ("yes", "no", "", "a.c", "\u540d"):
        assert g.accepts(text) and g.accepts(text.encode())
    for text in ("ye", "yesno", "abc", "YES", " ", "\u540e"):
        assert not g.accepts(text)


def test_a_token_may_cross_as_many_ends_as_it_likes():
    kind = {"json_schema": {"type": "array", "items": {"type": "array", "items": {"const": 1}}}}
    tokens = ["[[", "1]", "]]", "]],", "],[", "],[1", "],[1]]", "],[1]]]", "1],[],[1,1],[", ","]
    matcher = grammar.compile(words(*tokens), **kind, whitespace="compact").matcher()
    assert texts(matcher) == ["[["] and matcher.accept(0)
    assert texts(matcher) == ["1]", "]]", "],[", "],[1", "],[1]]", "1],[],[1,1],["]
    assert matcher.accept(2) and texts(matcher) == ["."] and matcher.finished
    matcher.rollback(1)
    assert matcher.accept(6) and matcher.finished


def test_a_recursive_rule_comes_back_to_where_it_was_called():
    rule = Rule("list")
    item = grammar.alt(grammar.literal("x"), Call(rule))
    rule.body = grammar.seq(grammar.literal("("), grammar.repeat(item), grammar.literal(")"))
    g = Grammar(words("(", ")", "x", "()", "))", ")(", "x)x", ")))"), rule)
    matcher = g.matcher()
    assert texts(matcher) == ["(", "()"]
    assert matcher.accept(0) and matcher.accept(0)
    assert texts(matcher) == ["(", ")", "x", "()", "))", ")(", "x)x"]
    assert matcher.accept(4) and texts(matcher) == ["."] and matcher.finished
    matcher.rollback(1)
    assert matcher.accept(3) and "." not in texts(matcher), "only the rule that was called ends"


def test_a_rule_may_end_with_a_call_that_may_be_left_out():
    pair = Rule("pair", grammar.literal("()"))
    twice = Rule("twice", grammar.seq(Call(pair), grammar.optional(Call(pair))))
    matcher = Grammar(words("()", "(", ")", "()()", "()()()"), twice).matcher()
    assert texts(matcher) == ["()", "(", "()()"] and matcher.accept(0)
    assert texts(matcher) == ["()", "(", "."] and matcher.accept(0)
    assert texts(matcher) == ["."] and matcher.finished


@WALKS
def test_a_token_has_to_fit_in_what_a_count_leaves(few, monkeypatch):
    walk_so(monkeypatch, few)
    tokens = ["(", "a", "ab", "abcd", "abcde", ")", "a)", "ab)", "abcd)", "abcde)", "ab)("]
    tokens += [b"abc\xc3", b"abcd\xc3", b"\xa9", b"\xa9)"]
    text, symbol = grammar.literal, grammar.symbols((ord("a"), ord("z")))
    letter = grammar.alt(symbol, text("\u00e9"))

    def matcher(*parts):
        made = Grammar(words(*tokens), Rule("root", grammar.seq(text("("), *parts))).matcher()
        assert made.accept(0)
        return made

    def then(made, *ids):
        assert all(made.accept(i) for i in ids)
        found = [tokens[i] if i < len(tokens) else "." for i in allowed(made)]
        made.rollback(len(ids))
        return found

    called = Call(Rule("letters", grammar.repeat(letter, 2, 4)))
    pair = grammar.seq(text("("), grammar.repeat(letter, 2, 4), text(")"))
    for made, more in (
        (matcher(called, text(")")), []),
        (matcher(grammar.repeat(letter, 2, 4), text(")")), []),
        (matcher(called, text(")"), grammar.repeat(pair)), ["ab)("]),
    ):
        assert then(made) == ["a", "ab", "abcd", "ab)", "abcd)", *more, tokens[11]]
        assert then(made, 2) == ["a", "ab", ")", "a)", "ab)", *more]
        assert then(made, 1) == ["a", "ab", "a)", "ab)", *more]
        assert then(made, 2, 2) == [")"]
        assert then(made, 11) == [tokens[13], tokens[14]]
    made = matcher(grammar.repeat(letter, 2), text(")"))
    assert then(made) == [*tokens[1:5], *tokens[7:10], *tokens[11:13]]
    assert then(made, 3, 4) == [*tokens[1:10], *tokens[11:13]]
    made = matcher(grammar.repeat(letter, 6), text(")"))
    assert then(made) == [*tokens[1:5], *tokens[11:13]], "a letter is missing in the longest"
    made = matcher(grammar.repeat(grammar.alt(symbol, text("ab")), 2, 3), text(")"))
    assert then(made) == ["a", "ab", "abcd", "ab)", "abcd)"], "ab is one, or two"


def test_a_token_with_too_many_meanings_is_refused(monkeypatch):
    """A run of "=", each of them read in two ways: 2 ** 64 stacks at its end."""
    monkeypatch.setattr(grammar, "STACKS", 500)
    text = 'root ::= "=" s "b" | "=" t "c" | "="\ns ::= root\nt ::= root'
    matcher = grammar.compile(words("=", "b", "=" * 64), grammar=text).matcher()
    with pytest.raises(SchemaError, match="meanings"):
        matcher.mask()


def test_the_machine_is_renewed_when_it_is_worn(monkeypatch):
    vocabulary = words("a", "b")
    old = grammar.compile(vocabulary, choice=["ab"]).matcher()
    g = grammar.compile(vocabulary, choice=["ba"])
    monkeypatch.setattr(grammar, "STEPS", 0)
    new = g.matcher()
    assert new.machine is not old.machine and g.accepts("ba")
    assert texts(old) == ["a"] and old.accept(0) and texts(old) == ["b"]
    assert texts(new) == ["b"] and new.accept(1) and texts(new) == ["a"]


def test_a_matcher_moves_to_another_machine_with_its_text(monkeypatch):
    vocabulary = words("a", "b", "c")
    assert grammar.compile(vocabulary, choice=["bbb"]).accepts("bbb")  # numbers go to this one
    matcher = grammar.compile(vocabulary, choice=["abc", "acb"]).matcher([2])
    old = matcher.machine
    assert matcher.accept(0) and matcher.accept(1)
    matcher.rollback(1)
    monkeypatch.setattr(grammar, "STEPS", 0)
    matcher.move()
    assert matcher.machine is not old
    assert texts(matcher) == ["b"] and matcher.accept(1) and texts(matcher) == []
    matcher.rollback(2)
    assert texts(matcher) == ["a"]


# ---------------------------------------------------------------- by hand: forced tokens


def test_forced_tokens_are_what_can_only_go_one_way():
    tokens = ["h", "e", "l", "o", " ", "w", "t", "hello", " w", " there", "x"]
    vocabulary = words(*tokens)
    encode = encoder(vocabulary)
    matcher = grammar.compile(vocabulary, choice=["hello wow", "hello there"]).matcher()
    assert matcher.forced(encode) == [7], "the space waits: a longer token may begin with it"
    assert len(matcher.history) == 1, "forced asks, it does not take"
    assert matcher.accept(7) and matcher.forced(encode) == []
    assert matcher.accept(8) and matcher.forced(encode) == encode("ow")


def test_forced_tokens_go_to_the_end_where_no_longer_token_is_allowed():
    vocabulary = words("a", "b", "c", "d", "e", "f", "bcdez")
    matcher = grammar.compile(vocabulary, choice=["abcdea", "abcdfb"]).matcher()
    assert matcher.forced(encoder(vocabulary)) == [0, 1, 2, 3]
    matcher = grammar.compile(vocabulary, choice=["abcdez", "abcdfb"]).matcher()
    assert matcher.forced(encoder(vocabulary)) == [0]


def test_a_text_that_may_end_is_not_forced_to_go_on():
    vocabulary = words("a", "b", "ab")
    matcher = grammar.compile(vocabulary, choice=["a", "ab"]).matcher()
    assert matcher.forced(encoder(vocabulary)) == []
    matcher = grammar.compile(vocabulary, choice=["abb"]).matcher()
    assert matcher.forced(encoder(vocabulary)) == [2, 1]


def test_forced_tokens_do_not_end_inside_a_character():
    vocabulary = words(*(bytes([i]) for i in range(256)))
    encode = encoder(vocabulary)
    matcher = grammar.compile(vocabulary, choice=["a\u00e9", "a\u00e8"]).matcher()
    assert matcher.forced(encode) == [ord("a")], "the two share a first byte"
    assert matcher.accept(ord("a")) and matcher.forced(encode) == []


def test_a_tokenizer_that_adds_to_the_text_forces_nothing():
    vocabulary = words("a", "b", " ")
    matcher = grammar.compile(vocabulary, choice=["ab"]).matcher()
    assert matcher.forced(lambda text: [2, 0, 1]) == []
    assert matcher.forced(lambda text: [3, 0, 1]) == [], "a special id has no bytes"


def encoder(vocabulary):
    """The longest token that fits, again and again."""
    first = {}
    for i, token in enumerate(vocabulary.tokens):
        if token:
            first.setdefault(token, i)

    def encode(text: str) -> list[int]:
        left, ids = text.encode(), []
        while left:
            size = next(n for n in range(vocabulary.longest, 0, -1) if left[:n] in first)
            ids.append(first[left[:size]])
            left = left[size:]
        return ids

    return encode


# ---------------------------------------------------------------- by hand: JSON

STRING, OBJECT = {"type": "string"}, {"type": "object"}


@pytest.mark.parametrize("row", KEYWORDS, ids=lambda row: json.dumps(row["schema"])[:70])
def test_a_schema_accepts_and_refuses(row):
    """A line of tests/golden/keywords.jsonl, written by hand: a schema, texts, other texts."""
    for given in (row["schema"], json.dumps(row["schema"])):
        g = grammar.compile(BYTES, json_schema=given)
        assert list(g.ignored) == []
        assert [text for text in row["accepts"] if not g.accepts(text)] == [], "refused"
        assert [text for text in row["refuses"] if g.accepts(text)] == [], "accepted"


def test_between_tokens_there_may_be_one_blank_or_a_line_and_its_indent():
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"type": "integer"}}},
    }
    deep = "\n" + 20 * " "
    spaced = [
        '{"a": [1, 2]}',
        '{\n  "a": [\n    1,\n    2\n  ]\n}',
        '{ "a" : [ 1 , 2 ] }',
        "{ }",
        "{\n}",
    ]
    spaced += [f'{{{deep}"a":{deep}[1]}}', '{\n\t"a": []\n}']
    endless = [
        '{  "a":[]}',
        '{\n\n"a":[]}',
        f'{{{deep} "a":[]}}',
        '{"a":  1}',
        '{\t"a":[]}',
        '{\r\n"a":[]}',
    ]
    outside = [' {"a":[]}', '{"a":[]} ', '{"a":[]}\n', "\n{}"]
    kind = {"json_schema": schema}
    default = grammar.compile(BYTES, **kind)
    compact = grammar.compile(BYTES, **kind, whitespace="compact")
    free = grammar.compile(BYTES, **kind, whitespace="any")
    for g in (default, compact, free):
        assert g.accepts('{"a":[1,2]}')
    for text in spaced:
        assert default.accepts(text) and free.accepts(text) and not compact.accepts(text), text
    for text in endless[:3] + endless[4:]:
        assert free.accepts(text) and not default.accepts(text) and not compact.accepts(text), text
    for text in outside:
        assert not default.accepts(text) and not compact.accepts(text), text


def test_a_list_may_be_given_as_json_text_and_bool_schemas_are_schemas():
    assert grammar.compile(BYTES, json_schema="true").accepts("[1]")
    assert grammar.compile(BYTES, json_schema=' {"type": "null"}').accepts("null")
    assert not grammar.compile(BYTES, json_schema={"type": "null"}).accepts("1")
    assert grammar.compile(BYTES, json_schema={}).accepts('{"a":null}')


def test_the_first_key_is_the_first_of_the_schema():
    names = ["zeta", "alpha", "mid"]
    schema = OBJECT | {"properties": {name: {"const": ""} for name in names}, "required": names}
    schema["additionalProperties"] = False
    text = ""
    for name in names:
        text += ("," if text else "{") + f'"{name}":""'
        assert after(text, json_schema=schema)
    assert next_bytes(text, json_schema=schema, whitespace="compact") == b"}"


def test_what_may_follow_byte_by_byte():
    kind = {
        "json_schema": OBJECT
        | {"properties": {"a": {"type": "integer", "maximum": 12}}, "additionalProperties": False},
        "whitespace": "compact",
    }
    for text, follows in {
        "": b"{",
        "{": b'"}',
        '{"': b"a",
        '{"a': b'"',
        '{"a"': b":",
        '{"a":': b"-0123456789",
        '{"a":1': b".012}",
        '{"a":2': b".}",
        '{"a":12': b".}",
        '{"a":01': None,
        '{"a":1}': b"\0",
    }.items():
        if follows is None:
            assert not feed(grammar.compile(BYTES, **kind).matcher(), text)
        else:
            assert next_bytes(text, **kind) == follows, text
    surrogates = {"json_schema": STRING}
    assert next_bytes('"\\ud8', **surrogates) == b"0123456789ABCDEFabcdef"
    assert next_bytes('"\\ud800', **surrogates) == b"\\"
    assert next_bytes('"\\ud800\\', **surrogates) == b"u"
    assert next_bytes('"\\ud800\\u', **surrogates) == b"Dd"
    assert next_bytes('"\\ud800\\ud', **surrogates) == b"CDEFcdef"
    assert next_bytes('"\\u', **surrogates) == b"0123456789ABCDEFabcdef"
    assert next_bytes(b'"\xe0', **surrogates) == bytes(range(0xA0, 0xC0)), "no overlong spelling"
    assert next_bytes(b'"\xed', **surrogates) == bytes(range(0x80, 0xA0)), "no raw surrogate"
    assert next_bytes(b'"\xf4', **surrogates) == bytes(range(0x80, 0x90)), "up to U+10FFFF"
    start = set(next_bytes('"', **surrogates))
    assert start == {*range(0x20, 0x80), *range(0xC2, 0xF5)}


def test_a_token_may_hold_a_part_of_a_character():
    tokens = [
        b"\xf0\x9f",
        b"\xf0",
        b"\x98\x80",
        b"\x98",
        b"\x99",
        b"\x8f",
        b"\x90",
        b"\x80\xf0",
        b"\xe2",
    ]
    matcher = grammar.compile(words(*tokens), regex="[\U0001f600-\U0001f64f]+").matcher()
    assert allowed(matcher) == [0, 1] and matcher.accept(0)
    assert allowed(matcher) == [2, 3, 4] and matcher.accept(4)
    assert allowed(matcher) == [5, 7] and matcher.accept(5)
    assert allowed(matcher) == [0, 1, len(tokens)]


# ---------------------------------------------------------------- against a reference


class Rules:
    """Random rules over a few bytes; they recognise a text by trying everything.

    A rule is a tuple: ("text", bytes), ("range", lo, hi), ("seq", ...), ("alt", ...),
    ("repeat", rule, lo, hi), ("call", name). Every call is after a text, so none is left
    recursive, and each rule has a text of its own, so all can end.
    """

    TEXTS = [b"a", b"b", b"ab", b"ba", b'"', b'",', b"\xc3\xa9", b"aaa"]

    def __init__(self, rng):
        self.rng, self.known = rng, {}
        self.rules = {name: ("alt", self.leaf(), self.draw(3)) for name in "rst"}

    def leaf(self):
        if self.rng.random() < 0.3:
            return ("range", ord("a"), self.rng.choice([ord("b"), ord("z")]))
        return ("text", self.rng.choice(self.TEXTS))

    def draw(self, depth):
        if depth == 0:
            return self.leaf()
        kind = self.rng.choice(["text", "seq", "seq", "alt", "repeat", "call"])
        if kind == "text":
            return self.leaf()
        if kind == "call":
            return ("seq", self.leaf(), ("call", self.rng.choice("rst")))
        if kind == "repeat":
            lo = self.rng.choice([0, 0, 1, 2, 11])
            hi = self.rng.choice([None, lo, lo + 1, lo + 9, 40])
            letter = ("range", ord("a"), ord("z"))
            wide = [letter, ("alt", letter, ("text", b"\xc3\xa9")), ("alt", letter, self.leaf())]
            return ("repeat", self.rng.choice([*wide, self.draw(depth - 1)]), lo, hi)
        return (kind, *(self.draw(depth - 1) for _ in range(self.rng.randint(2, 3))))

    def compiled(self, vocabulary) -> Grammar:
        """The same with grammar.py's expressions."""
        rules = {name: Rule(name) for name in self.rules}

        def node(rule):
            kind, *parts = rule
            if kind == "text":
                return grammar.literal(parts[0])
            if kind == "range":
                return grammar.symbols(tuple(parts))
            if kind == "call":
                return Call(rules[parts[0]])
            if kind == "repeat":
                return grammar.repeat(node(parts[0]), *parts[1:])
            return {"seq": grammar.seq, "alt": grammar.alt}[kind](*map(node, parts))

        for name, rule in self.rules.items():
            rules[name].body = node(rule)
        return Grammar(vocabulary, rules["r"])

    def gbnf(self) -> str:
        """The same in llama.cpp's notation."""

        def text(rule):
            kind, *parts = rule
            if kind == "text":
                return json.dumps(parts[0].decode(), ensure_ascii=False)
            if kind == "range":
                return f"[{chr(parts[0])}-{chr(parts[1])}]"
            if kind == "call":
                return parts[0] + "0"
            if kind == "repeat":
                lo, hi = parts[1:]
                return f"({text(parts[0])}){{{lo},{'' if hi is None else hi}}}"
            return "(" + {"seq": " ", "alt": " | "}[kind].join(map(text, parts)) + ")"

        lines = [f"{name}0 ::= {text(rule)}" for name, rule in self.rules.items()]
        return "\n".join(["root ::= r0", *lines])

    def whole(self, text: bytes) -> bool:
        self.known = {}
        return len(text) in self.match(("call", "r"), text, 0)[0]

    def begins(self, text: bytes) -> bool:
        """Whether some text of the rules begins so."""
        self.known = {}
        return self.match(("call", "r"), text, 0)[1]

    def match(self, rule, text, at) -> tuple[set[int], bool]:
        """Where a rule that begins at a place may end; whether the text can end inside it."""
        found = self.known.get((rule, at))
        if found is None:
            found = self.known[rule, at] = self.parts(rule, text, at)
        return found

    def parts(self, rule, text, at):
        kind, *parts = rule
        if kind == "call":
            return self.match(self.rules[parts[0]], text, at)
        if kind == "text":
            (want,) = parts
            here = text[at : at + len(want)]
            out = at + len(want) >= len(text) and want.startswith(here)
            return ({at + len(want)} if here == want else set()), out
        if kind == "range":
            inside = at < len(text) and parts[0] <= text[at] <= parts[1]
            out = at == len(text) or inside and at + 1 == len(text)
            return ({at + 1} if inside else set()), out
        if kind == "alt":
            each = [self.match(part, text, at) for part in parts]
            return set().union(*(ends for ends, _ in each)), any(out for _, out in each)
        if kind == "seq":
            steps = parts
        else:
            what, lo, hi = parts
            steps = [what] * (hi if hi is not None else lo + len(text) + 1)
        ends, out, done = {at}, False, set()
        for i, step in enumerate(steps):
            if kind == "repeat" and i >= lo:
                done |= ends
            each = [self.match(step, text, place) for place in ends]
            ends = set().union(*(places for places, _ in each))
            out |= any(inside for _, inside in each)
        return done | ends, out or len(text) in done | ends


@WALKS
def test_masks_of_random_rules_are_those_of_a_recogniser_that_tries_everything(few, monkeypatch):
    walk_so(monkeypatch, few)
    rng, seen = random.Random(1), 0
    tokens = [bytes([byte]) for byte in b'abz",\xc3\xa9']
    for _ in range(50):
        pieces = b"".join(rng.choices(Rules.TEXTS, k=8))
        tokens += [pieces[at : at + rng.randint(2, 7)] for at in range(3)]
    vocabulary = words(*tokens)
    for _ in range(15):
        rules = Rules(rng)
        matcher, text = rules.compiled(vocabulary).matcher(), b""
        while len(text) < 12:
            expected = [i for i, token in enumerate(tokens) if rules.begins(text + token)]
            seen += len(tokens)
            found = allowed(matcher)
            assert found == expected + [len(tokens)] * rules.whole(text), (rules.rules, text)
            if not expected or rng.random() < 0.1:
                break
            token = rng.choice(expected)
            assert matcher.accept(token)
            text += tokens[token]
    assert seen > 2_000


def test_gbnf_is_read_as_it_is_meant():
    rng = random.Random(2)
    for _ in range(30):
        rules = Rules(rng)
        direct, read = rules.compiled(BYTES), grammar.compile(BYTES, grammar=rules.gbnf())
        for _ in range(15):
            text = b"".join(rng.choices(Rules.TEXTS, k=rng.randint(0, 6)))
            assert read.accepts(text) == direct.accepts(text) == rules.whole(text), rules.gbnf()


def random_pattern(rng, depth=3) -> str:
    """A pattern that JavaScript, Python and JSON Schema read alike."""
    if depth == 0:
        return rng.choice(
            [
                "a",
                "b",
                "ab",
                "\u00e9",
                "\U0001f600",
                '"',
                "\\\\",
                "\\n",
                "\\d",
                "\\w",
                ".",
                "[ab]",
                "[^a]",
                "[a-c\u00e9]",
                "\\s",
                "\\S",
                '[^"\\\\\\n]',
                "\\u0062",
                "/",
            ]
        )
    kind = rng.choice(["leaf", "seq", "seq", "alt", "repeat"])
    if kind == "leaf":
        return random_pattern(rng, 0)
    if kind == "repeat":
        times = rng.choice(["*", "+", "?", "{2}", "{1,3}", "{2,}", "{0,1}", "*?"])
        return f"(?:{random_pattern(rng, depth - 1)}){times}"
    parts = [random_pattern(rng, depth - 1) for _ in range(rng.randint(2, 3))]
    return "".join(parts) if kind == "seq" else f"({'|'.join(parts)})"


def random_text(rng) -> str:
    return "".join(rng.choices('aabbc\u00e9\U0001f600"\\\n 1_/', k=rng.randint(0, 6)))


def check_patterns(rng, count) -> collections.Counter:
    """Random patterns on random texts, as `re` has them; how often each verdict came."""
    verdicts = collections.Counter()
    for _ in range(count):
        pattern = random_pattern(rng)
        theirs = re.compile(schemas.ecma_pattern(pattern))
        whole = grammar.compile(BYTES, regex=pattern)
        anchored = rng.choice(["{}", "^{}", "{}$", "^{}$", "^(?:{})$"]).format(pattern)
        inside = re.compile(schemas.ecma_pattern(anchored))
        schema = {"type": "string", "pattern": anchored}
        if rng.random() < 0.5:
            schema |= {"minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 6)}
        try:
            found = grammar.compile(BYTES, json_schema=schema)
        except SchemaError as error:
            assert "nothing" in error.reason, error
            found = grammar.compile(BYTES, choice=["no JSON at all"])
        for text in [random_text(rng) for _ in range(12)]:
            assert whole.accepts(text) == bool(theirs.fullmatch(text)), (pattern, text)
            fits = schema.get("minLength", 0) <= len(text) <= schema.get("maxLength", 6)
            expected = fits and bool(inside.search(text))
            assert found.accepts(schemas.spell(text)) == expected, (schema, text)
            assert not found.accepts(json.dumps(text)) or expected, (schema, text)
            verdicts[whole.accepts(text), expected] += 1
    return verdicts


def test_patterns_are_those_of_pythons_re():
    verdicts = check_patterns(random.Random(3), 60)
    assert len(verdicts) == 4 and min(verdicts.values()) >= 10, verdicts


@pytest.mark.slow
def test_two_thousand_patterns_are_those_of_pythons_re():
    check_patterns(random.Random(4), 2000)


def spellings(matcher, value, budget):
    """Take a JSON value in every order of its properties that is accepted, one after the other."""
    budget[0] -= 1
    if budget[0] < 0:
        return
    if isinstance(value, dict) and matcher.accept(ord("{")):
        yield from _members(matcher, list(value), value, "", budget)
        matcher.rollback(1)
    elif isinstance(value, list) and matcher.accept(ord("[")):
        yield from _elements(matcher, value, 0, budget)
        matcher.rollback(1)
    elif not isinstance(value, (dict, list)):
        text = schemas.spell(value).encode()
        if feed(matcher, text):
            yield
            matcher.rollback(len(text))


def _members(matcher, names, value, comma, budget):
    if not names and matcher.accept(ord("}")):
        yield
        matcher.rollback(1)
    for name in names if budget[0] > 0 else ():
        head = (comma + schemas.spell(name) + ":").encode()
        if feed(matcher, head):
            rest = [other for other in names if other != name]
            for _ in spellings(matcher, value[name], budget):
                yield from _members(matcher, rest, value, ",", budget)
            matcher.rollback(len(head))


def _elements(matcher, values, at, budget):
    if at == len(values):
        if matcher.accept(ord("]")):
            yield
            matcher.rollback(1)
    elif not at or matcher.accept(ord(",")):
        for _ in spellings(matcher, values[at], budget):
            yield from _elements(matcher, values, at + 1, budget)
        matcher.rollback(at > 0)


def fits(g, value, tries=3000) -> bool:
    """Whether a value is accepted with its properties in some order."""
    matcher = g.matcher()
    return any(STOP in allowed(matcher) for _ in spellings(matcher, value, [tries]))


def test_random_schemas_have_the_verdicts_of_jsonschema():
    """`python tests/schemas.py` wrote them: texts of values near to what the schema allows."""
    compiled, wrong = 0, []
    for group in VERDICTS:
        try:
            g = grammar.compile(BYTES, json_schema=group["schema"])
        except SchemaError as error:
            if "nothing" in error.reason and group["valid"]:
                wrong.append((group["schema"], str(error), group["valid"][0]))
            continue
        compiled += 1
        for text in group["valid"]:
            if not g.accepts(text) and not fits(g, json.loads(text)):
                wrong.append((group["schema"], "refused", text))
        wrong += [(group["schema"], "accepted", t) for t in group["invalid"] if g.accepts(t)]
    assert not wrong, f"{len(wrong)}: {wrong[:3]}"
    assert compiled >= 0.8 * len(VERDICTS)


@pytest.mark.parametrize("group", OWN, ids=lambda group: group["name"])
def test_schemas_as_people_write_them(group):
    """In the order of the schema, compact and spaced."""
    schema = group["schema"]
    g = grammar.compile(BYTES, json_schema=schema)
    for value in group["valid"]:
        value = schemas.arranged(value, schema)
        for separators in ((",", ":"), (", ", ": ")):
            assert g.accepts(schemas.spell(value, separators)), value
        assert g.accepts(json.dumps(value, indent=2, ensure_ascii=False)), value
    for value in group["invalid"]:
        assert not g.accepts(schemas.spell(schemas.arranged(value, schema))), value
        assert not fits(g, value, 300), value


@pytest.mark.slow
def test_two_thousand_random_schemas_have_the_verdicts_of_jsonschema():
    rng, counts, wrong = random.Random(5), collections.Counter(), []
    for _ in range(2000):
        schema = schemas.random_schema(rng)
        judge = schemas.validator(schema)
        values = [schemas.near_value(rng, schema, schema) for _ in range(6)]
        values += [schemas.changed(rng, value) for value in values]
        try:
            g = grammar.compile(BYTES, json_schema=schema)
        except SchemaError as error:
            counts["refused"] += 1
            if "nothing" in error.reason:
                valid = [v for v in values if judge.is_valid(schemas.exactly(schemas.spell(v)))]
                wrong += [(schema, str(error), v) for v in valid[:1]]
            continue
        counts["compiled"] += 1
        for value in values:
            value = schemas.arranged(value, schema)
            text, odd = schemas.spell(value), schemas.spell_oddly(rng, value)
            valid = judge.is_valid(schemas.exactly(text))
            counts["valid" if valid else "invalid"] += 1
            if valid and not g.accepts(text):
                counts["in another order"] += 1
                if not fits(g, value, 50_000):
                    wrong.append((schema, "refused", text))
            if not valid and (g.accepts(text) or fits(g, value, 50)):
                wrong.append((schema, "accepted", text))
            if g.accepts(odd) and not judge.is_valid(schemas.exactly(odd)):
                wrong.append((schema, "accepted", odd))
    print(dict(counts))
    assert not wrong, f"{len(wrong)}: {wrong[:3]}"
    assert counts["compiled"] > 1600


# ---------------------------------------------------------------- by property


def property_grammars(vocabulary, rng, count):
    """Grammars of random schemas, each over a vocabulary and over single bytes."""
    while count:
        schema = schemas.random_schema(rng)
        whitespace = rng.choice(["default", "default", "compact", "any"])
        try:
            g = grammar.compile(vocabulary, json_schema=schema, whitespace=whitespace)
        except SchemaError:
            continue
        yield schema, g, grammar.compile(BYTES, json_schema=schema, whitespace=whitespace)
        count -= 1


def json_vocabulary(rng, count) -> Vocabulary:
    """All bytes, so many pieces of JSON texts, some twice, and ids without bytes among them.

    The pieces begin and end anywhere: they cross whatever a grammar tells apart.
    """
    known = [text.encode() for group in VERDICTS for text in group["valid"]]
    known += [path.read_bytes() for path in GOLDEN.glob("*.json")]
    pieces = {}
    while len(pieces) < count:
        text = rng.choice(known)
        at = rng.randrange(len(text))
        pieces[text[at : at + rng.randint(2, rng.choice([4, 12]))]] = None
    tokens = [bytes([i]) for i in range(256)] + list(pieces)
    tokens += [
        b'{"',
        b'":',
        b'": ',
        b'", "',
        b'"},{"',
        b"}]",
        b"\n  ",
        b"true",
        b"null",
        b"00",
        b"e+",
        b'\\"',
        b"\\u00",
        b"\\ud83d",
        b'"a',
        b'a"',
        b" ",
        b"  ",
        b'","',
        b"abc",
    ]
    tokens += [None, b"a", b'"', b"", None]
    rng.shuffle(tokens)
    return Vocabulary([*tokens, None, None], [len(tokens), len(tokens) + 1])


def compare_masks(vocabulary, rng, count, states) -> int:
    """Every id at random states of random schemas, byte by byte: how many were compared."""
    compared, tokens = 0, vocabulary.tokens
    for schema, g, single in property_grammars(vocabulary, rng, count):
        ids = walk(g, rng, patience=rng.choice([5, 30]))[:-1]
        for stop in sorted({0, len(ids), *(rng.randint(0, len(ids)) for _ in range(states))}):
            matcher, reference = g.matcher(), single.matcher()
            assert all(matcher.accept(i) for i in ids[:stop])
            text = b"".join(tokens[i] for i in ids[:stop])
            assert feed(reference, text)
            ends = STOP in allowed(reference)
            expected = []
            for i, token in enumerate(tokens):
                if i in vocabulary.stop_ids:
                    expected += [i] * ends
                elif token and feed(reference, token):
                    expected.append(i)
                    reference.rollback(len(token))
            assert allowed(matcher) == expected, (schema, text)
            compared += len(tokens)
    return compared


@WALKS
def test_masks_are_those_of_a_run_byte_by_byte(few, monkeypatch):
    walk_so(monkeypatch, few)
    rng = random.Random(6)
    assert compare_masks(json_vocabulary(rng, 150), rng, 12, 3) > 15_000


@pytest.mark.slow
def test_masks_of_many_ids_are_those_of_a_run_byte_by_byte():
    rng, compared = random.Random(7), 0
    for count in (200, 1_000, 20_000):
        vocabulary = json_vocabulary(rng, count)
        compared += compare_masks(vocabulary, rng, 40_000 // (count + 200), 4)
    print(f"{compared:,} pairs of a state and an id")
    assert compared > 400_000


def test_what_a_mask_allows_is_accepted_and_leads_on_and_nothing_else_is():
    rng = random.Random(8)
    vocabulary = json_vocabulary(rng, 100)
    for schema, g, _ in property_grammars(vocabulary, rng, 12):
        ids = walk(g, rng, patience=10)
        matcher = g.matcher()
        for taken in ids[: rng.randint(0, len(ids) - 1)]:
            assert matcher.accept(taken)
        before, mask = list(matcher.history), matcher.mask().copy()
        possible = set(allowed(matcher))
        for i in range(len(vocabulary.tokens)):
            assert matcher.accept(i) == (i in possible), (schema, i)
            if i in possible:
                assert allowed(matcher) or matcher.finished, (schema, i)
                matcher.rollback(1)
            assert matcher.history == before and (matcher.mask() == mask).all()


def test_walks_end_in_texts_that_the_grammar_accepts():
    rng = random.Random(9)
    vocabulary = json_vocabulary(rng, 200)
    for schema, g, single in property_grammars(vocabulary, rng, 25):
        for patience in (0, 20):
            ids = walk(g, rng, patience)
            text = b"".join(vocabulary.tokens[i] for i in ids[:-1])
            assert g.accepts(text) and single.accepts(text), (schema, text)
            json.loads(text)


def has_twins(text: str) -> bool:
    """Whether a name without a schema of its own comes twice: no automaton remembers them all."""
    found = []

    def members(pairs):
        found.append(len(dict(pairs)) < len(pairs))
        return dict(pairs)

    json.loads(text, object_pairs_hook=members)
    return any(found)


@pytest.mark.slow
def test_walks_end_in_texts_that_jsonschema_accepts():
    rng, count, twins = random.Random(10), 0, 0
    vocabulary = json_vocabulary(rng, 300)
    for schema, g, _ in property_grammars(vocabulary, rng, 600):
        judge = schemas.validator(schema)
        for patience in (0, 10, 60):
            ids = walk(g, rng, patience)
            text = b"".join(vocabulary.tokens[i] for i in ids[:-1]).decode()
            twins += has_twins(text)
            assert has_twins(text) or judge.is_valid(schemas.exactly(text)), (schema, text)
            count += 1
    print(f"{count} texts, of which {twins} name a member twice")
    assert count == 1800 and twins < 20


def test_taking_tokens_back_is_as_if_they_had_not_been_taken():
    rng = random.Random(11)
    vocabulary = json_vocabulary(rng, 100)
    for _, g, _ in property_grammars(vocabulary, rng, 12):
        ids = walk(g, rng, patience=15)
        matcher, masks = g.matcher(), []
        for i in ids:
            masks.append(matcher.mask().copy())
            assert matcher.accept(i)
        at = len(ids)
        for _ in range(6):
            back = rng.randint(0, at)
            matcher.rollback(back)
            at -= back
            assert at == len(ids) or (matcher.mask() == masks[at]).all()
            on = rng.randint(0, len(ids) - at)
            assert all(matcher.accept(i) for i in ids[at : at + on])
            at += on


def test_forced_tokens_are_those_of_the_text_whole():
    """A text in its canonical tokens: what is forced never differs from them."""
    rng, forced = random.Random(12), 0
    vocabulary = json_vocabulary(rng, 300)
    encode = encoder(vocabulary)
    for schema in [group["schema"] for group in OWN]:
        g = grammar.compile(vocabulary, json_schema=schema, whitespace="compact")
        text = b"".join(vocabulary.tokens[i] for i in walk(g, rng, patience=10)[:-1]).decode()
        matcher, ids, at = g.matcher(), encode(text), 0
        while at < len(ids):
            sure = matcher.forced(encode)
            assert sure == ids[at : at + len(sure)], (schema, text, at)
            forced += len(sure)
            for i in sure or [ids[at]]:
                assert matcher.accept(i)
            at += len(sure) or 1
        assert matcher.forced(encode) == [] or not g.accepts(text)
    assert forced > 400


# ---------------------------------------------------------------- the door

REFUSED = [  # schema, path, keyword
    (
        {"properties": {"a": {"type": "array", "uniqueItems": True}}},
        "#/properties/a",
        "uniqueItems",
    ),
    ({"contains": {"const": 1}, "allOf": [{"contains": {"const": 2}}]}, "#/allOf/0", "contains"),
    ({"items": {"not": {"multipleOf": 2}}}, "#/items", "not"),
    ({"not": {"items": {"type": "null"}, "prefixItems": [True]}}, "#", "not"),
    ({"not": {"additionalProperties": False}}, "#", "not"),
    ({"anyOf": [{"oneOf": [{"multipleOf": 2}, {"multipleOf": 3}]}]}, "#/anyOf/0", "oneOf"),
    ({"if": {"multipleOf": 2}, "then": {"minimum": 1}}, "#", "if"),
    ({"type": "array", "not": {"const": [1]}}, "#", "not"),
    (
        {"$defs": {"a/b": {"$dynamicRef": "#x"}}, "$ref": "#/$defs/a~1b"},
        "#/$defs/a~1b",
        "$dynamicRef",
    ),
    ({"type": "string", "pattern": "(?=a)b"}, "#", "pattern"),
    ({"type": "string", "pattern": "(a)\\1"}, "#", "pattern"),
    ({"type": "string", "pattern": "\\bword"}, "#", "pattern"),
    ({"type": "string", "pattern": "("}, "#", "pattern"),
    ({"type": "string", "pattern": "[b-a]"}, "#", "pattern"),
    ({"type": "string", "pattern": "a{3,2}"}, "#", "pattern"),
    ({"patternProperties": {"(?!a)": {}}}, "#", "patternProperties"),
    ({"properties": {"x": {"$ref": "#/$defs/gone"}}}, "#/properties/x", "$ref"),
    ({"properties": {"x": {"$ref": "#gone"}}}, "#/properties/x", "$ref"),
    ({"$ref": "http://example.com/schema.json"}, "#", "$ref"),
    ({"type": "strin"}, "#", "type"),
    ({"type": 3}, "#", "type"),
    ({"type": "string", "minLength": -1}, "#", "minLength"),
    ({"type": "string", "maxLength": "3"}, "#", "maxLength"),
    ({"enum": 1}, "#", "enum"),
    ({"properties": []}, "#", "properties"),
    ({"properties": {"a": 1}}, "#", "properties"),
    ({"required": "a"}, "#", "required"),
    ({"anyOf": []}, "#", "anyOf"),
    ({"type": "number", "multipleOf": 0}, "#", "multipleOf"),
    ({"type": "number", "minimum": "1"}, "#", "minimum"),
]


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: json.dumps(row[0])[:60])
def test_what_is_not_enforced_is_refused_by_name(row):
    schema, path, keyword = row
    with pytest.raises(SchemaError) as caught:
        grammar.compile(BYTES, json_schema=schema)
    error = caught.value
    assert (error.path, error.keyword) == (path, keyword), error
    assert error.reason and keyword in str(error) and len(str(error)) < 300


NOTHING = [
    False,
    {"enum": []},
    {"type": []},
    {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    {"type": "number", "minimum": 3, "maximum": 2},
    {"type": "number", "exclusiveMinimum": 3, "maximum": 3},
    {"type": "integer", "multipleOf": 10, "minimum": 1, "maximum": 9},
    {"type": "string", "minLength": 3, "maxLength": 2},
    {"type": "string", "pattern": "^a$", "minLength": 2},
    {"type": "string", "pattern": "^[ab]{2}$", "maxLength": 1},
    {"type": "array", "minItems": 2, "maxItems": 1},
    {"type": "array", "items": False, "minItems": 1},
    {"type": "array", "prefixItems": [True, False], "minItems": 2},
    {"type": "object", "properties": {"a": False}, "required": ["a"]},
    {"type": "object", "required": ["a"], "additionalProperties": False},
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    {
        "$defs": {
            "a": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1}]}
        },
        "$ref": "#/$defs/a",
    },
    {"allOf": [{"type": "string"}, {"type": "integer"}]},
    {"const": 1, "type": "string"},
    {"enum": [1, 2], "minimum": 3},
    {"type": "string", "allOf": [{"pattern": "^a"}, {"pattern": "^b"}]},
    {"type": "object", "minProperties": 1, "additionalProperties": False},
]


@pytest.mark.parametrize("schema", NOTHING, ids=lambda schema: json.dumps(schema)[:70])
def test_a_schema_that_accepts_nothing_is_refused(schema):
    with pytest.raises(SchemaError, match="nothing"):
        grammar.compile(BYTES, json_schema=schema)


def test_a_part_that_accepts_nothing_is_no_way_to_go():
    """A mask may not lead to where no text can be finished."""
    schema = OBJECT | {"properties": {"a": {"type": "array", "items": {"$ref": "#/$defs/x"}}}}
    schema["$defs"] = {"x": {"type": "array", "items": {"$ref": "#/$defs/x"}, "minItems": 1}}
    schema["additionalProperties"] = False
    kind = {"json_schema": schema, "whitespace": "compact"}
    assert next_bytes('{"a":[', **kind) == b"]"
    kind = {
        "json_schema": {"anyOf": [schema["$defs"]["x"], {"const": 1}], "$defs": schema["$defs"]}
    }
    assert next_bytes("", **kind) == b"1"
    assert next_bytes("", json_schema={"anyOf": [False, {"const": 1}]}) == b"1"
    pattern = {"type": "string", "pattern": "^(aaa|bb)$", "maxLength": 2}
    assert next_bytes('"', json_schema=pattern) == b"b"
    assert next_bytes("", grammar='root ::= "a" | "b" x\nx ::= "c" x') == b"a"


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {
            "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"allOf": [{"$ref": "#/$defs/a"}]}},
            "$ref": "#/$defs/a",
        },
        {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    ],
    ids=lambda schema: json.dumps(schema)[:60],
)
def test_a_reference_without_content_is_refused(schema):
    with pytest.raises(SchemaError):
        grammar.compile(BYTES, json_schema=schema)


def test_schemas_over_the_budget_are_refused_in_seconds():
    deep = {}
    for _ in range(5000):
        deep = {"items": deep}
    wide = {
        "allOf": [
            {"anyOf": [{"properties": {f"p{i}{j}": {"const": j}}} for j in range(8)]}
            for i in range(12)
        ]
    }
    doubled = {"$defs": {"d0": {"type": "string"}}, "$ref": "#/$defs/d40"}
    for i in range(40):
        two = [{"properties": {f"{side}": {"$ref": f"#/$defs/d{i}"}}} for side in "lr"]
        doubled["$defs"][f"d{i + 1}"] = {"allOf": two, "type": "object"}
    for schema in (deep, "[" * 100_000, '{"items":' * 5000 + "true" + "}" * 5000, wide):
        started = time.process_time()
        with pytest.raises(SchemaError):
            grammar.compile(BYTES, json_schema=schema)
        assert time.process_time() - started < 10
    assert grammar.compile(BYTES, json_schema=doubled).accepts("{}"), "rules are shared"


@pytest.mark.parametrize(
    "text",
    [
        'root ::= root "a" | "b"',
        'root ::= e\ne ::= e "+" e | "1"',
        'root ::= x? root | "a"\nx ::= "x"',
        'root ::= a\na ::= b "x"\nb ::= a "y" | "z"',
        "root ::= root",
    ],
    ids=lambda text: text[:40],
)
def test_left_recursion_is_rewritten_or_refused(text):
    started = time.process_time()
    try:
        g = grammar.compile(BYTES, grammar=text)
    except SchemaError as error:
        assert "itself" in error.reason or "nothing" in error.reason, error
    else:
        assert g.accepts("ba") or g.accepts("1+1")
    assert time.process_time() - started < 10


def test_one_kind_of_grammar_and_known_options():
    with pytest.raises(ValueError):
        grammar.compile(BYTES)
    with pytest.raises(ValueError):
        grammar.compile(BYTES, regex="a", choice=["a"])
    with pytest.raises(ValueError, match="tabs"):
        grammar.compile(BYTES, json_schema=True, whitespace="tabs")
    for choice in ([], [1], "abc"):
        with pytest.raises(ValueError):
            grammar.compile(BYTES, choice=choice)
    for schema in ("{", "", "nul", "3", '"a"', "[]", 3, None, [], "{}{}", '{"a":1,}', "\ud800"):
        with pytest.raises(ValueError):
            grammar.compile(BYTES, json_schema=schema)


def test_lenient_lists_what_it_does_not_enforce():
    odd = {"type": "integer", "not": {"multipleOf": 2}}
    schema = {"type": "array", "uniqueItems": True, "items": odd, "maxItems": 2}
    with pytest.raises(SchemaError):
        grammar.compile(BYTES, json_schema=schema)
    g = grammar.compile(BYTES, json_schema=schema, lenient=True)
    assert g.accepts("[4,4]") and not g.accepts('["3"]') and not g.accepts("[1,2,3]")
    assert sorted(g.ignored) == ["#/items/not", "#/uniqueItems"]
    for broken in (False, {"type": "strin"}, {"minimum": 3, "maximum": 2, "type": "number"}):
        with pytest.raises(SchemaError):
            grammar.compile(BYTES, json_schema=broken, lenient=True)
    known = grammar.compile(BYTES, json_schema={"type": "string", "format": "phone"})
    assert known.accepts('"x"') and known.ignored == ["#/format"], "an annotation, but said"


def test_broken_schemas_are_refused_and_nothing_else_happens():
    """Any value anywhere in a schema: compiled or refused, and soon."""
    rng = random.Random(13)
    for _ in range(250):
        schema = schemas.random_schema(rng, 2)
        for _ in range(rng.randint(1, 3)):
            schema = schemas.changed(rng, schema)
        started = time.process_time()
        try:
            walk(grammar.compile(BYTES, json_schema=schema), rng, patience=5)
        except SchemaError as error:
            assert str(error)
        except ValueError:
            assert not isinstance(schema, (dict, bool))
        assert time.process_time() - started < 10, schema


# ---------------------------------------------------------------- old bugs of many engines


def test_whitespace_ends():
    """xgrammar 212, vLLM 12744: a newline, and again, until the limit; mellea 1515: 200 blanks."""
    schema = OBJECT | {"properties": {"a": {"type": "array", "items": STRING}}, "required": ["a"]}
    matcher = after("{\n" + " " * 20, json_schema=schema)
    assert allowed(matcher) == [ord('"')]
    assert next_bytes("{\n", json_schema=schema) == b'\t "'
    assert not feed(after('{"a":', json_schema=schema), " " * 2)


@pytest.mark.parametrize("kind", ["integer", "number"])
def test_digits_end(kind):
    """outlines 1157: 0.3333... and 42000000... for ever."""
    schema = {"type": "array", "items": {"type": kind}}
    for start in ("[1", "[-7", *["[0.3", "[1e5", "[0.0"] * (kind == "number")):
        matcher, digits = after(start, json_schema=schema), 0
        while matcher.accept(ord("3")):
            digits += 1
            assert digits < 400, f"{start}333..."
        assert digits >= 3 or "e" in start
        assert ord("]") in allowed(matcher) and ord(",") in allowed(matcher)


def test_nothing_follows_a_text_that_is_complete():
    """vLLM 29632: all tokens were allowed again."""
    for schema, text in (({"const": 0.5}, "0.5"), (STRING, '"a"'), (OBJECT, "{}"), (True, "[]")):
        assert allowed(after(text, json_schema=schema)) == [STOP]
        assert after(text, json_schema=schema).finished
    assert next_bytes("12", json_schema={"type": "integer"})[0] == 0


def test_an_escape_is_one_character():
    """xgrammar 0.2.9 refused escapes in strings of bounded length."""
    g = grammar.compile(BYTES, json_schema=STRING | {"minLength": 3, "maxLength": 3})
    for text in (
        '"a\\"b"',
        '"a\\nb"',
        '"\\u0041\\u00e9\\/"',
        '"\\ud83d\\ude00ab"',
        '"\u00e9\u540d\U0001f600"',
    ):
        assert g.accepts(text), text
    for text in ('"a\\"bc"', '"\\n\\n"', '"\\u0041"', '"\\ud83d\\ude00a"', '"ab\\ud83d"'):
        assert not g.accepts(text), text


def test_a_literal_is_spelled_as_people_do():
    """xgrammar 626 wrote http:\\/\\/, outlines 1092 wrote \\u5f00."""
    assert next_bytes('"http:', json_schema={"const": "http://a"}) == b"/"
    assert next_bytes('"', json_schema={"enum": ["\u5f00\u5fc3", "\u96be\u8fc7"]}) == b"\xe5\xe9"


def test_anyof_of_constants_that_begin_alike_can_all_be_finished():
    """lattice 310: the mask allowed a byte, then everything was refused."""
    branches = [
        OBJECT
        | {
            "properties": {"t": {"const": kind}, name: {"type": "integer"}},
            "required": ["t", name],
            "additionalProperties": False,
        }
        for kind, name in (("alpha", "x"), ("apple", "y"), ("al", "z"))
    ]
    g = grammar.compile(BYTES, json_schema={"anyOf": branches})
    for kind, name in (("alpha", "x"), ("apple", "y"), ("al", "z")):
        assert g.accepts(f'{{"t":"{kind}","{name}":1}}')
    assert not g.accepts('{"t":"alpha","y":1}') and not g.accepts('{"t":"a","x":1}')


def test_a_declared_name_cannot_come_again_in_disguise():
    """xgrammar 831, guidance 1039: after b the model wrote a again, or \\u0061, with any value."""
    schema = OBJECT | {
        "properties": {"a": {"const": "foo"}, "b": {"const": "bar"}},
        "required": ["b"],
    }
    g = grammar.compile(BYTES, json_schema=schema)
    assert g.accepts('{"a":"foo","b":"bar","c":1}')
    for text in ('"a":"BAD"', '"\\u0061":"BAD"', '"a":"foo"', '"\\u0062":1', '"\\u0063":1'):
        assert not g.accepts('{"b":"bar",' + text + "}"), text
    follows = next_bytes('{"b":"bar","a', json_schema=schema)
    assert b'"'[0] not in follows and b"\\"[0] not in follows and b"b"[0] in follows


def test_long_texts_and_many_items_compile_in_milliseconds():
    """llama.cpp 25746, xgrammar 852, llguidance 376, vLLM 7332: minutes, or out of memory."""
    many = OBJECT | {"properties": {f"p{i}": STRING | {"maxLength": 500 + i} for i in range(40)}}
    for schema, inside in (
        (STRING | {"maxLength": 100_000}, '"' + "x" * 300),
        (STRING | {"minLength": 50_000, "maxLength": 100_000}, '"' + "x" * 300),
        (
            {"type": "array", "items": {"type": "integer"}, "maxItems": 30_000},
            "[" + "1," * 1_000 + "1",
        ),
        (
            {"type": "array", "items": {"type": "integer"}, "minItems": 10, "maxItems": 1_000},
            "[" + "1," * 30 + "1",
        ),
        (STRING | {"pattern": "^[a-z ]{1,2000}$"}, '"' + "x" * 300),
        (STRING | {"pattern": "^[a-z]+( [a-z]+)*$", "maxLength": 1000}, '"' + "xy " * 100 + "x"),
        (many, '{"p0":"a"'),
        ({"enum": [f"value {i}" for i in range(500)]}, '"value 1'),
    ):
        started = time.process_time()
        matcher = grammar.compile(BYTES, json_schema=schema).matcher()
        assert time.process_time() - started < 10, schema
        assert feed(matcher, inside) and allowed(matcher)
        assert time.process_time() - started < 10, schema
    exact = grammar.compile(BYTES, json_schema=STRING | {"maxLength": 2_500})
    assert exact.accepts('"' + "x" * 2_500 + '"') and not exact.accepts('"' + "x" * 2_501 + '"')
    items = grammar.compile(
        BYTES, json_schema={"type": "array", "minItems": 3_000, "maxItems": 3_001}
    )
    assert [items.accepts(f"[{','.join('1' * n)}]") for n in (2_999, 3_000, 3_001, 3_002)] == [
        False,
        True,
        True,
        False,
    ]


# ---------------------------------------------------------------- schemas of a folder


def read_folder(folder: Path):
    """(name, groups) of each file that holds schemas with tests."""
    for path in sorted(Path(folder).rglob("*.json")):
        found = json.loads(path.read_text("utf-8"))
        found = found if isinstance(found, list) else [found]
        if all(
            isinstance(group, dict) and "schema" in group and "tests" in group for group in found
        ):
            yield str(path.relative_to(folder)), found


RESTRICTIONS = (  # valid values that are refused, in the descriptions of the JSON-Schema-Test-Suite
    "A-label (punycode)",  # which of them are valid takes Unicode's tables
    "float-overflow.json",  # an integer with an exponent, beside multipleOf
)


@pytest.mark.slow
def test_the_schemas_of_a_folder(request):
    folder = request.config.getoption("--schemas")
    if not folder:
        pytest.skip("no --schemas FOLDER")
    counts, refused, wrong = collections.Counter(), collections.Counter(), []
    slowest, orders = (0, ""), []
    for name, groups in read_folder(folder):
        if name.endswith("draft2020-12/format.json"):
            continue  # formats are assertions here, as in optional/format
        for group in groups:
            where = f"{name}: {group['description']}"
            counts["schemas"] += 1
            started = time.process_time()
            try:
                g = grammar.compile(BYTES, json_schema=group["schema"])
            except SchemaError as error:
                refused[error.keyword] += 1
                counts["refused"] += 1
                if "nothing" in error.reason and any(test["valid"] for test in group["tests"]):
                    wrong.append((where, "accepts nothing", str(error)))
                continue
            finally:
                slowest = max(slowest, (time.process_time() - started, where))
            counts["compiled"] += 1
            for test in group["tests"]:
                value = schemas.arranged(test["data"], group["schema"])
                text = schemas.spell(value)
                told = f"{where}: {test['description']}: {text[:200]}"
                both = [g.accepts(text), g.accepts(schemas.spell(value, (", ", ": ")))]
                counts["valid" if test["valid"] else "invalid"] += 1
                if test["valid"] and not all(both):
                    (orders if fits(g, value) else wrong).append((told, "refused"))
                elif not test["valid"] and (any(both) or fits(g, value, 100)):
                    wrong.append((told, "accepted"))
    print(f"\n{dict(counts)}\nrefused by name: {dict(refused.most_common())}")
    print(f"slowest compilation {1e3 * slowest[0]:.0f} ms: {slowest[1]}")
    wrong = [line for line in wrong if not any(known in line[0] for known in RESTRICTIONS)]
    print(
        f"accepted in another order only: {len(orders)}", *(told for told, _ in orders), sep="\n  "
    )
    print(f"wrong: {len(wrong)}", *wrong, sep="\n  ")
    assert counts["schemas"] and not wrong
