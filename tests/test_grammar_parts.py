"""grammar.py's parts: regular expressions, characters, JSON strings, keys and GBNF.

By hand, against Python's `re` on random texts, and against all texts of a small alphabet. The
vocabulary is the 256 bytes, so that what a node accepts is what its automaton accepts.
"""

import gc
import itertools
import json
import random
import re

import pytest

import grammar
from grammar import EMPTY, Rule, SchemaError, keys, parse_regex, spell, string

BYTES = grammar.Vocabulary([bytes([b]) for b in range(256)] + [None], [256])


# ---------------------------------------------------------------- helpers


def compiled(node):
    return grammar.Grammar(BYTES, Rule("test", node))


def acceptor(node):
    """text -> whether it is in the node; a node without texts accepts none."""
    return (lambda text: False) if node is EMPTY else compiled(node).accepts


def matcher(pattern, search=False):
    return acceptor(spell(parse_regex(pattern, search=search)))


def quote(text):
    return json.dumps(text, ensure_ascii=False)


def assert_every_state_can_end(node, most=4000):
    """Follows the first and the last byte of each edge to all configurations there are."""
    made = compiled(node)
    machine, found, before = made.machine, [made.start], {made.start: set()}
    for config in found:
        for number, _ in machine.configs[config][0]:
            for byte in {b for lo, hi, _ in machine.look(number).edges for b in (lo, hi)}:
                after = machine.step(config, byte)
                if after not in before:
                    before[after] = set()
                    found.append(after)
                before[after].add(config)
        assert len(found) < most, "the test needs a smaller set of texts"
    good = [config for config in found if machine.configs[config][1]]
    ends = set(good)
    for config in good:
        for previous in before[config] - ends:
            ends.add(previous)
            good.append(previous)
    assert 0 not in before and len(ends) == len(found)


