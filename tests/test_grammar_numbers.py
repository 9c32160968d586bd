"""Numbers of a grammar: bounds and multiples, against exact fractions."""

import json
import math
import random
import re
from decimal import Decimal
from fractions import Fraction as F

import pytest

from grammar import EMPTY, Grammar, Rule, SchemaError, Vocabulary, number

BYTES = Vocabulary([bytes([i]) for i in range(256)], [])
LETTERS = b"0123456789-+.eE"
DECIMAL = r"-?(?:0|[1-9][0-9]{0,63})(?:\.[0-9]{1,20})?"
POWER = r"[eE]([+-]?[0-9]{1,3})"
FREE = re.compile(f"{DECIMAL}(?:{POWER})?")
BOUND = re.compile(rf"{DECIMAL}|-?[1-9](?:\.[0-9]{{1,20}})?{POWER}")
INTEGER = re.compile(r"-?(?:0|[1-9][0-9]{0,63})(?:\.0)?()")


def grammar(**options) -> Grammar:
    return Grammar(BYTES, Rule("number", number(**options)))


def taken(texts: str, **options) -> list[str]:
    """Those of some texts that are numbers of the grammar."""
    g = grammar(**options)
    return [text for text in texts.split() if g.accepts(text)]


def count_states(g: Grammar, most: int = 100_000) -> tuple[int, int]:
    """How many configurations there are, and from how many of them there is no way to an end."""
    before: dict[int, list[int]] = {g.start: []}
    todo = [g.start]
    while todo:
        config = todo.pop()
        for byte in LETTERS:
            after = g.machine.step(config, byte)
            if after and after not in before:
                before[after] = []
                todo.append(after)
            if after:
                before[after].append(config)
        assert len(before) < most
    todo = [config for config in before if g.machine.configs[config][1]]
    alive = set(todo)
    while todo:
        for config in before[todo.pop()]:
            if config not in alive:
                alive.add(config)
                todo.append(config)
    return len(before), len(before.keys() - alive)


def is_inside(text, lo=None, hi=None, lo_open=False, hi_open=False, integer=False, multiple=None):
    """What `number` says of a text, of the text alone."""
    free = lo is None and hi is None and multiple is None
    found = (INTEGER if integer else FREE if free else BOUND).fullmatch(text)
    if not found:
        return False
    if found[1]:
        power, large = int(found[1]), math.isinf(float(text))
        if free:
            return -324 <= power <= 308
        if multiple is not None or large or not (-324 <= power <= -5 or 16 <= power <= 308):
            return False
        low, high = (lo, hi) if text[0] != "-" else (hi and -hi, lo and -lo)
        if low is not None and low > 1 or high is not None and high < 10:
            return False
    value = F(text)
    read = (lambda x: x) if integer else (lambda x: F(float(x)))  # as double precision has it
    if lo is not None and (value < lo or lo_open and read(value) <= read(lo)):
        return False
    if hi is not None and (value > hi or hi_open and read(value) >= read(hi)):
        return False
    if integer and value.denominator != 1:
        return False
    return multiple is None or value % multiple == 0


def random_bound(rng: random.Random) -> F:
    digits = rng.choice([1, 1, 2, 3, 6, 17])
    places = rng.choice([0, 0, 0, 1, 2, 5, 12])
    return F(rng.randint(-(10**digits), 10**digits), 10**places)


def random_options(rng: random.Random) -> dict:
    options = {}
    if rng.random() < 0.8:
        options["lo"] = random_bound(rng)
    if rng.random() < 0.8:
        options["hi"] = random_bound(rng)
        if "lo" in options and rng.random() < 0.5:  # near each other
            options["hi"] = options["lo"] + abs(random_bound(rng)) / 10 ** rng.randint(0, 7)
        if options["hi"] < options.get("lo", options["hi"]):
            options["lo"], options["hi"] = options["hi"], options["lo"]
    options["lo_open"], options["hi_open"] = rng.random() < 0.3, rng.random() < 0.3
    options["integer"] = rng.random() < 0.4
    if rng.random() < 0.4:
        many = [F(2), F(3), F(7), F(10), F(60), F(1, 2), F(1, 100), F(5, 2), F(3, 10), F(1000)]
        options["multiple"] = rng.choice(many)
    return options


def plain(value: F) -> str:
    """A decimal fraction without an exponent."""
    places = next(n for n in range(400) if 10**n % value.denominator == 0)
    return f"{Decimal(int(value * 10**places)).scaleb(-places):f}"


def random_text(rng: random.Random, options: dict) -> str:
    """A number near a bound or a multiple, in one of its spellings, or something like one."""
    near = rng.choice([options.get("lo"), options.get("hi"), random_bound(rng)]) or F(0)
    near += rng.choice([-2, -1, -1, 0, 0, 1, 1, 2]) * F(
        1, 10 ** rng.choice([0, 0, 1, 2, 6, 12, 19])
    )
    multiple = options.get("multiple")
    if multiple and rng.random() < 0.7:
        near = near // multiple * multiple
    elif options["integer"] and rng.random() < 0.8:
        near = F(near // 1)
    text = plain(near)
    if rng.random() < 0.3:
        text += (
            rng.choice([".0", ".00", "0", "e0", "E+2"]) if "." not in text else rng.choice("0159")
        )
    if rng.random() < 0.1:
        text = rng.choice([f"{float(near)!r}", f"{Decimal(text):.3e}", "-" + text, "-0.0", "0"])
    if rng.random() < 0.2:
        at = rng.randrange(len(text))
        text = text[:at] + rng.choice(["", *"0123456789-.e"]) + text[at + rng.randint(0, 1) :]
    return text


def differences(seed: int, ranges: int, texts: int) -> tuple[int, int, int]:
    """Texts that are taken, and refused, and how many grammars accept nothing."""
    rng = random.Random(seed)
    counts, empty = [0, 0], 0
    for _ in range(ranges):
        options = random_options(rng)
        node = number(**options)
        empty += node is EMPTY
        g = None if node is EMPTY else Grammar(BYTES, Rule("number", node))
        for _ in range(texts):
            text = random_text(rng, options)
            expected = is_inside(text, **options)
            found = g is not None and g.accepts(text)
            assert found == expected, (options, text)
            counts[expected] += 1
    return counts[1], counts[0], empty


# ------------------------------------------------------------------ by hand


def test_a_number_without_bounds_is_any_json_number():
    texts = (
        "0 -0 7 -12 0.5 -0.0 4.50 12e3 1E+16 1e-07 1.5e-5 01 -01 +1 1. .5 - 1e 1e+ 1e1234 --1 1.e5"
    )
    assert taken(texts) == "0 -0 7 -12 0.5 -0.0 4.50 12e3 1E+16 1e-07 1.5e-5".split()


def test_an_integer_may_end_in_one_zero_after_the_point():
    texts = "0 -0 -0.0 12 1.0 1.00 1.5 1e0 01 -7 -"
    assert taken(texts, integer=True) == "0 -0 -0.0 12 1.0 -7".split()


def test_digits_end():
    g, integers = grammar(), grammar(integer=True)
    assert g.accepts("9" * 64) and not g.accepts("9" * 65)
    assert integers.accepts("9" * 64) and not integers.accepts("9" * 65)
    assert g.accepts("0." + "3" * 20) and not g.accepts("0." + "3" * 21)
    assert grammar(lo=0).accepts("9" * 64) and not grammar(lo=0).accepts("9" * 65)
    assert not grammar(lo=0).accepts("0." + "3" * 21)


def test_a_bound_is_inside_unless_it_is_open():
    texts = "1 1.0 5 5.000 0.99 5.001 3 5.7 0 -3"
    assert taken(texts, lo=1, hi=5) == "1 1.0 5 5.000 3".split()
    assert taken(texts, lo=1, hi=5, lo_open=True) == "5 5.000 3".split()
    assert taken(texts, lo=1, hi=5, hi_open=True) == "1 1.0 3".split()
    whole = dict(lo=-2, hi=3, integer=True)
    assert taken("-3 -2 -1 0 2 3 4", lo_open=True, **whole) == "-1 0 2 3".split()
    assert taken("-3 -2 -1 0 2 3 4", hi_open=True, **whole) == "-2 -1 0 2".split()
    assert taken("1 2 3", lo=1, lo_open=True, integer=True) == ["2", "3"]


def test_from_1_7_to_3():
    texts = "1 1. 1.6 1.69 1.7 1.70 2 2.95 3 3. 3.0 3.1 17 30"
    assert taken(texts, lo=F("1.7"), hi=3) == "1.7 1.70 2 2.95 3 3.0".split()


def test_above_an_open_0_small_numbers_are_inside():
    assert taken("0 0.0 -0 0.1 0.00001 1e-07 5e-324 7", lo=0, lo_open=True) == (
        "0.1 0.00001 1e-07 5e-324 7".split()
    )


def test_the_zeros_with_a_sign_equal_0():
    texts = "0 -0 0.0 -0.0 -0.00 -0.1 0.1 -1"
    assert taken(texts, lo=0) == "0 -0 0.0 -0.0 -0.00 0.1".split()
    assert taken(texts, hi=0) == "0 -0 0.0 -0.0 -0.00 -0.1 -1".split()
    assert taken(texts, hi=0, hi_open=True) == "-0.1 -1".split()


def test_negative_bounds_are_read_from_the_other_side():
    texts = "-5 -5.0 -5.01 -4.99 -6 -4 -50 -0 5 0"
    assert taken(texts, lo=-5, hi=-2) == "-5 -5.0 -4.99 -4".split()
    assert taken(texts, lo=-5, integer=True) == "-5 -5.0 -4 -0 5 0".split()
    assert taken("-4 -4.01 4.5 4.50 4.51 -0.0", lo=-4, hi=F("4.5")) == "-4 4.5 4.50 -0.0".split()


def test_no_zero_leads_beside_a_bound():
    assert taken("3 03 30 01 12 012 00 -03", lo=3, integer=True) == "3 30 12".split()


def test_a_prefix_of_a_number_inside_is_no_number_inside():
    assert taken("1 12 123 1234 12.5 99 100 999", lo=100, hi=999) == "123 100 999".split()


def test_tiny_ranges_and_bounds_of_many_digits():
    tiny = dict(lo=F("0.1"), hi=F("0.10000001"), lo_open=True, hi_open=True)
    assert taken("0.1 0.10 0.10000001 0.100000005 0.1000000001 0.11", **tiny) == (
        "0.100000005 0.1000000001".split()
    )
    assert taken("1e-300 1.5e-300 2e-300 9e-301 11", lo=F(1, 10**300), hi=10) == (
        "1e-300 1.5e-300 2e-300".split()
    )
    assert grammar(lo=F(1, 10**300)).accepts("0." + "0" * 299 + "1")
    wide = grammar(hi=10**308)
    assert wide.accepts("1e308") and not wide.accepts("1.1e308") and wide.accepts("-1.1e308")
    long = grammar(lo=10**100, integer=True)
    assert long.accepts(str(10**100)) and not long.accepts(str(10**100 - 1))


def test_an_exponent_beside_a_bound_is_one_that_json_dumps_writes():
    small = "1e-07 1.5e-07 9.99E-005 1e-4 1e-04 10e-08 0.1e-07 5e-1 0e-7 1e-07.0 -1e-07 1e-7 1.0e-7"
    assert taken(small, lo=0, hi=10) == "1e-07 1.5e-07 9.99E-005 1e-7 1.0e-7".split()
    assert taken("1e15 1e16 1e+16 1.5e+308 1.8e308 1e-07 1e-5 9e-5", lo=F(2, 10**5)) == (
        "1e16 1e+16 1.5e+308 9e-5".split()
    )


def test_no_digit_comes_first_that_only_an_exponent_could_bring_inside():
    assert taken("7e-05 1e-05 0.00001 0.7 1", lo=0, hi=1) == "0.00001 0.7 1".split()
    assert taken("1e16 5", lo=5) == ["5"]
    m = Grammar(BYTES, Rule("number", number(lo=0, hi=1))).matcher()
    assert not m.accept(ord("7")) and m.accept(ord("1")) and m.accept(ord("."))


def test_every_float_of_json_dumps_is_a_number_with_and_without_bounds():
    rng = random.Random(5)
    free, above, below = grammar(), grammar(lo=0), grammar(hi=0)
    for _ in range(300):
        value = rng.uniform(1, 10) * 10.0 ** rng.randint(-323, 307)
        value = rng.choice([value, rng.random(), rng.random() / 1000, rng.uniform(-1e17, 1e17)])
        text = json.dumps(value)
        assert free.accepts(text) and (above if value >= 0 else below).accepts(text), text
        assert not (below if value >= 0 else above).accepts(text), text


def test_what_reads_as_an_open_bound_in_double_precision_is_outside():
    texts = "0.99999999999999999 0.9999999999999999 0.30000000000000001 0.30000000000000004 1.0"
    options = dict(lo=F("0.3"), hi=1, lo_open=True, hi_open=True)
    assert taken(texts, **options) == "0.9999999999999999 0.30000000000000004".split()


def test_multiples_of_an_integer():
    assert (
        taken("0 -7 7 14 15 21.0 700 71 1e1", integer=True, multiple=7)
        == "0 -7 7 14 21.0 700".split()
    )
    assert (
        taken("10 21 30 33 12 27", integer=True, multiple=3, lo=11, hi=31) == "21 30 12 27".split()
    )
    sixty = grammar(integer=True, multiple=60, lo=150)
    assert [n for n in range(2000) if sixty.accepts(str(n))] == list(range(180, 2000, 60))
    thousand = grammar(multiple=1000)
    assert [n for n in range(0, 20_000, 50) if thousand.accepts(str(n))] == list(
        range(0, 20_000, 1000)
    )


def test_multiples_of_a_fraction():
    cents = dict(multiple=F("0.01"))
    assert (
        taken("99.99 99.995 99.990 0.01 -3.5 4 1e2", **cents) == "99.99 99.990 0.01 -3.5 4".split()
    )
    assert taken("2.5 5 7.5 7.50 2.4 2 12.5 10 102.5", multiple=F("2.5")) == (
        "2.5 5 7.5 7.50 12.5 10 102.5".split()
    )
    assert taken("1 2 3 1.5 4.5 -6 6.0", integer=True, multiple=F("1.5")) == "3 -6 6.0".split()
    assert taken("1 2 -3 0.5", integer=True, multiple=F("0.5")) == "1 2 -3".split()
    assert (
        taken("1.2 0.3 0.4 0.9 0.90 1", multiple=F("0.3"), lo=F("0.5"), hi=1) == "0.9 0.90".split()
    )


def test_a_multiple_of_more_digits_than_the_cap_can_be_reached():
    assert grammar(integer=True, multiple=10**70).accepts("3" + "0" * 70)


@pytest.mark.parametrize(
    "options",
    [
        dict(lo=3, hi=5, multiple=7),
        dict(lo=0, hi=1, lo_open=True, hi_open=True, integer=True),
        dict(lo=2, hi=1),
        dict(lo=1, hi=1, hi_open=True),
        dict(lo=F("0.2"), hi=F("0.8"), integer=True),
        dict(lo=F("0.011"), hi=F("0.019"), multiple=F("0.01")),
        dict(hi=-3, lo=-5, integer=True, multiple=7),
    ],
)
def test_a_range_without_numbers_is_empty(options):
    assert number(**options) is EMPTY


def test_a_bound_of_too_many_digits_is_refused_by_its_path():
    with pytest.raises(SchemaError, match="#/a: a number of more than 1000 digits as a bound"):
        number(lo=10**1000, path="#/a")
    with pytest.raises(SchemaError):
        number(multiple=F(1, 10**1000))


# ------------------------------------------------------------------ against fractions


def test_random_numbers_are_taken_exactly_if_their_fractions_are_inside():
    inside, outside, empty = differences(seed=1, ranges=250, texts=100)
    assert inside > 5000 and outside > 5000 and empty > 5


@pytest.mark.slow
def test_many_random_numbers_are_taken_exactly_if_their_fractions_are_inside():
    for seed in range(2, 12):
        differences(seed, ranges=400, texts=100)


# ------------------------------------------------------------------ by property


def test_every_state_is_on_the_way_to_an_end():
    rng = random.Random(3)
    for _ in range(40):
        options = random_options(rng)
        if number(**options) is not EMPTY:
            assert count_states(grammar(**options))[1] == 0, options


@pytest.mark.parametrize(
    "options, most",
    [
        (dict(lo=0, hi=100, integer=True), 10),
        (dict(lo=1990, hi=2030, integer=True), 12),
        (dict(lo=0, integer=True), 75),
        (dict(lo=0, hi=100), 85),
        (dict(multiple=1000, integer=True), 300),
        (dict(multiple=F("0.01")), 100),
    ],
)
def test_equal_futures_are_one_state(options, most):
    states, dead = count_states(grammar(**options))
    assert states <= most and dead == 0


@pytest.mark.parametrize("options", [dict(lo=0), dict(lo=17, integer=True), dict(multiple=7)])
def test_a_state_does_not_keep_each_length_apart(options):
    g = Grammar(Vocabulary(BYTES.tokens, []), Rule("number", number(**options)))
    count_states(g)
    assert max(len(state.rests) for state in g.machine.states[1:]) <= 8