def assert_masks_are_exact(node, vocabulary, text):
    """At each place of a text, the mask has the tokens that lead to a living configuration."""
    made = grammar.Grammar(vocabulary, Rule("test", node))
    machine, config = made.machine, made.start
    for byte in text.encode():
        mask = machine.mask(config)
        for i, token in enumerate(vocabulary.tokens):
            if token is not None:
                allowed = bool(mask[i // 32] >> i % 32 & 1)
                assert allowed == bool(machine.run(token, config)), (text, byte, token)
        config = machine.step(config, byte)
    assert machine.configs[config][1]


# ---------------------------------------------------------------- regular expressions


@pytest.mark.parametrize(
    "pattern, good, bad",
    [
        ("a|bc*", ["a", "b", "bcc"], ["", "ac", "c"]),
        ("a{2}b{1,}c{0,2}", ["aab", "aabbcc"], ["ab", "aa", "aabccc"]),
        ("a??b+?c*?", ["b", "abbc"], ["a", "c"]),
        (".", ["a", "\t", "\x85", "é", "😀"], ["\n", "\r", "\u2028", "\u2029", "ab"]),
        ("[a-c-]", ["a", "c", "-"], ["d", ","]),
        (r"[\w-.]", ["z", "-", "."], ["/", ","]),
        ("[]a", [], ["a", "]a"]),
        ("[^]", ["a", "\n", "😀"], ["", "ab"]),
        ("[^a]", ["b", "\n", "\U0010ffff", "\ue000"], ["a"]),
        (r"\d\w\D\W", ["1_a-", "09é "], ["x_a-", "1é--", "11111"]),
        (r"\d", ["7"], ["٣"]),
        (r"\s", [*"\t\n\v\f\r \xa0\u1680\u2003\u2028\u202f\u205f\u3000\ufeff"], ["\x85", "\u200b"]),
        (r"\t\n\r\f\v\0\cJ\cj\x41\u0042", ["\t\n\r\f\v\0\n\nAB"], []),
        (r"[\b]\/\.\-\u{1F600}\uD83D\uDE00", ["\b/.-😀😀"], []),
        (r"[\u0000-\uffff]", ["\0", "\uffff", "\ud7ff"], ["😀"]),
        ("(?:ab)+(c)(?<name>d)", ["abcd", "ababcd"], ["cd", "abc"]),
        ("a{b}{2}]", ["a{b}}]"], ["a{b}]", "aa]"]),
        ("{}", ["{}"], ["{"]),
        (r"\p{Lu}\p{L}\P{L}\p{gc=Nd}", ["Éß-٣"], ["éß-٣", "Éß-x"]),
        ("(a?){3}b", ["b", "aaab"], ["aaaab"]),
        ("x{1000000}", [], ["x", "x" * 999]),
    ],
)
def test_a_regular_expression_is_read_as_ecma_262_has_it(pattern, good, bad):
    accepts = matcher(pattern)
    assert [t for t in good if not accepts(t)] == []
    assert [t for t in bad if accepts(t)] == []


@pytest.mark.parametrize(
    "pattern, good, bad",
    [
        ("b", ["b", "abc", "\nb\n"], ["", "ac"]),
        (r"\S", ["x", " x\n"], [" ", ""]),
        ("^a", ["a", "ab"], ["ba", "\na"]),
        ("a$", ["a", "ba"], ["ab", "a\n"]),
        ("^a|b$", ["ax", "xb", "a"], ["xa", "bx"]),
        ("^(a|b)$", ["a", "b"], ["ab", "aa"]),
        ("(^a|b$)", ["ax", "xb"], ["xax"]),
        ("^(?:^a$)$", ["a"], ["aa", ""]),
        ("(^|,)x(,|$)", ["x", "y,x", "x,y", "y,x,y"], ["yx", "xy"]),
        ("a*^b", ["b", "bc"], ["ab"]),
        ("c$d*", ["c", "ac"], ["cd"]),
        ("^$", [""], ["a", "\n"]),
        ("(?:^a)?b", ["b", "ab", "xb"], ["a"]),
        ("(?:^a|b){2,3}$", ["ab", "bb", "xbb", "abb"], ["b", "xab", "ba"]),
        ("(?:^a|b$|c)*d", ["d", "accd", "xxd"], ["a"]),
    ],
)
def test_a_pattern_matches_anywhere_but_for_its_anchors(pattern, good, bad):
    accepts = matcher(pattern, search=True)
    assert [t for t in good if not accepts(t)] == []
    assert [t for t in bad if accepts(t)] == []


@pytest.mark.parametrize("pattern", ["a^b", "a$b", "(a^)b", "[]", "x(?:^y)+"])
def test_a_pattern_that_can_never_match_is_empty(pattern):
    assert parse_regex(pattern) is EMPTY
    assert parse_regex(pattern, search=True) is EMPTY


def random_pattern(rng, depth, anchors):
    kind = rng.random()
    if depth == 0 or kind < 0.35:
        leaves = ["a", "b", "c", ".", "[ab]", "[^a]", r"\d", r"\w", r"\s", r"\n", "é", "😀"]
        return rng.choice(leaves + ["^", "$"] * anchors)
    one = random_pattern(rng, depth - 1, anchors)
    if kind < 0.55:
        return one + random_pattern(rng, depth - 1, anchors)
    if kind < 0.75:
        return f"(?:{one}|{random_pattern(rng, depth - 1, anchors)})"
    return f"(?:{one})" + rng.choice(["*", "+", "?", "{2}", "{1,3}", "{2,}", "{0,2}", "*?"])


def for_re(pattern):
    """The pattern as Python's `re` has it: other meanings of a dot, a dollar and the classes."""
    pattern = pattern.replace("$", r"\Z").replace(".", r"[^\n\r\u2028\u2029]")
    return re.compile(pattern.replace(r"\d", "[0-9]").replace(r"\w", "[0-9A-Za-z_]"))


def test_random_patterns_with_lengths_accept_the_texts_that_re_accepts():
    rng = random.Random(6)
    contains_a = parse_regex("a", search=True)
    checked = 0
    for _ in range(300):
        pattern = random_pattern(rng, 4, rng.random() < 0.5)
        search = rng.random() < 0.5
        node = parse_regex(pattern, search=search)
        lo = rng.randrange(4)
        hi = lo + rng.randrange(4)
        raw, plain = acceptor(spell(node)), acceptor(string(0, None, [node]))
        counted = acceptor(string(lo, hi, [node]))
        two = acceptor(string(lo, None, [node, contains_a]))
        expected = for_re(pattern)
        for _ in range(20):
            text = "".join(rng.choices("aabbcc1 \né😀", k=rng.randrange(6)))
            match = bool(expected.search(text) if search else expected.fullmatch(text))
            quoted = quote(text)
            seen = raw(text), plain(quoted), counted(quoted), two(quoted)
            long = len(text) >= lo
            want = match, match, match and lo <= len(text) <= hi, match and long and "a" in text
            assert seen == want, (pattern, search, text, lo, hi)
            checked += match
    assert checked > 900


@pytest.mark.parametrize(
    "pattern, reason, at",
    [
        ("a(b", "a group without its )", 2),
        ("a)b", "a ) without its group", 2),
        ("x[a", "a class without its ]", 2),
        ("[b-a]", "a range in the wrong order", 2),
        ("a{2,1}", "counts in the wrong order", 2),
        ("*a", "nothing to repeat", 1),
        ("a+*", "nothing to repeat", 1),
        ("a{,5}", "nothing to repeat", 2),
        ("^*", "nothing to repeat", 1),
        ("a{9999999999999999999}", "a count with too many digits", 2),
        ("b(?=a)", "look-ahead is not supported", 2),
        ("b(?!a)", "look-ahead is not supported", 2),
        ("(?<=a)", "look-behind is not supported", 1),
        ("(?<!a)", "look-behind is not supported", 1),
        ("(?i)a", "a flag or an unknown group is not supported", 1),
        (r"x\b", "a word boundary is not supported", 2),
        (r"(a)\1", "a back reference is not supported", 4),
        (r"\k<n>", "a back reference is not supported", 1),
        (r"\p{Script=Greek}", r"only general categories such as \p{L} or \p{Lu} are", 1),
        (r"a\q", r"unknown escape \q", 2),
        (r"\07", r"unknown escape \0", 1),
        (r"\x4", "an escape with fewer than 2 hexadecimal digits", 3),
        (r"\u{110000}", r"\u{...} is not a code point", 1),
        (r"\ud800", "half of a surrogate pair", 1),
        ("a\\", "it ends too early", 3),
        ("(^a){9}", "an anchor that is repeated more than 8 times", 1),
        ("(^|a)" * 17, "more than 16 groups in a row with anchors in them", 1),
        ("a" * 140_000, "it is longer than 131072 characters", 1),
        ("(" * 65 + "a" + ")" * 65, "groups nested more than 64 deep", 65),
    ],
)
def test_what_is_not_supported_is_named_with_its_place(pattern, reason, at):
    with pytest.raises(SchemaError) as raised:
        parse_regex(pattern, "#/properties/a", search=True)
    message = str(raised.value)
    assert message.startswith(f"#/properties/a/pattern: {reason}")
    assert f"at character {at} of" in message


# ---------------------------------------------------------------- characters as bytes

EDGES = [0, 0x1F, 0x20, 0x7F, 0x80, 0x7FF, 0x800, 0xFFF, 0x1000, 0xD7FF, 0xE000, 0xFFFF]
EDGES = sorted({*EDGES, 1, 0x22, 0x5C, 0x81, 0x801, 0xE001, 0x10000, 0x3FFFF, 0x40000, 0x10FFFF})


def test_a_range_of_code_points_is_exactly_its_utf_8():
    texts = {code: [chr(code).encode(), quote(chr(code))[1:-1].encode()] for code in EDGES}
    for lo, hi in itertools.combinations_with_replacement(EDGES, 2):
        ranges = grammar.minus([(lo, hi)], grammar.SURROGATES)
        for json_, node in enumerate([grammar.char(ranges), grammar.char(ranges, json=True)]):
            accepts = acceptor(node)
            found = [code for code in EDGES if accepts(texts[code][json_])]
            assert found == [code for code in EDGES if lo <= code <= hi]


def test_bytes_that_are_not_utf_8_are_refused_from_the_first_wrong_one():
    bad = ["80", "c0", "c1", "e0 80", "e0 9f", "ed a0", "ed bf", "f0 80", "f0 8f", "f4 90"]
    bad += ["f5", "ff", "c3 28", "e2 28", "e2 82 28"]
    for node, head in [(spell(grammar.ALL), b""), (string(), b'"'), (string(0, 9), b'"')]:
        made = compiled(node)
        for text in map(bytes.fromhex, bad):
            good = made.machine.run(head + text[:-1], made.start)
            assert good and not made.machine.step(good, text[-1]), text


def test_a_string_takes_every_spelling_of_a_character_as_one():
    one = acceptor(string(1, 1))
    good = [r"\n", r"\"", r"\\", r"\/", r"\b", r"\f", r"\r", r"\t", r"\u0041", r"\u00e9", r"\uFfFf"]
    good += [r"\ud83d\ude00", r"\uD83D\uDE00", r"\ud7ff", r"\ue000", "a", "\x7f", "é", "😀", "'"]
    assert [t for t in good if not one(f'"{t}"')] == []
    bad = [
        r"\ud83d",
        r"\ude00",
        r"\ud83d\u0041",
        r"\ud83dx",
        r"\ude00\ud83d",
        r"\'",
        r"\x41",
        r"\a",
    ]
    bad += [r"\u12", "\n", "\0", "\x1f", '"', "\\", "", "ab", r"\n\n"]
    assert [t for t in bad if one(f'"{t}"')] == []


def test_a_pattern_asks_for_one_spelling_of_a_character():
    accepts = acceptor(string(0, None, [parse_regex('[\\n\\x01"/é]b')]))
    assert all(accepts(f'"{t}b"') for t in [r"\n", r"\u0001", r"\"", "/", "é"])
    assert not any(accepts(f'"{t}b"') for t in [r"\u000a", r"\/", r"\u00e9", r"\u0022", "\n", '"'])
    assert not accepts(r'"/\u0062"')


# ---------------------------------------------------------------- lengths and patterns

PATTERNS = ["(ab)*", "(aaa|bb)*", "a*b", "(ab){2,4}", "a{3}(bb)*", "((aa)*|(bbb)*)", "[ab]*b[ab]"]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("search", [False, True])
def test_lengths_and_a_pattern_meet_in_the_texts_that_satisfy_both(pattern, search):
    expected = for_re(pattern)
    match = expected.search if search else expected.fullmatch
    for lo, hi in [(0, 3), (3, 3), (1, 1), (2, 5), (5, 7), (6, 6), (7, 7)]:
        node = string(lo, hi, [parse_regex(pattern, search=search)])
        texts = ["".join(t) for n in range(9) for t in itertools.product("ab", repeat=n)]
        good = [t for t in texts if match(t) and lo <= len(t) <= hi]
        accepts = acceptor(node)
        assert [t for t in texts if accepts(f'"{t}"')] == good
        assert (node is EMPTY) == (not good)
        if good:
            assert_every_state_can_end(node)


@pytest.mark.parametrize("lo, hi, length", [(1999, 2000, 1999), (0, 10**9, 1), (7, None, 9)])
def test_a_length_that_a_period_excludes_is_known_without_counting(lo, hi, length):
    odd = parse_regex("a(bb)*")
    accepts = acceptor(string(lo, hi, [odd]))
    assert accepts('"a' + "b" * (length - 1) + '"')
    assert not accepts('"a' + "b" * length + '"')
    assert string(10**6, 10**6, [odd]) is EMPTY


def test_a_class_with_counts_meets_the_length_by_its_counts():
    assert string(2, 9, [parse_regex("[a-z]{4,20}")]) is string(4, 9, [parse_regex("[a-z]{1,9}")])
    assert string(0, 3, [parse_regex("[a-z]{4,20}")]) is EMPTY
    assert string(5, 3) is EMPTY


def test_two_patterns_that_exclude_each_other_leave_nothing():
    both = [parse_regex("^a", search=True), parse_regex("^b", search=True)]
    assert string(0, None, both) is EMPTY
    assert string(0, None, [both[0], parse_regex("b$", search=True)]) is not EMPTY


def test_a_pattern_that_matches_everything_leaves_the_plain_string():
    for pattern in ["", "a*", "^", r"^[\s\S]*$", ".*", "(?:)"]:
        assert string(2, 5, [parse_regex(pattern, search=True)]) is string(2, 5)


def test_what_follows_a_match_is_the_rest_of_a_plain_string():
    """All strings with a pattern and a length then share their walks."""
    made = compiled(string(0, 50, [parse_regex("x", search=True)]))
    plain = compiled(string(0, 49))
    after = made.machine.run(b'"x', made.start)
    assert after == plain.machine.run(b'"', plain.start)


@pytest.mark.parametrize("pattern", ["(ab)*", "a*b?", "(..)*", "(aaa|bb)*c"])
def test_masks_of_counted_patterns_are_exact_far_from_the_limit_and_at_it(pattern, monkeypatch):
    monkeypatch.setattr(grammar, "FEW", 0)  # as if the vocabulary were large
    monkeypatch.setattr(grammar, "NARROW", 0)
    pieces = ["a", "b", "ab", "ba", "aa", "bb", "aaa", "bab", "abab", "c", "cc"]
    tokens = [*pieces, '"', 'b"', 'ab"', 'aab"', 'c"', '",', "é", "éa"]
    vocabulary = grammar.Vocabulary([*(t.encode() for t in tokens), b"\xc3", b"\xa9", None], [21])
    text = {
        "(ab)*": "ab" * 15,
        "a*b?": "a" * 30,
        "(..)*": "éb" * 15,
        "(aaa|bb)*c": "aaabb" * 6 + "c",
    }
    size = len(text[pattern])
    for lo, hi in [(0, size), (size, size), (size - 4, size + 1), (size, None), (3, 10**5)]:
        node = string(lo, hi, [parse_regex(f"^(?:{pattern})$", search=True)])
        assert_masks_are_exact(node, vocabulary, f'"{text[pattern]}"')


def test_a_token_that_begins_before_a_counted_pattern_may_reach_far_into_it(monkeypatch):
    """How far tokens reach into a state was once asked of those only that begin there."""
    monkeypatch.setattr(grammar, "FEW", 0)
    monkeypatch.setattr(grammar, "NARROW", 0)
    tokens = [b"x", b'"', b"a", b"ab", b'x"aaaaaaaa', b'x"aaa"', b'x"', b'a"y', b"y", None]
    vocabulary = grammar.Vocabulary(tokens, [9])
    for hi in range(2, 8):
        inner = Rule("inner", string(1, hi, [parse_regex("^a*b?a*$", search=True)]))
        node = grammar.seq(grammar.literal("x"), grammar.Call(inner), grammar.literal("y"))
        assert_masks_are_exact(node, vocabulary, 'x"' + "a" * hi + '"y')


@pytest.mark.parametrize(
    "pattern, reason",
    [
        ("a.{20}", "more than 500 states"),
        ("^.{0,600}x$", "more than 500 states"),
        ("^(a{99}|b{98}|c{97})*$", "too large a table"),
    ],
)
def test_a_pattern_with_a_length_that_grows_too_large_is_refused(pattern, reason, monkeypatch):
    monkeypatch.setattr(grammar, "DFA_STATES", 500)
    monkeypatch.setattr(grammar, "CELLS", 1 << 16)
    with pytest.raises(SchemaError, match=reason):
        string(1, 50, [parse_regex(pattern, search=True)])


def test_a_pattern_with_a_length_that_takes_too_long_is_refused(monkeypatch):
    monkeypatch.setattr(grammar, "COMPILE_S", 0.02)
    with pytest.raises(SchemaError, match="more than 0.02 s"):
        string(1, 50, [parse_regex("(((a{1,9}){1,9}){1,9}){1,9}b")])


# ---------------------------------------------------------------- keys


def test_other_keys_are_all_but_the_names_in_one_spelling():
    ((which, node),) = keys(["a", "ab", "", 'b"c', "é"])
    accepts = acceptor(node)
    assert which == frozenset()
    good = ["b", "abc", "ac", 'b"d', "ac\n", "c\x1f", "É", "éa", "/", " ", "c\\"]
    assert [t for t in good if not accepts(quote(t))] == []
    bad = [quote(t) for t in ["a", "ab", "", 'b"c', "é"]]
    bad += [r'"\u0061"', r'"\u00e9"', r'"c\u001F"', r'"\u000a"', r'"\/"', '"c']
    assert [t for t in bad if accepts(t)] == []


@pytest.mark.parametrize("patterns", [[], ["z"]])
def test_after_a_name_neither_its_quote_nor_a_backslash_follows(patterns):
    """xgrammar 831: a name in the wrong place went on with an escaped quote."""
    groups = keys(["name", 'name"s', "n"], [parse_regex(p, search=True) for p in patterns])
    made = compiled(grammar.alt(*(node for _, node in groups)))
    machine = made.machine
    after = machine.run(b'"name', made.start)
    assert not machine.step(after, ord('"')) and not machine.step(after, ord("\\"))
    assert machine.step(after, ord("s")) and machine.step(after, ord(" "))
    assert machine.step(machine.run(b'"nam', made.start), ord("\\"))


@pytest.mark.parametrize("text", ["nam", "names", "na\\n", "x", "nz"])
def test_masks_of_other_keys_are_exact(text, monkeypatch):
    """They are copied from those of any key, but for the places where a name is near."""
    monkeypatch.setattr(grammar, "FEW", 0)
    monkeypatch.setattr(grammar, "NARROW", 0)
    tokens = ["n", "na", "nam", "name", "names", 'name"', 'nam"', 'name":', "\\", "\\n", "e\\", '"']
    tokens += ['":', 'e"', 'e":', "s", "x", "z", ":", 'n"', 'n":', 'x":x', "é", "x\\", 'id"', "id"]
    vocabulary = grammar.Vocabulary([*(t.encode() for t in tokens), None], [len(tokens)])
    ((_, node),) = keys(["name", "n", "id"])
    rule = Rule("key", node)
    node = grammar.seq(grammar.Call(rule), grammar.literal(":x"))
    assert_masks_are_exact(node, vocabulary, f'"{text}":x')


def test_keys_come_by_the_set_of_patterns_that_they_match():
    names, patterns = ["ab", "x1"], ["^a", "1"]
    groups = keys(names, [parse_regex(p, search=True) for p in patterns])
    assert {which for which, _ in groups} == {frozenset(s) for s in [(), (0,), (1,), (0, 1)]}
    groups = [(which, acceptor(node)) for which, node in groups]
    for text in ("".join(t) for n in range(5) for t in itertools.product("abx1é", repeat=n)):
        matched = {i for i, pattern in enumerate(patterns) if re.search(pattern, text)}
        for which, accepts in groups:
            assert accepts(quote(text)) == (text not in names and which == matched)


def test_keys_that_the_names_use_up_are_left_out():
    groups = keys(["a", "b"], [parse_regex("^[ab]$", search=True)])
    assert [which for which, _ in groups] == [frozenset()]
    assert not acceptor(groups[0][1])('"a"')
    assert_every_state_can_end(groups[0][1])


# ---------------------------------------------------------------- GBNF

SUMS = r"""
# sums of numbers, a line each
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws   # a name
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4})
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
LIST = r"""
root ::= item+
item ::= "- " [^\r\n\x0b\x0c\x85\u2028\u2029]+ "\n"
"""
CHESS = r"""
root    ::= "1. " move " " move "\n" ([1-9] [0-9]? ". " move " " move "\n")+
move    ::= (pawn | nonpawn | castle) [+#]?
nonpawn ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]
pawn    ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBKQR])?
castle  ::= "O-O" "-O"?
"""


@pytest.mark.parametrize(
    "text, good, bad",
    [
        (SUMS, ["a=1\n", "a +(2*b_1)=3\nx= y\n"], ["", "a=", "a=1", "A=1\n", "a==1\n"]),
        (
            JSON,
            ["{}", '{"a": [1, -2.5e+3, {"b": null}], "c": "é\\u00e9\\n"}', '{\n  "a":1}\n'],
            ["[]", '{"a"}', '{"a":01}', '{"a":"\n"}', '{"a":"\\x"}', '{"a":1,}', '{"a":\n\n1}'],
        ),
        (LIST, ["- a\n", "- a\n- é😀\n"], ["- \n", "- a", "a\n", "- a\u2028b\n"]),
        (CHESS, ["1. e4 e5\n2. Nf3 Nc6\n", "1. exd5 O-O\n23. O-O-O+ a8=Q#\n"], ["1. e4 e5\n"]),
        ('root ::= "a"\n  | "b"\n\n  | c\nc ::= "d" |\n "e"', ["a", "b", "d", "e"], ["", "ab"]),
        ("root ::= a-b a_1\na-b ::= [a]\na_1 ::= .", ["ax", "a😀", "a\n"], ["a", "bx"]),
        (r'root ::= "\x41\u00e9\U0001F600\t\\\"" [\]\[^-]', ['Aé😀\t\\"' + c for c in "][^-"], []),
        ('root ::= ("a" "b")* {2} "c" ?', ["", "abab", "ababc"], ["a", "aba"]),
        ('root ::= "a"{ 2, 3 } # b', ["aa", "aaa"], ["a", "aaaa"]),
        ("root ::= [😀-🙏]+", ["😀", "🙏😅"], ["🚀", "x"]),
        ('root ::= "" | "a"', ["", "a"], ["aa"]),
    ],
)
def test_a_gbnf_grammar_accepts_its_texts(text, good, bad):
    accepts = grammar.compile(BYTES, grammar=text).accepts
    assert [t for t in good if not accepts(t)] == []
    assert [t for t in bad if accepts(t)] == []


@pytest.mark.parametrize(
    "left, plain",
    [
        ('root ::= root "a" | "b"', 'root ::= "b" "a"*'),
        ('root ::= root "+" root | root "!" | "n" | "m"', 'root ::= n ("+" n | "!")*\nn ::= [nm]'),
        ('root ::= root root | "n"', 'root ::= "n"+'),
        ('root ::= "n" | root | root "+" "n" ', 'root ::= "n" ("+n")*'),
        ('root ::= (root "+") "n" | "m" | root "!" | ""', 'root ::= "m"? ("+n" | "!")*'),
    ],
)
def test_a_rule_that_begins_with_itself_is_a_repetition(left, plain):
    """llama.cpp 6492, xgrammar 126: such rules crashed or hung."""
    one = grammar.compile(BYTES, grammar=left).accepts
    other = grammar.compile(BYTES, grammar=plain).accepts
    for text in ("".join(t) for n in range(6) for t in itertools.product("nm+!ab", repeat=n)):
        assert one(text) == other(text), text
    assert one("n" * 3 + "+n" * 500) == other("n" * 3 + "+n" * 500)


@pytest.mark.parametrize(
    "text, line, column, reason",
    [
        ('a ::= "b"', 1, 10, "there is no rule root"),
        ("root ::= [a]\n  b", 2, 3, "there is no rule b"),
        ('root ::= "a"\nroot ::= "b"', 2, 1, "a second rule root"),
        ('root = "a"', 1, 1, "expected a rule: name ::= ..."),
        ('root ::= "a")', 1, 13, "expected a rule: name ::= ..."),
        ('root ::= ("a"', 1, 10, "a group without its )"),
        ('root ::=\n  "a', 2, 3, 'a text without its "'),
        ("root ::= [a", 1, 10, "a class without its ]"),
        ("root ::= [b-a]", 1, 11, "a range in the wrong order"),
        ("root ::= +", 1, 10, "unexpected +"),
        ('root ::= "a"{x}', 1, 13, "unexpected {"),
        ('root ::= "a"{3,2}', 1, 13, "counts in the wrong order"),
        (r'root ::= "\q"', 1, 11, r"unknown escape \q"),
        (r'root ::= "\ud800"', 1, 10, "half of a surrogate pair"),
        (r"root ::= [\U00110000]", 1, 11, "not a code point"),
        ("root ::= <think>", 1, 10, "tokens are not supported"),
        ("#" * 140_000, 1, 1, "it is longer than 131072 characters"),
        ("root ::= " + "(" * 65, 1, 74, "groups nested more than 64 deep"),
    ],
)
def test_a_gbnf_grammar_that_is_wrong_is_refused_with_its_place(text, line, column, reason):
    with pytest.raises(SchemaError) as raised:
        grammar.compile(BYTES, grammar=text)
    assert str(raised.value).startswith(f"grammar line {line}, column {column}: {reason}")


@pytest.mark.parametrize(
    "text", ['root ::= a\na ::= b "x"\nb ::= a "y" | "z"', 'root ::= "a"? root "b" | "c"']
)
def test_left_recursion_through_other_rules_is_refused(text):
    with pytest.raises(SchemaError, match="calls itself before anything is read"):
        grammar.compile(BYTES, grammar=text)


# ---------------------------------------------------------------- the door


def test_a_choice_is_one_of_its_texts():
    accepts = grammar.compile(BYTES, choice=["yes", "no", "né", "no"]).accepts
    assert all(map(accepts, ["yes", "no", "né"]))
    assert not any(map(accepts, ["", "n", "noo", "yesno"]))


def test_a_long_choice_is_read_beginning_by_beginning():
    words = [f"item-{n}" for n in range(0, 3000, 3)]
    made = grammar.compile(grammar.Vocabulary(BYTES.tokens, [256]), choice=words)
    accepted = [n for n in range(3000) if made.accepts(f"item-{n}")]
    assert accepted == list(range(0, 3000, 3))
    assert max(len(state.rests) for state in made.machine.states) == 1


def test_a_choice_of_beginnings_of_each_other_is_read_to_any_depth():
    accepts = grammar.compile(BYTES, choice=["a" * n for n in range(0, 300, 2)]).accepts
    assert [n for n in range(302) if accepts("a" * n)] == list(range(0, 300, 2))


@pytest.mark.parametrize("choice", [[], "yes", [1], ["\ud800"]])
def test_a_choice_that_is_no_list_of_texts_is_refused(choice):
    with pytest.raises(SchemaError, match="choice: "):
        grammar.compile(BYTES, choice=choice)


@pytest.mark.parametrize("given", [{}, {"regex": "a", "choice": ["a"]}])
def test_one_grammar_is_given(given):
    with pytest.raises(ValueError, match=f"is needed, not {len(given)}"):
        grammar.compile(BYTES, **given)


@pytest.mark.parametrize("given", [{"regex": 5}, {"grammar": 5}])
def test_a_pattern_or_grammar_that_is_no_text_is_refused(given):
    with pytest.raises(SchemaError, match="5 is not a string"):
        grammar.compile(BYTES, **given)


def test_a_regex_must_match_the_whole_text():
    accepts = grammar.compile(BYTES, regex="a|b+").accepts
    assert accepts("a") and accepts("bb") and not accepts("ab") and not accepts("xa")
    with pytest.raises(SchemaError, match="regex: a group without its"):
        grammar.compile(BYTES, regex="(")


def test_a_rule_with_too_many_readings_of_a_text_stops(monkeypatch):
    monkeypatch.setattr(grammar, "MEANINGS", 1000)
    made = grammar.compile(BYTES, regex="((((((a{1,9}){1,9}){1,9}){1,9}){1,9}){1,9}){1,9}")
    with pytest.raises(SchemaError, match="meanings at once"):
        made.accepts("a" * 60)


def test_a_state_with_too_many_ways_on_stops():
    """Hundreds of parts that may be left out, each: a mask once took more than 12 s."""
    made = grammar.compile(BYTES, regex="[a-z]?" * 2000)
    with pytest.raises(SchemaError, match="more than 131072 ways"):
        made.accepts("a")


def test_a_mask_has_a_time_limit(monkeypatch):
    matcher = grammar.compile(BYTES, regex="a").matcher()
    monkeypatch.setattr(grammar, "MASK_S", -1.0)
    with pytest.raises(SchemaError, match="to find a mask"):
        matcher.mask()
    monkeypatch.undo()
    assert matcher.mask()[97 // 32] == 1 << 97 % 32, "nothing wrong was kept"
    assert gc.isenabled()


def test_a_mask_does_not_wait_for_garbage_to_be_collected(monkeypatch):
    """Millions of states of old grammars once took their 2 seconds from a mask of a new one."""
    matcher, collects = grammar.compile(BYTES, regex="a{2}x").matcher(), []

    def parts(*arguments):
        collects.append(gc.isenabled())
        return [BYTES.machine.none]

    monkeypatch.setattr(grammar.Machine, "parts", parts)
    BYTES.machine.masks.pop(matcher.history[-1], None)
    matcher.mask()
    BYTES.machine.masks.pop(matcher.history[-1])
    assert collects == [False] and gc.isenabled()


def test_a_mask_is_read_only():
    """A caller that wrote into one once changed it for all others."""
    matcher = grammar.compile(BYTES, regex="ab").matcher()
    with pytest.raises(ValueError, match="read-only"):
        matcher.mask()[0] = -1


@pytest.mark.parametrize(
    "tokens, stops, message",
    [
        (["a", "b"], [0], "token 0 is 'a', neither bytes nor None"),
        ([b"a", 5], [0], "token 1 is 5, neither bytes nor None"),
        ([b"a", None], [2], "stop id 2 is none of the 2 ids"),
        ([b"a", None], [-1], "stop id -1 is none of the 2 ids"),
        ([b"a", None], ["</s>"], "stop id '</s>' is none of the 2 ids"),
    ],
)
def test_what_is_no_vocabulary_is_refused_by_its_value(tokens, stops, message):
    with pytest.raises(ValueError, match=message):
        grammar.Vocabulary(tokens, stops)


@pytest.mark.parametrize("stop", [-1, 257])
def test_a_stop_id_of_a_request_that_does_not_exist_is_refused(stop):
    """-1 once meant the last id of the vocabulary."""
    with pytest.raises(ValueError, match=f"stop id {stop} is none of the 257 ids"):
        grammar.compile(BYTES, regex="a").matcher([stop])


def test_half_of_a_surrogate_pair_is_in_no_text():
    assert not grammar.compile(BYTES, regex=".*").accepts("\ud800")


@pytest.mark.parametrize("given", [5, "ab", {"a": 1}, [], (c for c in "ab")])
def test_a_choice_that_is_no_list_is_refused(given):
    with pytest.raises(SchemaError, match="choice: a list of texts is needed, not"):
        grammar.compile(BYTES, choice=given)


def test_a_choice_of_something_else_is_refused_by_its_value():
    with pytest.raises(SchemaError, match="choice: 1 is not a string"):
        grammar.compile(BYTES, choice=["a", 1])


def test_a_length_beside_names_takes_no_surrogates():
    """Half of a pair, as three bytes, once passed as a character of a string with a length."""
    made = grammar.compile(BYTES, json_schema={"not": {"enum": ["a"]}, "minLength": 1})
    assert made.accepts('"é"') and not made.accepts('"a"') and not made.accepts('""')
    assert not made.accepts(b'"\xed\xa0\x80"')


def test_a_counted_part_that_may_be_empty_is_counted_from_0(monkeypatch):
    """A mask once asked for as many of them as the count, though none need be read."""
    monkeypatch.setattr(grammar, "FEW", 0)
    monkeypatch.setattr(grammar, "NARROW", 0)
    vocabulary = grammar.Vocabulary([b"a", b"b", b"ab", b"bb", None], [4])
    for pattern in ["(b?){2,3}a", "(b?){2}a", "(b*){2,}a"]:
        assert_masks_are_exact(spell(parse_regex(pattern)), vocabulary, "bba")
        assert_masks_are_exact(spell(parse_regex(pattern)), vocabulary, "a")
