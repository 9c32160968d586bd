"""Structured output: which tokens may come next, so that the text stays inside a grammar.

The idea      A grammar (a JSON Schema, a regular expression, a list of choices, GBNF) is compiled
              to rules over bytes. A rule is read by a finite automaton whose states are made when
              a text first reaches them; where a rule calls another (an array calls its items) the
              place to come back to goes on a stack. Before a token is sampled, the vocabulary, a
              trie, is walked by the automaton: a token whose last byte is still inside is allowed,
              all others are masked. What one walk found is kept, so a mask is nearly always one
              look-up in a dictionary: real texts meet few states. That is the first third of the
              file; the rest makes rules out of JSON Schema, strings, numbers, patterns and GBNF.

The data      text so far     {"name": "Ma        (the object's rule calls the string's rule)
              stack           string: in the text | object: after the value of "name"
              configuration   all stacks that are possible here, interned: a small integer
              walk            trie:  r - i - e       inside: allowed
                                     e " , _ "       the string ends, the object goes on: allowed
                                     \\n             a raw newline in a string: masked
              mask            1 bit for each id of the vocabulary, 32 to a word
              matcher         [configuration after 0, 1, 2, ... tokens]: rolling back cuts a list

Invariants    1. an id is allowed if and only if its bytes lead to a text that can be finished
              2. a stop id is allowed exactly where the text may end
              3. a state, a configuration and a mask never change: matchers share them
              4. what is not enforced is refused by name, never ignored (unless `lenient`)

Units         lo, hi: bytes, or code points before `spell`. Lengths: characters. Masks: bits.
Article       "Structured Output: How Engines Force Valid JSON, Token by Token"
Try           python grammar.py                      a schema's rules, and the legal tokens
              python grammar.py --text '{"name":3}'  the first byte that is refused
              python grammar.py --bench              compile and mask times
              python tests/mutations.py grammar.py   change it: known bugs, each with its test
Imports       nothing of ours; numpy.
"""

import gc
import json
import math
import re
import sys
import textwrap
import unicodedata
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache, lru_cache, reduce
from graphlib import CycleError, TopologicalSorter
from itertools import combinations
from os.path import commonprefix
from pathlib import Path
from time import perf_counter, thread_time
from typing import NamedTuple
from urllib.parse import unquote, urljoin
from weakref import WeakValueDictionary

import numpy as np

STATES = 1 << 17  # most states of a machine; a row of its table is 1 KiB, touched when it is built
STEPS = 1_000_000  # configurations and steps kept: some 100 MB
STACKS = 4096  # most stacks of a configuration: more is a grammar with that many meanings
MEANINGS = 1 << 14  # most rests of a state, such as words of a list that begin with one letter
BRANCHES = 1 << 17  # most of what may follow a state: a symbol and a rest each
MASKS = 4096  # masks kept, and walks: each 25 MB with 49k ids
SWEEPS = 32  # walks of counted characters kept: 4 MB each with 49k ids
NARROW = 16  # a state of so few bytes is walked byte by byte, a wider one level by level
FEW = 500  # ... if more tokens than this begin with its bytes
MANY = 64  # nodes of a frontier that are walked byte by byte
PATCHES = 256  # most nodes at which a state differs from its usual one
INFINITE = 1 << 30  # characters
COMPILE_S = 2.0  # longest compilation, in seconds of this thread: a busy machine refuses nothing
MASK_S = 2.0  # longest mask
FORCED = 1024  # most bytes of one forced text
HEALED = 4  # last tokens of a forced text that a longer one may replace
DFA_STATES = 10_000  # most states of a pattern with lengths, or of several at once
CELLS = 1 << 25  # bytes of a table of lengths
NESTED = 64  # groups
ANCHORED = 16  # groups with anchors in them, one after the other
LONGEST = 1 << 17  # characters of a pattern or a GBNF grammar


class SchemaError(ValueError):
    """A grammar that is refused: where (`path`), by which `keyword`, and why (`reason`)."""

    def __init__(self, path: str, keyword: str, reason: str):
        self.path, self.keyword, self.reason = path, keyword, reason
        where = f"{path}/{keyword}" if path.startswith("#") else f"{path} {keyword}"
        super().__init__(f"{where.strip('/ ')}: {reason}")


# ---------------------------------------------------------------- vocabulary


class Vocabulary:
    """The tokens as a trie of bytes.

    tokens: the bytes of each id, up to the width of the logits; None for special and unused ids,
    which no grammar allows. stop_ids: the ids that may end a text.

    Example: tokens [b"a", b"ab", b"b"] -> nodes 0 (root), 1 a, 2 b, 3 ab
    """

    def __init__(self, tokens, stop_ids):
        self.tokens = list(tokens)
        self.stop_ids = frozenset(stop_ids)
        self.words = -(-len(self.tokens) // 32)
        self.stops(self.stop_ids)  # refuses those that do not exist
        texts: dict[bytes, int] = {}
        twins = []  # ids of bytes that an earlier id has too
        for i, token in enumerate(self.tokens):
            if not isinstance(token, (bytes, type(None))):
                raise ValueError(f"token {i} is {token!r}, neither bytes nor None")
            if token and i not in self.stop_ids and texts.setdefault(token, i) != i:
                twins.append(i)
        self.twins = np.array(twins, np.int64)
        self.longest = max(map(len, texts), default=0)  # bytes
        self._build(sorted(texts), texts)
        self.node[self.twins] = self.node[[texts[self.tokens[i]] for i in twins]]
        self.children = {
            parent << 8 | byte: node
            for node, (parent, byte) in enumerate(zip(self.parent.tolist(), self.byte.tolist()))
            if node
        }
        self.inner = (self.count > 0).tolist()
        self.machine = Machine(self)

    def _build(self, texts: list[bytes], ids: dict[bytes, int]) -> None:
        """Nodes in breadth-first order: the children of a node lie next to each other."""
        lengths = np.array([len(t) for t in texts], np.int64)
        flat = b"".join(t.ljust(self.longest, b"\0") for t in texts)
        bytes_ = np.frombuffer(flat, np.uint8).reshape(len(texts), self.longest)
        shared = np.zeros(len(texts), np.int64)  # length of the prefix shared with the one before
        if len(texts) > 1:
            differ = bytes_[1:] != bytes_[:-1]
            shared[1:] = np.where(differ.any(1), differ.argmax(1), self.longest)
            shared[1:] = np.minimum(shared[1:], np.minimum(lengths[1:], lengths[:-1]))
        parents, values = [np.zeros(1, np.int64)], [np.zeros(1, np.uint8)]
        node, total, rows = np.zeros(len(texts), np.int64), 1, np.arange(len(texts))
        shared[:1] = 0
        self.levels = [0, 1]
        for depth in range(self.longest):
            rows = rows[lengths[rows] > depth]
            new = shared[rows] <= depth
            new[:1] = True
            parents.append(node[rows[new]])
            values.append(bytes_[rows[new], depth])
            node[rows] = total - 1 + np.cumsum(new)
            total += int(new.sum())
            self.levels.append(total)
        heads = np.bincount(bytes_[:, 0], minlength=256) if texts else np.zeros(256, np.int64)
        self.begin = [0, *np.cumsum(heads).tolist()]  # tokens with a first byte below 0, 1, ...
        self.parent = np.concatenate(parents)
        self.byte = np.concatenate(values).astype(np.int64)
        self.token = np.full(total, -1, np.int64)  # an id that ends at a node
        self.token[node] = [ids[text] for text in texts]
        self.node = np.zeros(len(self.tokens), np.int64)  # where each id ends; 0: it is not there
        self.node[self.token[node]] = node
        self.count = np.bincount(self.parent[1:], minlength=total)  # children
        self.onward = np.where(self.count > 0, 3, 0).astype(np.uint8)
        self.first = 1 + np.cumsum(self.count) - self.count  # the first child

    def pack(self, nodes: np.ndarray) -> np.ndarray:
        """The ids of these nodes as bits (words,) int32: bit i of word w is id 32 * w + i."""
        ids = self.token[nodes]
        allowed = np.zeros(len(self.tokens), bool)
        allowed[ids[ids >= 0]] = True
        allowed[self.twins] = allowed[self.token[self.node[self.twins]]]
        return self.bits(allowed)

    def bits(self, allowed: np.ndarray) -> np.ndarray:
        """A bool for each id (V,) as bits (words,) int32."""
        packed = np.zeros(4 * self.words, np.uint8)
        packed[: -(-len(allowed) // 8)] = np.packbits(allowed, bitorder="little")
        return packed.view(np.int32)

    def stops(self, ids) -> np.ndarray:
        """Ids, whatever their bytes, as bits. Raises ValueError for one that does not exist."""
        for i in ids:
            if i not in range(len(self.tokens)):
                raise ValueError(f"stop id {i!r} is none of the {len(self.tokens)} ids")
        allowed = np.zeros(len(self.tokens), bool)
        allowed[list(ids)] = True
        return self.bits(allowed)


# ---------------------------------------------------------------- expressions: sets of texts


class Node:
    """A set of texts, over bytes (or over code points until `spell`). Equal nodes are one object.

    null: the empty text is in the set. calls: a rule is called somewhere in it. first(): what a
    text can begin with: [(lo, hi, rest)] for a symbol in lo..hi, [(rule, None, rest)] for a call;
    rest is what then follows. A state of an automaton is a set of such rests (Antimirov 1996).
    """

    __slots__ = ("key", "null", "calls", "_first", "__weakref__")
    known: WeakValueDictionary = WeakValueDictionary()

    def __new__(cls, *key):
        node = Node.known.get((cls, *key))
        if node is None:
            node = super().__new__(cls)
            node.key, node.null, node.calls, node._first = key, False, False, None
            node.set(*key)
            Node.known[(cls, *key)] = node
        return node

    def set(self, *parts) -> None:
        """Sets null and calls from the parts."""

    def first(self) -> list:
        if self._first is None:
            self._first = list(self.begin())
        return self._first

    def begin(self):
        return ()

    def clamp(self, longest: int | None) -> "Node":
        """A set in which each token of so many bytes at most does the same, with small counts.

        None: a set with all these texts and more, without counts."""
        return self


class Empty(Node):
    """No text at all."""


class Nothing(Node):
    """The empty text."""

    def set(self, *parts):
        self.null = True


class Symbol(Node):
    """One byte, or code point, in lo..hi."""

    def begin(self):
        yield *self.key, NOTHING


class Literal(Node):
    """Bytes, one after the other."""

    def begin(self):
        (text,) = self.key
        yield text[0], text[0], literal(text[1:])


class Seq(Node):
    """One, then the other."""

    def set(self, one, other):
        self.null = one.null and other.null
        self.calls = one.calls or other.calls

    def parts(self) -> list[Node]:
        parts, node = [], self
        while type(node) is Seq:  # a loop: texts are longer than Python's stack is deep
            parts.append(node.key[0])
            node = node.key[1]
        return [*parts, node]

    def begin(self):
        node = self
        while type(node) is Seq:
            one, other = node.key
            then, firsts = other, one
            if type(one) is Repeat:  # without the counted node of one alone
                what, least, most = one.key
                firsts = what
                then = seq(repeat(what, max(least - 1, 0), most and most - 1), other)
            for lo, hi, rest in firsts.first():
                yield lo, hi, then if rest is NOTHING else seq(rest, then)
            if not one.null:
                return
            node = other
        yield from node.first()

    def clamp(self, longest):
        return seq(*(part.clamp(longest) for part in self.parts()))


class Alt(Node):
    """One of several."""

    def set(self, *options):
        self.null = any(o.null for o in options)
        self.calls = any(o.calls for o in options)

    def begin(self):
        for option in self.key:
            yield from option.first()

    def clamp(self, longest):
        return alt(*(o.clamp(longest) for o in self.key))


class Repeat(Node):
    """lo to hi times (hi None: without end). The counts are counted down in the rests."""

    def set(self, what, lo, hi):
        self.null = lo == 0 or what.null
        self.calls = what.calls

    def begin(self):
        what, lo, hi = self.key
        then = repeat(what, max(lo - 1, 0), hi and hi - 1)
        for low, high, rest in what.first():
            yield low, high, seq(rest, then)

    def clamp(self, longest):
        what, lo, hi = self.key
        if longest is None:
            return repeat(what.clamp(None))
        most = longest + 1  # more repetitions than a token has bytes
        return repeat(what.clamp(longest), min(lo, most), None if hi and hi > most else hi)


class Call(Node):
    """The texts of a rule, by its name: what makes recursion possible."""

    def set(self, rule):
        self.calls = True

    def begin(self):
        yield self.key[0], None, NOTHING


class Rule:
    """A set of texts with a name. body is given after the rule was first called."""

    def __init__(self, name: str, body: Node | None = None):
        self.name, self.body = name, body

    def __repr__(self):
        return self.name


EMPTY, NOTHING = Empty(), Nothing()


def literal(text: bytes | str) -> Node:
    text = text.encode() if isinstance(text, str) else text
    return Literal(text) if text else NOTHING


def symbols(*ranges: tuple[int, int]) -> Node:
    return alt(*(Symbol(lo, hi) for lo, hi in ranges if lo <= hi))


def seq(*parts: Node) -> Node:
    done = NOTHING
    for part in reversed(parts):
        if part is EMPTY or done is EMPTY:
            done = EMPTY
        elif part is NOTHING:
            pass
        elif done is NOTHING:
            done = part
        elif type(part) is Seq:
            for one in reversed(part.parts()):
                done = Seq(one, done)
        else:
            done = Seq(part, done)
    return done


def alt(*options: Node) -> Node:
    flat: dict[Node, None] = {}
    for option in options:
        for o in option.key if type(option) is Alt else (option,):
            flat[o] = None
    flat.pop(EMPTY, None)
    return Alt(*flat) if len(flat) > 1 else next(iter(flat), EMPTY)


def repeat(what: Node, lo: int = 0, hi: int | None = None) -> Node:
    if hi == 0 or what is NOTHING:
        return NOTHING
    if what is EMPTY:
        return EMPTY if lo else NOTHING
    if lo == hi == 1:
        return what
    return Repeat(what, 0 if what.null else lo, hi)  # a count of empty texts is none


def optional(what: Node) -> Node:
    return alt(NOTHING, what)


def parts_of(node: Node) -> list[Node]:
    return [part for part in node.key if isinstance(part, Node)]


def pruned(node: Node, rules: set[Rule]) -> Node:
    """The texts in which none of these rules is called."""
    known: dict[Node, Node] = {}
    todo = [node]
    while todo:  # a loop: objects have more members than Python's stack is deep
        node = todo[-1]
        waiting = [part for part in parts_of(node) if part not in known]
        if waiting:
            todo += waiting
            continue
        parts = [known[part] for part in parts_of(node)]
        if type(node) is Repeat:
            done = repeat(*parts, *node.key[1:])
        elif parts:
            done = seq(*parts) if type(node) is Seq else alt(*parts)
        else:
            done = EMPTY if type(node) is Call and node.key[0] in rules else node
        known[todo.pop()] = done
    return done


# ---------------------------------------------------------------- machine: states, stacks, masks


class State:
    """A set of rests: everything that may follow at a point within a rule.

    edges: [(lo, hi, rests)], disjoint. calls: [(rule, state to come back to)]. accepts: the rule
    may end here. Filled in by `Machine.look` when a text first gets here; what an edge leads to
    is numbered when a text goes there.
    """

    __slots__ = ("rests", "accepts", "edges", "calls", "wide")

    def __init__(self, rests: frozenset):
        self.rests, self.edges = rests, None
        self.accepts = any(rest.null for rest in rests)


class Machine:
    """The automata of all rules, and the memory of what was found: shared by all grammars.

    A stack is (state, frame); a frame (state to come back to, frame below) is a number, 0 the
    bottom. A configuration is the set of all stacks that the text allows, and whether it may end.
    """

    def __init__(self, vocabulary: Vocabulary):
        self.vocabulary = vocabulary
        self.table = np.zeros((STATES, 256), np.int32)  # state, byte -> state; 0: dead
        self.built = np.zeros(STATES, bool)  # rows of the table
        self.flags = np.zeros(STATES, np.uint8)  # 1: accepts, 2: calls
        self.built[0] = True
        self.states, self.state_ids = [State(frozenset())], {frozenset(): 0}
        self.frames, self.frame_ids = [(0, 0)], {}
        self.configs, self.config_ids = [((), False)], {((), False): 0}
        self.frontiers, self.frontier_ids = [np.zeros(1, np.int64)], {}
        self.steps: dict[int, int] = {}  # configuration << 8 | byte -> configuration
        self.walks: dict[tuple, tuple] = {}  # (state, frontier) -> what `walk` returns
        self.masks: dict[int, np.ndarray] = {}  # configuration -> mask
        self.homes: dict[int, list | None] = {}  # see `within`
        self.sweeps: dict[tuple, tuple] = {}  # see `sweep_counted`
        self.reaches: dict[int, int] = {}  # see `reach`
        self.clamped: dict[tuple, int] = {}  # (state, not at the root) -> state of the same walk
        self.stop = vocabulary.stops(vocabulary.stop_ids)
        self.none = np.zeros(vocabulary.words, np.int32)

    @property
    def worn(self) -> bool:
        """Half full: the next request gets a new machine, those that run keep this one."""
        return len(self.states) > STATES // 2 or len(self.configs) + len(self.steps) > STEPS

    def state(self, rests) -> int:
        rests = frozenset(rests)
        if rests not in self.state_ids and len(self.states) == STATES:
            raise SchemaError("#", "", f"the grammar needs more than {STATES} states")
        return intern(self.state_ids, self.states, rests, State)

    def start(self, rule: Rule) -> int:
        return self.state([rule.body])

    def look(self, number: int) -> State:
        """The state with its edges and calls."""
        state = self.states[number]
        if state.edges is not None:
            return state
        ranges, calls = [], {}
        for rest in state.rests:
            for lo, hi, then in rest.first():
                if hi is None:
                    calls.setdefault(lo, set()).add(then)
                else:
                    ranges.append((lo, hi, then))
            if len(ranges) > BRANCHES:
                raise SchemaError("#", "", f"the text can go on in more than {BRANCHES} ways")
        state.calls = [(rule, self.state(then)) for rule, then in calls.items()]
        edges = split(ranges)
        begin = self.vocabulary.begin
        tokens = sum(begin[hi + 1] - begin[lo] for lo, hi, _ in edges)
        state.wide = tokens > FEW and sum(hi - lo + 1 for lo, hi, _ in edges) > NARROW
        self.flags[number] = state.accepts | bool(calls) << 1
        state.edges = edges  # last: what was interrupted is done again
        return state

    def build(self, states: np.ndarray) -> None:
        """The table's rows of these states."""
        for number in set(states[~self.built[states]].tolist()):
            for lo, hi, then in self.look(number).edges:
                self.table[number, lo : hi + 1] = self.state(then)
            self.built[number] = True

    # -------------------------------------------------- configurations

    def frame(self, back: int, below: int) -> int:
        state = self.look(back)
        if state.accepts and not state.edges and not state.calls:
            return below  # a tail call: nothing is left to do on coming back
        return intern(self.frame_ids, self.frames, (back, below))

    def enter(self, number: int, frame: int) -> list[tuple[int, int]]:
        """The stacks of the rules called here."""
        return [
            (self.start(rule), self.frame(back, frame)) for rule, back in self.look(number).calls
        ]

    def config(self, stacks) -> int:
        """The configuration of these stacks and of all that follow from them."""
        seen, todo, live, ends = set(stacks), list(stacks), set(), False
        while todo:
            number, frame = todo.pop()
            state = self.look(number)
            if state.edges:
                live.add((number, frame))
            ends |= state.accepts and not frame
            more = self.enter(number, frame)
            if state.accepts and frame:
                more.append(self.frames[frame])
            for stack in more:
                if stack not in seen:
                    seen.add(stack)
                    todo.append(stack)
            if len(seen) > STACKS:
                raise SchemaError("#", "", f"the text has more than {STACKS} meanings at once")
        return intern(self.config_ids, self.configs, (tuple(sorted(live)), ends))

    def step(self, config: int, byte: int) -> int:
        """The configuration after one more byte; 0 where there is none."""
        key = config << 8 | byte
        after = self.steps.get(key)
        if after is None:
            stacks = [
                (self.state(then), frame)
                for number, frame in self.configs[config][0]
                for lo, hi, then in self.look(number).edges
                if lo <= byte <= hi
            ]
            after = self.steps[key] = self.config(stacks) if stacks else 0
        return after

    def run(self, text: bytes, config: int) -> int:
        """The configuration after a text; 0 where it is refused."""
        for byte in text:
            config = self.step(config, byte)
            if not config:
                break
        return config

    def forced(self, config: int) -> int | None:
        """The byte that must come next, if there is but one and the text cannot end."""
        stacks, ends = self.configs[config]
        found = None
        for number, _ in stacks:
            for lo, hi, _ in self.look(number).edges:
                if ends or lo != hi or found not in (None, lo):
                    return None
                found = lo
        return found

    def extends(self, text: bytes, config: int) -> bool:
        """Whether a token begins with the text, is longer, and is allowed to the end.

        config: the configuration after the text."""
        node = 0
        for byte in text:
            node = self.vocabulary.children.get(node << 8 | byte)
            if node is None:
                return False
        todo = [(node, config)]
        while todo:
            node, config = todo.pop()
            first = int(self.vocabulary.first[node])
            for child in range(first, first + int(self.vocabulary.count[node])):
                after = self.step(config, int(self.vocabulary.byte[child]))
                if after and self.vocabulary.token[child] >= 0:
                    return True
                if after:
                    todo.append((child, after))
        return False

    # -------------------------------------------------- masks

    def mask(self, config: int) -> np.ndarray:
        """Ids allowed at a configuration (words,) int32, read only."""
        if config not in self.masks:
            with uncollected():
                mask = union(self.parts(config))
            mask.flags.writeable = False  # it is shared
            keep(self.masks, config, mask)
        return self.masks[config]

    def parts(self, config: int) -> list[np.ndarray]:
        """The parts of its mask: of all stacks, the ids that end within the rule, or after it, or
        in a callee."""
        stacks, ends = self.configs[config]
        until = thread_time() + MASK_S
        masks = [self.stop] if ends else [self.none]
        todo = [(number, 0, frame) for number, frame in stacks]
        seen = set(todo)  # a state, the frontier at which it is reached, and its frame
        while todo:
            number, nodes, frame = todo.pop()
            inside, ends, calls = self.walk(self.clamp(number, nodes), nodes)
            masks.append(inside)
            more = [(n, at, f) for caller, at in calls for n, f in self.enter(caller, frame)]
            if ends and frame:
                back, below = self.frames[frame]
                more.append((back, ends, below))
            for stack in more:
                if stack not in seen:
                    seen.add(stack)
                    todo.append(stack)
            if len(seen) > STACKS + len(stacks):
                raise SchemaError("#", "", f"a token has more than {STACKS} meanings at once")
            if thread_time() > until:
                raise SchemaError("#", "", f"it takes more than {MASK_S:g} s to find a mask")
        return masks

    def clamp(self, number: int, frontier: int = 0) -> int:
        """A state whose walk is the same: far from its limit, a count does not matter.

        Example: where no token is over 16 bytes, [a-z]{0,900} walks as [a-z]* does. Of what is
        not `counted`, such as a pattern beside a maxLength of 12, the same holds where no token
        has more than 10 bytes in it (its `reach`).
        """
        done = self.clamped.get((number, frontier > 0))
        if done is None:
            done, rests = number, self.states[number].rests
            if self.look(number).wide and not any(rest.calls for rest in rests):
                done = self.state(rest.clamp(self.vocabulary.longest) for rest in rests)
                free = self.state(rest.clamp(None) for rest in self.states[done].rests)
                if done != free and not frontier and not self.counted(done):
                    reach = self.reach(free)
                    done = self.state(rest.clamp(reach) for rest in rests)
            self.clamped[number, frontier > 0] = done
        return done

    def reach(self, number: int) -> int:
        """Bytes of the longest token, from its first byte on, that goes on within the state."""
        if number not in self.reaches:
            states, _ = self.sweep_all(number)
            last = np.flatnonzero(states).max(initial=0)  # the nodes lie level by level
            depth = np.searchsorted(self.vocabulary.levels, last, "right") - 1
            self.reaches[number] = int(depth)
        return self.reaches[number]

    def frontier(self, nodes: np.ndarray) -> int:
        """A number for a set of nodes of the trie; 0 is the root alone, where all tokens begin."""
        if not (nodes[1:] > nodes[:-1]).all():  # np.unique would sort them all
            nodes = np.sort(nodes)
            nodes = nodes[np.append(True, nodes[1:] > nodes[:-1])]
        return intern(self.frontier_ids, self.frontiers, nodes.tobytes(), lambda _: nodes)

    def walk(self, number: int, frontier: int) -> tuple[np.ndarray, int, list[tuple[int, int]]]:
        """What the tokens do that are in this state at the nodes of a frontier.

        Returns the ids whose last byte is within the rule, as bits; the frontier of the nodes where
        the rule may end inside a token (0: nowhere); and for each state that calls other rules,
        the frontier where tokens reach it. None of this depends on the stack below.
        """
        found = self.walks.get((number, frontier))
        if found is not None:
            return found
        v = self.vocabulary
        patched = None if frontier else self.patched(number)
        if patched:
            return keep(self.walks, (number, frontier), patched)
        counted = None if frontier else self.counted(number)
        if counted:
            home, lo, hi = counted
            rooms, _, (nodes, states, counts) = self.sweep_counted(home, 0)
            live = (lo <= counts) & (counts <= hi)
            nodes, states = nodes[live], states[live]
            inside = v.bits(rooms <= hi) | v.pack(nodes)
            if self.states[home].accepts:
                nodes, states = self.below(number, 0)
        elif not frontier and self.look(number).wide:
            states, _ = self.sweep_all(number)
            inside = v.bits(states[v.node] > 0)
            nodes = np.flatnonzero(self.flags[states] & v.onward)
            states = states[nodes]
        else:
            nodes, states = self.below(number, frontier)
            inside = v.pack(nodes)
            if frontier:  # here, other than at the root, a rule may end or call
                start = self.frontiers[frontier]
                nodes = np.concatenate([start, nodes])
                states = np.concatenate([np.full(len(start), number), states])
        flags = self.flags[states] & v.onward[nodes]
        at = nodes[flags & 1 > 0]
        ends = self.frontier(at) if len(at) else 0
        callers, at = states[flags & 2 > 0], nodes[flags & 2 > 0]
        calls = [(n, self.frontier(at[callers == n])) for n in sorted(set(callers.tolist()))]
        return keep(self.walks, (number, frontier), (inside, ends, calls))

    def patched(self, number: int) -> tuple | None:
        """`walk` of a state that differs in few places from the one that most bytes lead to.

        Example: at the key of an object with "name", most bytes lead to "any other key"; its walk
        is taken, and corrected at the nodes n, na, nam, name, name". None where that does not hold.
        """
        usual = self.usual(number)
        if usual == number or not self.look(number).wide or self.usual(usual) != usual:
            return None
        v, todo = self.vocabulary, [(0, number, usual)]
        for node, one, other in todo:  # grows on the way
            if v.inner[node]:
                self.build(np.array([one, other]))
                for byte in np.flatnonzero(self.table[one] != self.table[other]).tolist():
                    child = v.children.get(node << 8 | byte)
                    if child:
                        pair = self.table[[one, other], byte].tolist()
                        todo.append((child, *pair))
            if len(todo) > PATCHES:
                return None
        nodes, states, _ = np.array(todo[1:], np.int64).reshape(-1, 3).T
        inside, ends, calls = self.walk(usual, 0)
        flags = self.flags[states] & v.onward[nodes]
        if calls or (flags & 2).any():
            return None
        at = set(self.frontiers[ends].tolist() if ends else ()) - set(nodes.tolist())
        at = sorted(at | set(nodes[flags & 1 > 0].tolist()))
        inside = inside & ~v.pack(nodes) | v.pack(nodes[states > 0])
        return inside, self.frontier(np.array(at)) if at else 0, []

    def usual(self, number: int) -> int:
        """The state that most bytes lead to."""
        sizes = {frozenset(): 0}
        for lo, hi, then in self.look(number).edges:
            sizes[then] = sizes.get(then, 0) + hi - lo + 1
        return self.state(max(sizes, key=sizes.get))

    def below(self, number: int, frontier: int) -> tuple[np.ndarray, np.ndarray]:
        """All (node, state) below the nodes of a frontier that are in this state."""
        counted = self.counted(number)
        if counted:
            home, lo, hi = counted
            _, everything, _ = self.sweep_counted(home, frontier)
            nodes, states, counts, rooms, over = everything
            live = (rooms <= hi) & ~(over & (counts < lo))
            nodes, states, counts = nodes[live], states[live], counts[live]
            if lo and self.states[home].accepts:  # not where it is too early for that
                states = np.where((states == home) & (counts < lo), self.early(home), states)
            return nodes, states
        if self.look(number).wide or len(self.frontiers[frontier]) > MANY:
            return self.sweep(number, frontier)[:2]
        v, reached, wide = self.vocabulary, [], {}
        todo = [(node, number) for node in self.frontiers[frontier].tolist()]
        while todo:  # byte by byte, as few go on
            node, number = todo.pop()
            state = self.look(number)
            if state.wide:
                wide.setdefault(number, []).append(node)
                continue
            for lo, hi, then in state.edges:
                then = self.state(then)
                for byte in range(lo, hi + 1):
                    child = v.children.get(node << 8 | byte)
                    if child:
                        reached.append((child, then))
                        if v.inner[child]:
                            todo.append((child, then))
        pairs = [np.array(reached, np.int64).reshape(-1, 2).T]
        pairs += [self.below(n, self.frontier(np.array(nodes))) for n, nodes in wide.items()]
        nodes, states = np.concatenate(pairs, 1)
        return nodes, states

    def sweep(self, number: int, frontier: int, count: bool = False):
        """`below` level by level; and how often each node's path was in the state again."""
        if not frontier:
            states, counts = self.sweep_all(number, count)
            nodes = np.flatnonzero(states)
            return nodes, states[nodes], counts[nodes]
        v, found = self.vocabulary, [[np.zeros(0, np.int64)] * 3]
        nodes = self.frontiers[frontier]
        states, counts = np.full(len(nodes), number), np.zeros(len(nodes), np.int64)
        while True:
            onward = v.count[nodes] > 0
            nodes, states, counts = nodes[onward], states[onward], counts[onward]
            if not len(nodes):
                break
            self.build(states)
            children = v.count[nodes]
            last = np.cumsum(children)
            nodes = np.repeat(v.first[nodes] - last + children, children) + np.arange(last[-1])
            states = self.table[np.repeat(states, children), v.byte[nodes]]
            live = states > 0
            counts = np.repeat(counts, children)[live]
            nodes, states = nodes[live], states[live].astype(np.int64)
            counts += states == number
            found.append((nodes, states, counts))
        return [np.concatenate(parts) for parts in zip(*found)]

    def sweep_all(self, number: int, count: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """`sweep` from the root, as a state for each node of the trie: 0 where there is none."""
        v, table = self.vocabulary, self.table.ravel()
        states, counts = np.zeros(len(v.parent), np.int32), np.zeros(len(v.parent), np.int32)
        states[0] = number
        for a, b in zip(v.levels[1:], v.levels[2:]):
            above = states[v.parent[a:b]]
            self.build(above)
            above <<= 8
            above += v.byte[a:b]
            table.take(above, out=states[a:b])
            if count:
                counts[a:b] = counts[v.parent[a:b]] + (states[a:b] == number)
        states[0] = 0
        return states, counts

    def counted(self, number: int) -> tuple[int, int, int] | None:
        """For a state "lo to hi times a character, then a rest": (the state without the counts,
        lo, hi). None if it is anything else.

        One sweep of the state without the counts serves all lo and hi: it notes how many characters
        each token ends and begins. The characters must be told apart from each other and from the
        rest, so that a token has been in that state once for each of them.

        Example: [a-z]{lo,hi}" is swept as [a-z]*". The token ab" has ended 2 characters and is in
        the rest: allowed where lo <= 2 <= hi. The token ab has begun 2: allowed where 2 <= hi.
        """
        rests = self.states[number].rests
        rest = next(iter(rests), None)
        what, after = rest.key if type(rest) is Seq else (rest, NOTHING)
        if len(rests) != 1 or type(what) is not Repeat or rest.calls:
            return None
        if not self.look(number).wide:
            return None
        what, lo, hi = what.key
        home = self.state([seq(repeat(what), after)])
        return None if self.within(home) is None else (home, lo, INFINITE if hi is None else hi)

    def within(self, home: int) -> list[int] | None:
        """The states inside a character of a repetition; None if a text can be read in two ways."""
        if home not in self.homes:
            (rest,) = self.states[home].rests
            inside, todo, clear = set(), [home], True
            while todo and clear:
                for _, _, rests in self.look(todo.pop()).edges:
                    then, spine = self.state(rests), next(iter(rests))
                    parts = []
                    while type(spine) is Seq and spine is not rest:
                        parts.append(spine.key[0])
                        spine = spine.key[1]
                    clear &= len(rests) == 1 and (
                        spine is not rest or not parts or not all(p.null for p in parts)
                    )
                    if spine is rest and parts and then not in inside:
                        inside.add(then)
                        todo.append(then)
            self.homes[home] = sorted(inside) if clear else None
        return self.homes[home]

    def early(self, home: int) -> int:
        """The state without counts, but for one that is still due: it does not accept."""
        (rest,) = self.states[home].rests
        what, *after = rest.parts() if type(rest) is Seq else [rest]
        number = self.state([seq(repeat(what.key[0], 1), *after)])
        self.look(number)
        return number

    def sweep_counted(self, home: int, frontier: int):
        """`sweep` of a state without counts, with the characters that a node has ended and begun.

        Returns the number begun for each id (from the root; too large for those that do not end
        within characters); (nodes, states, ended, begun, whether in the rest) of all nodes; and the
        first three of these for the nodes in the rest.
        """
        found = self.sweeps.get((home, frontier))
        if found is None:
            nodes, states, counts = self.sweep(home, frontier, count=True)
            kind = np.full(len(self.states), 2, np.int8)
            kind[home] = 0
            kind[self.within(home)] = 1
            kind = kind[states]
            begun, over = counts + (kind == 1), kind == 2
            rooms = None
            if not frontier:
                rooms = np.full(len(self.vocabulary.parent), INFINITE + 1, np.int32)
                rooms[nodes[~over]] = begun[~over]
                rooms = rooms[self.vocabulary.node]
            found = (
                rooms,
                (nodes, states, counts, begun, over),
                (nodes[over], states[over], counts[over]),
            )
            keep(self.sweeps, (home, frontier), found, SWEEPS)
        return found


def intern(numbers: dict, values: list, key, make=lambda key: key) -> int:
    """The number of a key, a new one if it has none: the place of its value in a list."""
    number = numbers.get(key)
    if number is None:
        values.append(make(key))
        number = numbers[key] = len(values) - 1  # last: an interruption leaves no wrong number
    return number


@contextmanager
def uncollected():
    """No garbage is collected: among millions of states that takes seconds, of no mask."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def union(masks: list[np.ndarray]) -> np.ndarray:
    return masks[0] if len(masks) == 1 else np.bitwise_or.reduce(masks)


def keep(memory: dict, key, value, most: int = MASKS):
    """Stores a value, in place of the oldest one if the memory is full."""
    if len(memory) >= most:
        memory.pop(next(iter(memory)))
    memory[key] = value
    return value


def split(ranges: list[tuple[int, int, Node]]) -> list[tuple[int, int, frozenset]]:
    """Ranges that may overlap as disjoint ones, each with the set of what follows."""
    cuts = sorted({lo for lo, _, _ in ranges} | {hi + 1 for _, hi, _ in ranges})
    place = {cut: i for i, cut in enumerate(cuts)}
    sets: list[set] = [set() for _ in cuts]
    for lo, hi, then in ranges:
        for i in range(place[lo], place[hi + 1]):
            sets[i].add(then)
    if any(len(s) > MEANINGS for s in sets):
        raise SchemaError("#", "", f"the text has more than {MEANINGS} meanings at once")
    return [(a, b - 1, frozenset(s)) for a, b, s in zip(cuts, cuts[1:], sets) if s]


# ---------------------------------------------------------------- grammar and matcher


class Grammar:
    """What `compile` returns: a rule to start from, and a machine to read it.

    ignored: the paths of keywords that are not enforced: other formats than those of `FORMATS`,
    which are annotations, and what `lenient` let pass.
    """

    def __init__(self, vocabulary: Vocabulary, root: Rule, ignored=()):
        check(root)
        self.vocabulary, self.root, self.ignored = vocabulary, root, list(ignored)
        self.machine = None
        self.join()

    def join(self) -> None:
        """Takes the vocabulary's machine, a new one if that is worn."""
        if self.vocabulary.machine.worn:
            self.vocabulary.machine = Machine(self.vocabulary)
        if self.machine is not self.vocabulary.machine:
            self.machine = self.vocabulary.machine
            self.start = self.machine.config([(self.machine.start(self.root), 0)])

    def accepts(self, text: str | bytes) -> bool:
        """Whether the whole text is in the grammar."""
        self.join()
        text = text.encode(errors="surrogatepass") if isinstance(text, str) else text
        return self.machine.configs[self.machine.run(text, self.start)][1]

    def matcher(self, stop_ids=()) -> "Matcher":
        """A new text. stop_ids: more ids that may end it, beside the vocabulary's."""
        self.join()
        return Matcher(self, stop_ids)


class Matcher:
    """One text on its way through a grammar: the configurations after each of its tokens."""

    def __init__(self, grammar: Grammar, stop_ids=()):
        self.grammar = grammar
        self.machine, self.vocabulary = grammar.machine, grammar.vocabulary
        self.history = [grammar.start]  # 0 after a stop id
        self.ids: list[int] = []
        self.stop_ids = self.vocabulary.stop_ids.union(stop_ids)
        self.more = None
        if self.stop_ids != self.vocabulary.stop_ids:
            self.more = self.vocabulary.stops(self.stop_ids)

    @property
    def ends(self) -> bool:
        """The text may end here."""
        return self.machine.configs[self.history[-1]][1]

    def mask(self) -> np.ndarray:
        """The ids that may come next (words,) int32: bit i of word w is id 32 * w + i."""
        mask = self.machine.mask(self.history[-1])
        if self.more is None:
            return mask
        return mask | self.more if self.ends else mask & ~self.more

    def accept(self, token: int) -> bool:
        """Takes a token, if it is allowed; else nothing changes."""
        if not 0 <= token < len(self.vocabulary.tokens):
            return False
        if token in self.stop_ids:
            after, allowed = 0, self.ends
        else:
            text = self.vocabulary.tokens[token] or b""
            after = self.machine.run(text, self.history[-1])
            allowed = after and text
        if allowed:
            self.history.append(after)
            self.ids.append(token)
        return bool(allowed)

    def rollback(self, n: int) -> None:
        """Takes back the last n tokens."""
        if not 0 <= n < len(self.history):
            raise ValueError(f"{n} tokens cannot be taken back of {len(self.history) - 1}")
        del self.history[len(self.history) - n :]
        del self.ids[len(self.ids) - n :]

    def move(self) -> None:
        """Goes on where it is on the vocabulary's machine, a new one if that is worn."""
        there = self.grammar.matcher(self.stop_ids)
        for token in self.ids:
            there.accept(token)
        self.machine, self.history = there.machine, there.history

    @property
    def finished(self) -> bool:
        """A stop id was taken, or the text may end and nothing can follow."""
        stacks, _ = self.machine.configs[self.history[-1]]
        return not stacks

    def forced(self, encode) -> list[int]:
        """The ids of the text that can only go one way from here.

        encode: the text's ids without special ones. Its last tokens are left out where a longer
        token that is allowed too would span the end, as the tokenizer would choose it. A text
        that may end here is not forced to go on. llguidance calls this fast-forward tokens.
        """
        machine, tokens = self.machine, self.vocabulary.tokens
        config, text = self.history[-1], bytearray()
        while len(text) < FORCED and (byte := machine.forced(config)) is not None:
            text.append(byte)
            config = machine.step(config, byte)
        try:
            whole = text.decode()
        except UnicodeDecodeError as error:  # cut off within a character, at the end or before
            whole = text[: error.start].decode()
        ids, whole = list(encode(whole)) if whole else [], whole.encode()
        pieces = [tokens[i] if i < len(tokens) else None for i in ids]
        if None in pieces or b"".join(pieces) != whole:
            return []  # a tokenizer that adds to the text
        after = machine.run(whole, self.history[-1])
        for cut in range(max(len(ids) - HEALED, 0), len(ids)):
            if machine.extends(b"".join(pieces[cut:]), after):
                return ids[:cut]
        return ids


def check(root: Rule) -> None:
    """Takes out what can never be finished; refuses a root without an end, and left recursion.

    Every state of the automata is then on the way to an end. A rule that calls itself before it
    reads anything would be entered without end.
    """
    nodes = reachable(root)
    rules = dict.fromkeys([root, *(node.key[0] for node in nodes if type(node) is Call)])
    ends = closure(nodes, lambda node: node is not EMPTY)
    endless = {rule for rule in rules if rule.body not in ends}
    if root in endless:
        raise SchemaError("#", "", "it accepts nothing")
    if endless:
        for rule in rules:
            rule.body = pruned(rule.body, endless)
        nodes = reachable(root)
    empty = closure(nodes, lambda node: node.null)
    try:
        TopologicalSorter({rule: list(heads(rule.body, empty)) for rule in rules}).prepare()
    except CycleError as error:
        names = " -> ".join(rule.name for rule in error.args[1][:0:-1])
        raise SchemaError("#", "", f"{names} calls itself before anything is read") from None


def reachable(root: Rule) -> dict[Node, list[Node]]:
    """The nodes that call rules, with their parts, and these parts; a call's part is what it
    calls. Parts come before the whole, but for recursion."""
    nodes, entered, todo = {}, {}, [root.body]
    while todo:
        node = todo.pop()
        if node in entered:
            nodes[node] = entered[node]
        else:
            parts = [node.key[0].body] if type(node) is Call else parts_of(node)
            entered[node] = parts if node.calls else []
            todo += [node, *(part for part in entered[node] if part not in entered)]
    return nodes


def closure(nodes: dict[Node, list[Node]], leaf) -> set[Node]:
    """The nodes that have a text of which all leaves pass: the least fixed point. leaf: the same
    for what calls no rule."""
    found: set[Node] = set()
    left, before = list(nodes), None
    while len(left) != before:  # parts come first: a second round is there for recursion
        before, here, left = len(left), left, []
        for node in here:
            if not node.calls:
                passes = leaf(node)
            elif type(node) is Alt:
                passes = not found.isdisjoint(nodes[node])
            else:
                passes = type(node) is Repeat and not node.key[1] or found.issuperset(nodes[node])
            if passes:
                found.add(node)
            else:
                left.append(node)
    return found


def heads(node: Node, empty: set[Node]):
    """The rules that a text of the node may begin with; empty: the nodes that may read nothing."""
    todo = [node]
    while todo:
        node = todo.pop()
        if type(node) is Call:
            yield node.key[0]
        elif type(node) is Seq and node.key[0] not in empty:
            todo.append(node.key[0])
        elif node.calls:
            todo += parts_of(node)[::-1]


def compile(
    vocabulary: Vocabulary,
    *,
    json_schema=None,
    regex: str | None = None,
    choice: list[str] | None = None,
    grammar: str | None = None,
    lenient: bool = False,
    whitespace: str = "default",
) -> Grammar:
    """One of json_schema (an object, True or False, or their JSON text; True is any JSON), regex
    (a full match), choice, or grammar (GBNF) as a Grammar. Raises SchemaError.

    whitespace, in JSON: "compact" none, "default" at most a space, or a newline and 20 blanks,
    between tokens, "any" any.
    """
    given = sum(one is not None for one in (json_schema, regex, choice, grammar))
    if given != 1:
        raise ValueError(f"one of json_schema, regex, choice and grammar is needed, not {given}")
    ignored = ()
    if json_schema is not None:
        schema = Schema(json_schema, lenient, whitespace)
        root, ignored = schema.compile(), schema.ignored
    elif regex is not None:
        root = Rule("regex", spell(parse_regex(regex)))
    elif choice is not None:
        root = Rule("choice", choices(choice))
    elif grammar is not None:
        root = parse_gbnf(grammar)
    return Grammar(vocabulary, root, ignored)


def choices(choice) -> Node:
    if not isinstance(choice, (list, tuple)) or not choice:
        raise SchemaError("choice", "", f"a list of texts is needed, not {repr(choice)[:80]}")
    for text in choice:
        if not isinstance(text, str):
            raise SchemaError("choice", "", f"{repr(text)[:80]} is not a string")
    try:
        return prefix_tree([c.encode() for c in dict.fromkeys(choice)])
    except UnicodeEncodeError:
        raise SchemaError("choice", "", "half of a surrogate pair in a text") from None


# ---------------------------------------------------------------- JSON Schema: conditions


class Sub:
    """A subschema: its JSON, its place, and the URI its references start from. One object each."""

    def __init__(self, raw, path: str, base: str):
        self.raw, self.path, self.base = raw, path, base


def kind_of(value) -> str:
    return KIND_OF[type(value)]


def exact(value) -> Fraction:
    """The number as it is written: 0.1 is a tenth."""
    return Fraction(repr(value))


def canonical(value) -> str:
    """A text that equal JSON values share: 1 is 1.0 and is not true, keys have no order."""
    kind = kind_of(value)
    if kind == "array":
        return f"[{','.join(map(canonical, value))}]"
    if kind == "object":
        return "{%s}" % ",".join(
            sorted(f"{json.dumps(k)}:{canonical(v)}" for k, v in value.items())
        )
    return str(exact(value)) if kind == "number" else json.dumps(value)


class Condition:
    """What binds the values of one kind. A place is (path, keyword).

    An alternative meets all of its conditions. What does not meet them meets the opposite of one:
    not (at least 2 and at most 5) is below 2, or above 5. An opposite is conditions again, where
    there are such (`Bound`, `Members`), else `Not`.

    Each kind has holds(value, schema): whether a value meets it.
    """

    evaluates = False  # what it names is not left for an `unevaluated...`
    negatable = False  # texts can be built for its negation

    def opposite(self, schema: "Schema", place) -> list[list["Condition"]]:
        """Alternatives, conditions each, for the values that do not."""
        return [[Not(self, place)]]


@dataclass(frozen=True)
class Not(Condition):
    condition: Condition
    place: tuple[str, str] = field(compare=False)

    def holds(self, value, schema):
        return not self.condition.holds(value, schema)

    def opposite(self, schema, place):
        return [[self.condition]]


@dataclass(frozen=True)
class Bound(Condition):
    """The number, or the length, is at least n (upper: at most); open: and not n itself."""

    n: Fraction
    open: bool = False
    upper: bool = False

    def holds(self, value, schema):
        size = exact(value) if kind_of(value) == "number" else len(value)
        if size == self.n:
            return not self.open
        return size < self.n if self.upper else size > self.n

    def opposite(self, schema, place):
        return [[Bound(self.n, not self.open, not self.upper)]]


@dataclass(frozen=True)
class Multiple(Condition):
    of: Fraction

    @property
    def negatable(self):
        return self.of == 1

    def holds(self, value, schema):
        return exact(value) % self.of == 0


@dataclass(frozen=True)
class Match(Condition):
    """The string is in a set of texts over code points."""

    texts: Node
    negatable = True

    def holds(self, value, schema):
        return matches(self.texts, value)


@dataclass(frozen=True)
class Among(Condition):
    """The value is one of these, all of one kind."""

    texts: tuple[str, ...]
    values: tuple = field(compare=False)

    @property
    def negatable(self):
        return kind_of(self.values[0]) not in ("array", "object")

    def holds(self, value, schema):
        return canonical(value) in self.texts


@dataclass(frozen=True)
class Required(Condition):
    name: str
    negatable = True

    def holds(self, value, schema):
        return self.name in value


@dataclass(frozen=True, eq=False)
class Members(Condition):
    """Subschemas for the members of an object, by name, by pattern, and for the rest."""

    names: dict[str, Sub]
    patterns: tuple[tuple[Node, Sub], ...] = ()
    rest: Sub | None = None
    evaluates: bool = True

    def of(self, name: str) -> list[Sub]:
        return self.matched(name, [texts for texts, _ in self.patterns if matches(texts, name)])

    def matched(self, name: str | None, patterns: list[Node]) -> list[Sub]:
        """The subschemas of a member whose name matches these patterns; None: any other name."""
        subs = [self.names[name]] if name in self.names else []
        subs += [sub for texts, sub in self.patterns if texts in patterns]
        return subs or [self.rest] * (self.rest is not None)

    def holds(self, value, schema):
        return all(schema.valid(v, tuple(self.of(name))) for name, v in value.items())

    def opposite(self, schema, place):
        if self.patterns or self.rest:
            return super().opposite(schema, place)
        order = dict.fromkeys(self.names, schema.yes)
        return [
            [Required(name), Members(order | {name: schema.negative(sub)}, evaluates=False)]
            for name, sub in self.names.items()
            if sub is not schema.yes
        ]


@dataclass(frozen=True, eq=False)
class Names(Condition):
    sub: Sub

    def holds(self, value, schema):
        return all(schema.valid(name, (self.sub,)) for name in value)


@dataclass(frozen=True, eq=False)
class Items(Condition):
    """Subschemas for the items of an array: the first ones, and the rest."""

    first: tuple[Sub, ...]
    rest: Sub | None = None
    evaluates: bool = True

    def of(self, i: int) -> list[Sub]:
        return [self.first[i]] if i < len(self.first) else [self.rest] * (self.rest is not None)

    def holds(self, value, schema):
        return all(schema.valid(v, tuple(self.of(i))) for i, v in enumerate(value))

    def opposite(self, schema, place):
        rest = self.rest if self.rest is not schema.no else None  # for that is a bound, too
        if rest and self.first:
            return super().opposite(schema, place)
        if rest:
            return [[Contains(schema.negative(self.rest), 1, None, place, False)]]
        return [
            [
                Bound(Fraction(i + 1)),
                Items((schema.yes,) * i + (schema.negative(sub),), None, False),
            ]
            for i, sub in enumerate(self.first)
        ]


@dataclass(frozen=True, eq=False)
class Contains(Condition):
    """lo to hi items satisfy a subschema."""

    sub: Sub
    lo: int
    hi: int | None
    place: tuple[str, str]
    evaluates: bool = True

    def holds(self, value, schema):
        count = sum(schema.valid(v, (self.sub,)) for v in value)
        return self.lo <= count <= (count if self.hi is None else self.hi)

    def opposite(self, schema, place):
        ranges = [] if self.hi is None else [(self.hi + 1, None)]
        ranges += [(0, self.lo - 1)] if self.lo else []
        return [[Contains(self.sub, lo, hi, place, False)] for lo, hi in ranges]


@dataclass(frozen=True)
class Unique(Condition):
    """No two items are equal."""

    place: tuple[str, str] = field(compare=False)

    def holds(self, value, schema):
        return len(set(map(canonical, value))) == len(value)


def matches(texts: Node, text: str) -> bool:
    rests = {texts}
    for char in map(ord, text):
        rests = {then for rest in rests for lo, hi, then in rest.first() if lo <= char <= hi}
    return any(rest.null for rest in rests)


def only(parts, kind: type) -> list:
    return [part for part in parts if type(part) is kind]


def denied(parts, kind: type) -> list:
    """The conditions of a kind that are negated."""
    return [part.condition for part in only(parts, Not) if type(part.condition) is kind]


def limits(parts) -> tuple:
    """(lo, whether without lo itself, hi, whether without hi itself) of the bounds."""
    bounds = only(parts, Bound)
    lo, lo_open = max(((b.n, b.open) for b in bounds if not b.upper), default=(None, False))
    hi, closed = min(((b.n, not b.open) for b in bounds if b.upper), default=(None, True))
    return lo, lo_open, hi, not closed


def sizes(parts) -> tuple[int, int | None]:
    """(shortest, longest) of the bounds of a length."""
    lo, lo_open, hi, hi_open = limits(parts)
    return max(int(lo or 0) + lo_open, 0), None if hi is None else int(hi) - hi_open


def subs_of(parts, key) -> tuple[Sub, ...]:
    """The subschemas of a member by its name, or of an item by its index."""
    holders = only(parts, Members) + only(parts, Items)
    return tuple(dict.fromkeys(sub for part in holders for sub in part.of(key)))


# ---------------------------------------------------------------- JSON Schema: what keywords hold


def is_a(*kinds: str):
    return lambda value: kind_of(value) in kinds


def list_of(check):
    return lambda value: isinstance(value, list) and all(map(check, value))


def map_of(check):
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def is_count(value) -> bool:
    return kind_of(value) == "number" and value >= 0 and value == int(value)


def is_type(value) -> bool:
    return list_of(is_a("string"))(value) and not {*value} - {*KINDS, "integer"}


KIND_OF = {type(None): "null", bool: "boolean", int: "number", float: "number"}
KIND_OF |= {str: "string", list: "array", dict: "object"}
KINDS = tuple(dict.fromkeys(KIND_OF.values()))
is_schema, are_names = is_a("boolean", "object"), list_of(is_a("string"))
FORMS = [
    ("type", "a type, or a list of types", lambda v: is_type([v]) or is_type(v)),
    ("enum", "a list", is_a("array")),
    ("minimum maximum", "a number", is_a("number")),
    ("exclusiveMinimum exclusiveMaximum", "a number, or a truth value", is_a("number", "boolean")),
    ("multipleOf", "a number above 0", lambda v: kind_of(v) == "number" and v > 0),
    ("minLength maxLength minItems maxItems", "a count", is_count),
    ("minProperties maxProperties minContains maxContains", "a count", is_count),
    ("pattern format $ref $id $anchor $schema", "a string", is_a("string")),
    ("uniqueItems", "a truth value", is_a("boolean")),
    ("required", "a list of names", are_names),
    ("dependentRequired", "an object of lists of names", map_of(are_names)),
    ("allOf anyOf oneOf prefixItems", "a list of schemas", lambda v: v and list_of(is_schema)(v)),
    ("contains propertyNames additionalProperties additionalItems", "a schema", is_schema),
    ("not if then else unevaluatedProperties unevaluatedItems", "a schema", is_schema),
    ("items", "a schema, or a list of schemas", lambda v: is_schema(v) or list_of(is_schema)(v)),
    ("properties patternProperties dependentSchemas", "an object of schemas", map_of(is_schema)),
    ("dependencies", "schemas or lists of names", map_of(lambda v: is_schema(v) or are_names(v))),
]
FORM = {keyword: (form, check) for words, form, check in FORMS for keyword in words.split()}
MAPS = {"properties", "patternProperties", "dependentSchemas", "dependencies", "$defs"}
MAPS |= {"definitions"}  # of names to schemas
HOLD_SCHEMAS = {keyword for keyword, (form, _) in FORM.items() if "schema" in form} - MAPS


# ---------------------------------------------------------------- JSON Schema: alternatives


class Typed(NamedTuple):
    """The values of one kind that meet all conditions. A schema is a union of these."""

    kind: str
    parts: tuple = ()


ANYTHING = tuple(map(Typed, KINDS))
ALTERNATIVES = 256  # most of one schema
LINKS = 20_000  # most states of an object or an array
MANY_ITEMS = 64  # in an array of more, an item is one state
UNIQUE = 2000  # most sets of values that an array has used
BROKEN = r"-?[0-9]{1,9}\.[0-9]{0,5}[1-9]0{0,5}"  # no integers, also as a double
LEVELS = 64  # deepest nesting of a schema, or longest chain of references
TOO_DEEP = f"it is nested deeper than {LEVELS} levels"
SCHEMA_BYTES = 256 << 10
OLD = ("draft-04", "draft-06", "draft-07")  # there nothing counts beside `$ref`


class Deferred(Exception):
    """A schema is asked about while it is being worked out."""


class Schema:
    """A JSON Schema on its way to rules.

    Each subschema becomes a union of `Typed` alternatives: `anyOf` adds alternatives, every other
    keyword meets each of them, and what is negated comes back as alternatives again. The texts of
    an alternative are built from its conditions.

    Example: {"type": ["integer", "null"], "minimum": 1, "not": {"const": 3}}
    -> number: Multiple(1), Bound(1), Not(Among(3)) | null

    Stricter than the specification: members come in the order of `properties`, then those that
    are required elsewhere, then others; a listed object has its own order. A format is enforced,
    as far as it is in FORMATS. Looser: of the other members, two may have one name.
    """

    def __init__(self, source, lenient: bool, whitespace: str):
        if whitespace not in SLOTS:
            raise ValueError(f"whitespace is one of {', '.join(SLOTS)}, not {whitespace!r}")
        self.lenient, self.slot = lenient, SLOTS[whitespace]
        self.comma = seq(literal(","), self.slot)
        self.colon = seq(self.slot, literal(":"), self.slot)
        self.deadline = thread_time() + COMPILE_S
        self.ignored: dict[str, None] = {}
        self.subs: dict[tuple, Sub] = {}
        self.bases: dict[int, str] = {}  # id of a schema's dictionary -> its URI
        self.places: dict[str, tuple] = {}  # URI -> (schema, path)
        self.known: dict[tuple, tuple] = {}  # (subschema, wide) -> its alternatives
        self.open: dict[tuple, int] = {}  # those in work, and the level of values they are at
        self.level = 0
        self.joint: dict[tuple, tuple] = {}  # subschemas -> what meets all of them
        self.maybe: dict[tuple, bool] = {}  # subschemas -> whether there may be a value
        self.values: dict[tuple, Node] = {}  # subschemas -> texts
        self.rules: dict = {}  # alternatives, or texts -> rule
        self.queue: list = []  # rules whose texts are not built yet
        raw = self.load(source)
        self.yes, self.no = self.sub(True, "#", ""), self.sub(False, "#", "")
        self.root = self.sub(raw, "#", "")

    def compile(self) -> Rule:
        root = Rule("#", self.value((self.root,)))
        while self.queue:
            rule, options = self.queue.pop()
            rule.body = alt(*(self.text(option, rule.name) for option in options))
        return root

    def tick(self) -> None:
        if thread_time() > self.deadline:
            raise SchemaError("#", "", f"it takes more than {COMPILE_S:g} s to compile")

    def refuse(self, place: tuple[str, str], reason: str) -> None:
        """Something that is not enforced."""
        if not self.lenient:
            raise SchemaError(*place, reason)
        self.ignored["/".join(place)] = None

    # -------------------------------------------------- the document

    def load(self, source):
        """The schema as plain JSON."""
        try:
            raw = json.loads(source) if isinstance(source, str) else source
            text = json.dumps(raw, allow_nan=False, ensure_ascii=False)
            size = len(text.encode())
        except RecursionError:
            raise SchemaError("#", "", TOO_DEEP) from None
        except UnicodeEncodeError as error:
            near = ascii(text[max(error.start - 20, 0) : error.end])
            raise SchemaError("#", "", f"half of a surrogate pair is no text: {near}") from None
        except (TypeError, ValueError) as error:
            given = f" in {source[:40]!r}" if isinstance(source, str) else ""
            raise SchemaError("#", "", f"it is not JSON: {error}{given}") from None
        if size > SCHEMA_BYTES:
            raise SchemaError("#", "", f"{size} bytes are more than {SCHEMA_BYTES}")
        raw = json.loads(text)
        dialect = raw.get("$schema") if isinstance(raw, dict) else None
        if "draft-03" in str(dialect):
            raise SchemaError("#", "$schema", "draft-03 is not supported")
        self.old = next((name for name in OLD if name in str(dialect)), None)
        self.places[""] = raw, "#"
        self.index(raw)
        return raw

    def index(self, raw) -> None:
        """Notes the identifiers; those in what is no schema, such as `const`, are none."""
        todo = [(raw, "#", "", 0, "schema")]
        while todo:
            value, path, base, level, role = todo.pop()
            if level > LEVELS:
                raise SchemaError("#", "", TOO_DEEP)
            inner = enumerate(value) if isinstance(value, list) else ()
            if isinstance(value, dict):
                base = self.identify(value, path, base) if role == "schema" else base
                inner = value.items()
            for key, v in inner:
                then = role
                if isinstance(value, dict) and role == "map":
                    then = "schema"
                elif isinstance(value, dict) and role == "schema":
                    then = "map" if key in MAPS else "schema" if key in HOLD_SCHEMAS else "data"
                todo.append((v, f"{path}/{pointer(key)}", base, level + 1, then))

    def identify(self, raw: dict, path: str, base: str) -> str:
        """Notes the names of a schema; returns its URI."""
        name = raw.get("id" if self.old == "draft-04" else "$id")
        if isinstance(name, str) and not (self.old and "$ref" in raw):
            local = name.startswith("#")
            base, anchor = (base, name) if local else (joined_uri(base, name, (path, "$id")), "")
            base = base.removesuffix("#")
            self.places[base + anchor] = raw, path
        for keyword in raw.keys() & {"$anchor", "$dynamicAnchor"}:
            self.places[f"{base}#{raw[keyword]}"] = raw, path
        self.bases[id(raw)] = base
        return base

    def sub(self, raw, path: str, base: str) -> Sub:
        if not is_schema(raw):
            raise SchemaError(path, "", "it is not a schema")
        base = self.bases.get(id(raw), base)
        key = base, json.dumps(raw)
        if key not in self.subs:
            self.subs[key] = Sub(raw, path, base)
        return self.subs[key]

    def child(self, sub: Sub, *steps: str | int) -> Sub:
        raw, path = sub.raw, sub.path
        for key in steps:
            raw, path = raw[key], f"{path}/{pointer(key)}"
        return self.sub(raw, path, sub.base)

    def negative(self, sub: Sub) -> Sub:
        if isinstance(sub.raw, dict) and list(sub.raw) == ["not"]:
            return self.child(sub, "not")  # what is recursive would grow for ever
        return self.sub({"not": sub.raw}, sub.path, sub.base)

    def target(self, sub: Sub) -> Sub:
        """What `$ref` names."""
        reference, place = sub.raw["$ref"], (sub.path, "$ref")
        local = reference.startswith("#")
        uri = sub.base + reference if local else joined_uri(sub.base, reference, place)
        base, _, fragment = uri.partition("#")
        fragment = unquote(fragment)
        if base not in self.places:
            self.refuse(place, f"{reference[:80]} is in another document, which is not read")
            return self.yes
        named = fragment and not fragment.startswith("/")
        raw, path = self.places.get(f"{base}#{fragment}" if named else base, (None, ""))
        for key in [] if named else fragment.split("/")[1:]:
            key = key.replace("~1", "/").replace("~0", "~")
            base = self.bases.get(id(raw), base)
            if isinstance(raw, list):
                raw = {str(i): item for i, item in enumerate(raw)}.get(key)
            else:
                raw = raw.get(key) if isinstance(raw, dict) else None
            path = f"{path}/{pointer(key)}"
        if not is_schema(raw):
            raise SchemaError(*place, f"{reference[:80]} leads to no schema")
        return self.sub(raw, path, base)

    # -------------------------------------------------- alternatives

    def alts(self, sub: Sub, wide: bool = False) -> tuple[Typed, ...]:
        """The alternatives of a subschema.

        wide: those of `anyOf` in all combinations, as an `unevaluated...` around it asks what all
        that are met have evaluated.
        """
        key = sub, wide
        if key not in self.known:
            self.tick()
            if self.open.get(key, self.level) < self.level:
                raise Deferred
            if key in self.open:
                raise SchemaError(sub.path, "$ref", "it leads back to itself, with nothing between")
            if len(self.open) >= LEVELS:
                raise SchemaError(sub.path, "$ref", f"more than {LEVELS} schemas deep")
            self.open[key] = self.level
            try:
                self.known[key] = self.normal(sub, wide)
            finally:
                del self.open[key]
        return self.known[key]

    def normal(self, sub: Sub, wide: bool) -> tuple[Typed, ...]:
        raw = sub.raw
        if isinstance(raw, bool):
            return ANYTHING if raw else ()
        for keyword, value in raw.items():
            form, check = FORM.get(keyword, ("", bool))
            if form and not check(value):
                raise SchemaError(sub.path, keyword, f"{json.dumps(value)[:80]} is not {form}")
        if self.old and "$ref" in raw:
            return self.alts(self.target(sub), wide)
        for keyword in raw.keys() & {"$dynamicRef", "$recursiveRef"}:
            self.refuse((sub.path, keyword), "dynamic references are not supported")
        closed = "unevaluatedProperties" in raw or "unevaluatedItems" in raw
        found = self.own(sub)
        for keyword, options in self.applied(sub, wide or closed):
            found = self.product(found, options, (sub.path, keyword))
        return tuple(self.evaluated(sub, option) for option in found) if closed else found

    def applied(self, sub: Sub, wide: bool):
        """(keyword, alternatives) of the subschemas that bind the same value."""
        raw, path = sub.raw, sub.path

        def of(*steps):
            return self.alts(self.child(sub, *steps), wide)

        def each(keyword):
            return [of(keyword, i) for i in range(len(raw.get(keyword, ())))]

        if "$ref" in raw:
            yield "$ref", self.alts(self.target(sub), wide)
        for options in each("allOf"):
            yield "allOf", options
        if "anyOf" in raw:
            yield "anyOf", self.any_of(each("anyOf"), wide, path)
        if "oneOf" in raw:
            yield "oneOf", self.one_of(each("oneOf"), path)
        if "not" in raw:
            yield "not", self.without(ANYTHING, of("not"), (path, "not"))
        if "if" in raw and ("then" in raw or "else" in raw):
            place = (path, "if")
            then, other = (of(key) if key in raw else ANYTHING for key in ("then", "else"))
            unmet = self.product(self.without(ANYTHING, of("if"), place), other, place)
            yield "if", self.product(of("if"), then, place) + unmet
        elif "if" in raw and wide:  # it evaluates
            yield "if", of("if") + ANYTHING
        for keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
            for name, needs in raw.get(keyword, {}).items():
                place, there = (path, keyword), [Typed("object", (Required(name),))]
                if isinstance(needs, list):
                    needs = [Typed("object", tuple(map(Required, needs)))]
                else:
                    needs = of(keyword, name)
                absent = self.without(ANYTHING, there, place)
                yield keyword, absent + self.product(needs, there, place)

    def product(self, one, other, place: tuple[str, str]) -> tuple[Typed, ...]:
        """The alternatives that meet one of each."""
        found = {}
        for a in one:
            self.tick()
            for b in other:
                if a.kind == b.kind and (both := self.met(a, b)):
                    found[both] = None
            if len(found) > ALTERNATIVES:
                raise SchemaError(*place, f"it has more than {ALTERNATIVES} alternatives")
        return tuple(found)

    def met(self, a: Typed, b: Typed) -> Typed | None:
        """What meets the conditions of both, if that may be anything."""
        if not a.parts or not b.parts:
            return a if a.parts else b
        both = Typed(a.kind, tuple(dict.fromkeys(a.parts + b.parts)))
        if a.kind not in ("array", "object") and only(both.parts, Among):
            values = self.listed(both)
            return Typed(a.kind, (among(values),)) if values else None
        return both if self.possible(both) else None

    def all_of(self, subs: tuple[Sub, ...]) -> tuple[Typed, ...]:
        found = ANYTHING
        for i, sub in enumerate(subs):
            begin = subs[: i + 1]
            if begin not in self.joint:
                self.joint[begin] = self.product(found, self.alts(sub), (sub.path, ""))
            found = self.joint[begin]
        return found

    def any_of(self, options: list, wide: bool, path: str) -> tuple[Typed, ...]:
        found = ()
        for option in options:
            both = self.product(found, option, (path, "anyOf")) if wide else ()
            found = tuple(dict.fromkeys(found + option + both))
        return joined(found)

    def one_of(self, options: list, path: str) -> tuple[Typed, ...]:
        """Each alternative without what the others allow."""
        flat = [option for one in options for option in one]
        if all(map(only_lists, flat)):
            return joined(flat, Counter(text for _, (part,) in flat for text in part.texts))
        found = ()
        for i, one in enumerate(options):
            for other in options[:i] + options[i + 1 :]:
                one = self.without(one, other, (path, "oneOf"))
            found += one
        return found

    def without(self, options, others, place: tuple[str, str]) -> tuple[Typed, ...]:
        """The options but for the values of the others.

        An option that shares no value with another stays whole; else it is met with each opposite
        of the other's conditions."""
        for kind, parts in others:
            pieces = [piece for part in parts for piece in part.opposite(self, place)]
            outside = [Typed(kind, tuple(piece)) for piece in pieces]
            kept: tuple[Typed, ...] = ()
            for option in options:
                apart = not self.product([option], [Typed(kind, parts)], place)
                kept += (option,) if apart else self.product([option], outside, place)
            options = self.reduced(kept)
        return options

    def reduced(self, options, wide: bool = True) -> tuple[Typed, ...]:
        """The alternatives that are not part of another one; wide: that evaluates as much."""
        sets = {option: frozenset(option.parts) for option in options}

        def covers(one: Typed, other: Typed) -> bool:
            return (
                one.kind == other.kind
                and sets[one] < sets[other]
                and not (wide and any(part.evaluates for part in sets[other] - sets[one]))
            )

        return tuple(a for a in sets if not any(covers(b, a) for b in sets))

    def evaluated(self, sub: Sub, option: Typed) -> Typed:
        """The alternative, with a condition for what none of its conditions has evaluated."""
        kind, parts = option
        keyword = {"object": "unevaluatedProperties", "array": "unevaluatedItems"}.get(kind)
        seen = [part for part in parts if part.evaluates]
        if keyword not in sub.raw or any(part.rest for part in seen if type(part) is not Contains):
            return option
        rest = self.child(sub, keyword)
        if kind == "object":
            names = {name: self.yes for part in seen for name in part.names}
            patterns = tuple((texts, self.yes) for part in seen for texts, _ in part.patterns)
            return Typed(kind, (*parts, Members(names, patterns, rest)))
        raws = [rest.raw, *(part.sub.raw for part in only(seen, Contains))]
        first = max((part.first for part in only(seen, Items)), key=len, default=())
        rest = self.sub({"anyOf": raws}, rest.path, rest.base)
        return Typed(kind, (*parts, Items((self.yes,) * len(first), rest)))

    def possible(self, option: Typed) -> bool:
        """Whether there may be such a value: False is certain, True is not."""
        kind, parts = option
        if any(part.condition in parts for part in only(parts, Not)):
            return False
        try:
            listed = self.listed(option)
        except Deferred:
            return True
        if listed is not None:
            return listed != []
        if kind in ("number", "string"):
            good = (part for part in parts if type(part) is not Not or part.condition.negatable)
            return self.text(Typed(kind, tuple(good))) is not EMPTY
        lo, hi = sizes(parts)
        needed = [part.name for part in only(parts, Required)]
        if hi is not None and hi < max(lo, len(needed)):
            return False
        needed = range(min(lo, 4)) if kind == "array" else needed
        return all(self.some(subs_of(parts, key)) for key in needed)

    def some(self, subs: tuple[Sub, ...]) -> bool:
        """Whether there may be a value of these subschemas, looking a few levels down."""
        if subs not in self.maybe:
            if self.level >= 3:
                return True
            self.level += 1
            try:
                self.maybe[subs] = any(self.possible(option) for option in self.all_of(subs))
            except Deferred:
                return True
            finally:
                self.level -= 1
        return self.maybe[subs]

    def valid(self, value, subs: tuple[Sub, ...]) -> bool:
        """Whether a value satisfies all subschemas."""
        self.level += 1
        try:
            return any(self.meets(value, option) for option in self.all_of(subs))
        finally:
            self.level -= 1

    def meets(self, value, option: Typed) -> bool:
        kind, parts = option
        return kind == kind_of(value) and all(part.holds(value, self) for part in parts)

    def listed(self, option: Typed) -> list | None:
        """The values of an alternative, if they are listed."""
        kind, parts = option
        listing = next(iter(only(parts, Among)), None)
        values = listing.values if listing else CONSTANTS.get(kind)
        if values is None:
            return None
        rest = Typed(kind, tuple(part for part in parts if part is not listing))
        return [value for value in values if self.meets(value, rest)]

    # -------------------------------------------------- keywords

    def own(self, sub: Sub) -> tuple[Typed, ...]:
        """The alternatives by the keywords that are about one kind of value each."""
        raw = sub.raw
        types = raw.get("type", list(KINDS))
        types = dict.fromkeys([types] if isinstance(types, str) else types)
        if "number" in types:
            types.pop("integer", None)
        if raw.get("nullable"):  # OpenAPI's: here an annotation
            self.ignored[f"{sub.path}/nullable"] = None
        lists = [raw["enum"]] if "enum" in raw else []
        lists += [[raw["const"]]] if "const" in raw else []
        found = []
        for name in types:
            kind = "number" if name == "integer" else name
            parts = [Multiple(Fraction(1))] if name == "integer" else []
            parts += [among([v for v in values if kind_of(v) == kind]) for values in lists]
            parts += getattr(self, f"{kind}_parts", lambda sub: ())(sub)
            if all(part.values for part in only(parts, Among)):
                found.append(Typed(kind, tuple(parts)))
        return tuple(found)

    def number_parts(self, sub: Sub):
        raw = sub.raw
        for name, upper in (("Minimum", False), ("Maximum", True)):
            bound = raw.get(f"exclusive{name}", False)
            if name.lower() in raw:  # draft-04: `exclusiveMinimum: true` is about `minimum`
                yield Bound(exact(raw[name.lower()]), bound is True, upper)
            if not isinstance(bound, bool):
                yield Bound(exact(bound), True, upper)
        if "multipleOf" in raw:
            yield Multiple(exact(raw["multipleOf"]))

    def size_parts(self, sub: Sub, noun: str):
        for name, upper in (("min", False), ("max", True)):
            if f"{name}{noun}" in sub.raw:
                yield Bound(exact(sub.raw[f"{name}{noun}"]), False, upper)

    def string_parts(self, sub: Sub):
        yield from self.size_parts(sub, "Length")
        if "pattern" in sub.raw:
            place = sub.path, "pattern"
            try:
                aheads, pattern = look_aheads(sub.raw["pattern"])
            except SchemaError as error:
                self.refuse(place, error.reason)
            else:
                for text, wanted in [(pattern, True), *aheads]:
                    for texts in self.pattern(text, place):
                        yield Match(texts) if wanted else Not(Match(texts), place)
        name = sub.raw.get("format")
        if name in FORMATS:
            yield Match(cached(parse_regex, FORMATS[name]))
        elif name is not None:  # an annotation
            self.ignored[f"{sub.path}/format"] = None
        if name == "hostname":
            yield Bound(Fraction(253), False, True)

    def pattern(self, pattern: str, place: tuple[str, str]) -> list[Node]:
        try:
            return [cached(parse_regex, pattern, "#", True)]
        except SchemaError as error:
            self.refuse(place, error.reason)
            return []

    def array_parts(self, sub: Sub):
        raw = sub.raw
        yield from self.size_parts(sub, "Items")
        keyword, more = "prefixItems", "items"
        if isinstance(raw.get("items"), list):  # before 2020-12
            keyword, more = "items", "additionalItems"
        first = tuple(self.child(sub, keyword, i) for i in range(len(raw.get(keyword, ()))))
        if keyword == "items" and "prefixItems" in raw:
            raise SchemaError(sub.path, "items", "it is a list, beside prefixItems")
        rest = self.child(sub, more) if more in raw else None
        if rest is self.no:
            yield Bound(Fraction(len(first)), False, True)
        if first or rest:
            yield Items(first, rest)
        if "contains" in raw:
            lo, hi = int(raw.get("minContains", 1)), raw.get("maxContains")
            hi = None if hi is None else int(hi)
            yield Contains(self.child(sub, "contains"), lo, hi, (sub.path, "contains"))
        if raw.get("uniqueItems"):
            yield Unique((sub.path, "uniqueItems"))

    def object_parts(self, sub: Sub):
        raw = sub.raw
        yield from self.size_parts(sub, "Properties")
        names = {name: self.child(sub, "properties", name) for name in raw.get("properties", ())}
        patterns = tuple(
            (texts, self.child(sub, "patternProperties", pattern))
            for pattern in raw.get("patternProperties", ())
            for texts in self.pattern(pattern, (sub.path, "patternProperties"))
        )
        more = "additionalProperties"
        if names or patterns or more in raw:
            yield Members(names, patterns, self.child(sub, more) if more in raw else None)
        yield from map(Required, raw.get("required", ()))
        if "propertyNames" in raw:
            yield Names(self.child(sub, "propertyNames"))

    # -------------------------------------------------- texts

    def value(self, subs: tuple[Sub, ...]) -> Node:
        """The texts of the values that satisfy all subschemas: a call of a rule."""
        if subs not in self.values:
            name = subs[0].path if subs else "any"
            options = self.reduced(self.all_of(subs), wide=False)
            if {option.kind for option in options} & {"array", "object"}:
                if options not in self.rules:
                    self.rules[options] = Rule(name)
                    self.queue.append((self.rules[options], options))
                self.values[subs] = Call(self.rules[options])
            else:
                texts = alt(*(self.text(o, name) for o in options))
                one = len(options) == 1 and len(self.listed(options[0]) or ()) == 1
                # A constant is no call: what it tells apart, such as tools, stays one stack.
                self.values[subs] = texts if one else self.rule(texts, name)
        return self.values[subs]

    def rule(self, texts: Node, name: str) -> Node:
        """A call of the rule with these texts: what is called is walked once for all callers."""
        if texts is EMPTY:
            return EMPTY
        if texts not in self.rules:
            self.rules[texts] = Rule(name, texts)
        return Call(self.rules[texts])

    def text(self, option: Typed, path: str = "#") -> Node:
        """The texts of an alternative."""
        self.tick()
        listed = self.listed(option)
        if listed is not None:
            return alt(*map(self.spelled, listed))
        odd = [part for part in only(option.parts, Not) if not part.condition.negatable]
        for part in odd:
            self.refuse(part.place, "what it excludes cannot be told while the text is written")
        option = Typed(option.kind, tuple(part for part in option.parts if part not in odd))
        try:
            return getattr(self, f"{option.kind}_text")(option)
        except SchemaError as error:
            place = path if error.path == "#" else error.path
            raise SchemaError(place, error.keyword, error.reason) from None

    def spelled(self, value) -> Node:
        """A value as JSON, without needless escapes."""
        kind = kind_of(value)
        if kind == "number" and exact(value).denominator == 1 and abs(value) < 1e21:
            point = [literal(f"{int(value)}.0")] if self.old != "draft-04" else []
            return alt(literal(str(int(value))), *point)
        if kind not in ("array", "object"):
            return literal(json.dumps(value, ensure_ascii=False))
        inner = value.items() if kind == "object" else enumerate(value)
        begin, end = "{}" if kind == "object" else "[]"
        parts = [literal(begin), self.slot]
        for key, item in inner:
            parts += [self.comma] if len(parts) > 2 else []
            parts += [self.named(key)] if kind == "object" else []
            parts += [self.spelled(item), self.slot]
        return seq(*parts, literal(end))

    def named(self, name: str) -> Node:
        return seq(literal(json.dumps(name, ensure_ascii=False)), self.colon)

    def number_text(self, option: Typed) -> Node:
        parts = option.parts
        lo, lo_open, hi, hi_open = limits(parts)
        step = reduce(common_multiple, (part.of for part in only(parts, Multiple)), None)
        cuts = {exact(value) for part in denied(parts, Among) for value in part.values}
        cuts = sorted(c for c in cuts if (lo is None or c >= lo) and (hi is None or c <= hi))
        begins = [(lo, lo_open), *((cut, True) for cut in cuts)]
        ends = [*((cut, True) for cut in cuts), (hi, hi_open)]
        integer, step = bool(step) and step.denominator == 1, None if step == 1 else step
        point = self.old != "draft-04"  # there 1.0 is no integer
        texts = alt(
            *(
                cached(number, lo, hi, lo_open, hi_open, integer, step, "#", point)
                for (lo, lo_open), (hi, hi_open) in zip(begins, ends)
            )
        )
        if denied(parts, Multiple):
            return both((texts, cached(parse_regex, BROKEN))).text(0, 0)
        return texts

    def string_text(self, option: Typed) -> Node:
        parts = option.parts
        if denied(parts, Among) or denied(parts, Match):
            return alt(*(texts for _, texts in self.strings(parts)))
        return cached(string, *sizes(parts), tuple(part.texts for part in only(parts, Match)))

    def strings(self, parts, names=(), patterns=()):
        """The strings that meet conditions, other than the names, by the patterns they match."""
        lo, hi = sizes(parts)
        if hi is not None and hi < lo:
            return
        wanted = [part.texts for part in only(parts, Match)]
        if lo or hi is not None:
            wanted.append(repeat(symbols(*ANY), lo, hi))
        other = [part.texts for part in denied(parts, Match)]
        names = [*names, *(value for part in denied(parts, Among) for value in part.values)]
        first = len(patterns)
        must = set(range(first, first + len(wanted)))
        for matched, texts in keys(names, [*patterns, *wanted, *other]):
            if {i for i in matched if i >= first} == must:
                yield [patterns[i] for i in sorted(matched - must)], texts

    def array_text(self, option: Typed) -> Node:
        parts = option.parts
        lo, hi = sizes(parts)
        if hi is not None and hi < lo:
            return EMPTY
        first = max([0, *(len(part.first) for part in only(parts, Items))])
        counts = [part for part in only(parts, Contains) if part.lo or part.hi is not None]
        if only(parts, Unique) and (hi is None or hi > 1):
            values = None if first or counts else self.few(option, hi)
            if values is not None:
                return self.distinct(values, lo, hi)
            self.refuse(only(parts, Unique)[0].place, "all items before would have to be kept")
        for extra in counts[1:]:
            self.refuse(extra.place, "two of them for one array are not supported")
        if not counts:
            return self.items(parts, Contains(self.yes, 0, None, ("#", "")), max(first, 1))
        return self.items(parts, counts[0], max(first, 1, lo, hi or 0))

    def items(self, parts, count: Contains, start: int) -> Node:
        """The arrays, from the end on: what may follow i items, of which so many are counted.

        start: the items up to here are told apart, those behind it are alike."""
        lo, hi = sizes(parts)
        top = count.lo if count.hi is None else count.hi
        if start * (top + 1) > LINKS:
            raise SchemaError(*count.place, f"it takes more than {LINKS} states")

        def moves(i: int, counted: int):
            """(texts of item i, the number counted with it)."""
            subs = subs_of(parts, i)
            rest = subs if count.hi is None else (*subs, self.negative(count.sub))
            yield self.value(rest), counted
            if counted < top:
                yield self.value((*subs, count.sub)), counted + 1

        def end(i: int, counted: int) -> Node:
            return literal("]") if i >= lo and counted >= count.lo else EMPTY

        tails = [EMPTY] * (top + 1)
        room = None if hi is None else max(hi - start, 0)
        for c in range(top, -1, -1):
            (item, _), *counting = moves(start, c)
            more = [seq(self.comma, node, self.slot, tails[then]) for node, then in counting]
            item = seq(self.comma, item, self.slot)
            if max(lo, hi or 0) > MANY_ITEMS:
                item = self.rule(item, "item")
            more = alt(end(max(start, lo), c), *(more if room != 0 else []))
            tails[c] = seq(repeat(item, max(lo - start, 0), room), more)
        for i in range(start - 1, -1, -1):
            self.tick()
            comma = self.comma if i else NOTHING
            after, tails = tails, [end(i, c) for c in range(top + 1)]
            for c in range(top + 1 if hi is None or i < hi else 0):
                more = [seq(item, self.slot, after[then]) for item, then in moves(i, c)]
                tails[c] = alt(tails[c], seq(comma, alt(*more)))
        return seq(literal("["), self.slot, tails[0])

    def few(self, option: Typed, hi: int | None) -> list | None:
        """The values of the items, if they are listed, and so few that each set is a state."""
        lists = [self.listed(item) for item in self.all_of(subs_of(option.parts, 0))]
        if None in lists:
            return None
        values = {canonical(value): value for values in lists for value in values}
        most = len(values) if hi is None else min(hi, len(values))
        few = sum(math.comb(len(values), n) for n in range(most + 1)) <= UNIQUE
        return list(values.values()) if few else None

    def distinct(self, values: list, lo: int, hi: int | None) -> Node:
        """The arrays of lo to hi different values: what may follow, by the set of used ones."""
        hi = len(values) if hi is None else min(hi, len(values))
        texts = [seq(self.spelled(value), self.slot) for value in values]
        tails: dict[tuple, Node] = {}
        for size in range(hi, -1, -1):
            for used in combinations(range(len(values)), size):
                unused = [i for i in range(len(values)) if i not in used and size < hi]
                more = alt(*(seq(texts[i], tails[tuple(sorted((*used, i)))]) for i in unused))
                end = literal("]") if size >= lo else EMPTY
                tails[used] = alt(end, seq(self.comma, more) if used else more)
        return seq(literal("["), self.slot, tails[()])

    def object_text(self, option: Typed) -> Node:
        parts = option.parts
        members = only(parts, Members)
        required = dict.fromkeys(part.name for part in only(parts, Required))
        absent = dict.fromkeys(part.name for part in denied(parts, Required))
        bound = tuple(part.sub for part in only(parts, Names))
        names = dict.fromkeys(name for part in members for name in part.names) | required | absent
        rests = []  # the alternatives of other names that are not listed
        for spelling in self.all_of(bound):
            listed = self.listed(spelling) if spelling.kind == "string" else []
            names |= dict.fromkeys(listed or ())
            rests += [spelling] if listed is None else []
        links = []  # (whether it must be there, its texts)
        for name in names:
            allowed = name not in absent and (not bound or self.valid(name, bound))
            value = self.value(subs_of(parts, name)) if allowed else EMPTY
            if value is not EMPTY:
                links.append((name in required, seq(self.named(name), value, self.slot)))
            elif name in required:
                return EMPTY
        rest = alt(*(self.others(spelling, members, list(names)) for spelling in rests))
        return self.chain(links, rest, *sizes(parts))

    def others(self, spelling: Typed, members: list[Members], names: list[str]) -> Node:
        """The members that have none of the names."""
        if any(part.rest is self.no and not part.patterns for part in members):
            return EMPTY
        found = []
        patterns = list(dict.fromkeys(texts for part in members for texts, _ in part.patterns))
        for matched, texts in self.strings(spelling.parts, names, patterns):
            subs = dict.fromkeys(sub for part in members for sub in part.matched(None, matched))
            value = self.value(tuple(subs))
            found.append(seq(self.rule(texts, "key"), self.colon, value, self.slot))
        return alt(*found)

    def chain(self, links: list[tuple[bool, Node]], rest: Node, lo: int, hi: int | None) -> Node:
        """The objects of lo to hi members: links in order, those that must be and some others,
        then any number of the rest. From the end on: what may follow the first i links, of which
        so many are written, after a member (tails) and where one must come (entries)."""
        needed = sum(must for must, _ in links)
        lo = 0 if lo <= needed else lo
        hi = None if rest is EMPTY and hi is not None and hi >= len(links) else hi
        if hi is not None and hi < max(needed, lo):
            return EMPTY
        top = min(lo if hi is None else hi, len(links))  # written members are counted up to here
        if len(links) * (top + 1) > LINKS:
            raise SchemaError("#", "minProperties", f"it takes more than {LINKS} states")
        close = literal("}")
        last = max((i for i, (must, _) in enumerate(links) if must), default=-1)

        def more(written: int) -> Node:
            room = None if hi is None else hi - written
            return seq(repeat(seq(self.comma, rest), max(lo - written, 0), room), close)

        tails = [more(n) for n in range(top + 1)]
        entries = [seq(rest, more(n + 1)) if n != hi else EMPTY for n in range(top + 1)]
        for i, (must, link) in reversed(list(enumerate(links))):
            self.tick()
            for n in range(min(i, top) + 1):
                entry = seq(link, tails[min(n + 1, top)]) if n != hi else EMPTY
                entries[n] = entry if must else alt(entry, entries[n])
            for n in range(min(i, top) + 1):
                end = close if i > last and n >= lo else EMPTY
                tails[n] = alt(end, seq(self.comma, entries[n]))
        end = close if last < 0 and lo == 0 else EMPTY
        return seq(literal("{"), self.slot, alt(end, entries[0]))


def only_lists(option: Typed) -> bool:
    return len(option.parts) == 1 and type(option.parts[0]) is Among


def joined(options, counts=None) -> tuple[Typed, ...]:
    """The alternatives; of those that only list values, one of each kind. counts: values with 1
    stay."""
    found: dict[str, list] = {}
    others = [option for option in options if not only_lists(option)]
    for kind, (part,) in filter(only_lists, options):
        pairs = zip(part.texts, part.values)
        found.setdefault(kind, []).extend(v for t, v in pairs if not counts or counts[t] == 1)
    lists = (Typed(kind, (among(values),)) for kind, values in found.items() if values)
    return (*others, *lists)


def among(values: list) -> Among:
    values = {canonical(value): value for value in values}
    return Among(tuple(values), tuple(values.values()))


def common_multiple(a: Fraction | None, b: Fraction) -> Fraction:
    if a is None:
        return b
    lcm = math.lcm(a.numerator * b.denominator, b.numerator * a.denominator)
    return Fraction(lcm, a.denominator * b.denominator)


def joined_uri(base: str, reference: str, place: tuple[str, str]) -> str:
    try:
        return urljoin(base, reference)
    except ValueError as error:
        raise SchemaError(
            *place, f"no URI of {base[:80]!r} and {reference[:80]!r}: {error}"
        ) from None


def pointer(key) -> str:
    """A step of a JSON pointer."""
    return str(key).replace("~", "~0").replace("/", "~1")


@lru_cache(1024)
def cached(make, *parameters) -> Node:
    """What many schemas have in common is made once."""
    return make(*parameters)


CONSTANTS = {"null": [None], "boolean": [True, False]}
SLOTS = {  # white space between two tokens
    "compact": NOTHING,
    "default": optional(
        alt(literal(" "), seq(literal("\n"), repeat(symbols((9, 9), (32, 32)), 0, 20)))
    ),
    "any": repeat(symbols((9, 10), (13, 13), (32, 32))),
}


# ---------------------------------------------------------------- JSON Schema: formats


def formats() -> dict[str, str]:
    """The formats that are enforced, as regular expressions of the whole string."""
    year = "(000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"  # 0000 is no date to most
    day, leap = "(0[1-9]|1[0-9]|2[0-8])", "(0[48]|[2468][048]|[13579][26])"
    date = (
        f"({year}-((0[1-9]|1[0-2])-{day}|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)"
        f"|([0-9]{{2}}{leap}|{leap}00)-02-29)"
    )
    offset = "[+-]([01][0-9]|2[0-3]):[0-5][0-9]"
    time_ = (
        f"(([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]+)?([Zz]|{offset})|{leap_seconds()})"
    )
    digits, letter = "[0-9]+", "[A-Za-z0-9]"
    clock = f"T({digits}H({digits}M({digits}S)?)?|{digits}M({digits}S)?|{digits}S)"
    days = f"({digits}Y({digits}M({digits}D)?)?|{digits}M({digits}D)?|{digits}D)"
    octet = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
    ipv4 = f"{octet}(\\.{octet}){{3}}"
    hexes = "[0-9A-Fa-f]{1,4}"
    low = f"({hexes}:{hexes}|{ipv4})"
    ipv6 = [f"({hexes}:){{6}}{low}", f"::({hexes}:){{5}}{low}"]
    ipv6 += [f"(({hexes}:){{0,{n}}}{hexes})?::({hexes}:){{{4 - n}}}{low}" for n in range(5)]
    ipv6 += [f"(({hexes}:){{0,5}}{hexes})?::{hexes}", f"(({hexes}:){{0,6}}{hexes})?::"]
    ipv6 = f"({'|'.join(ipv6)})"
    # Labels with "--" in third place are left out: which ones are valid takes Unicode's tables.
    body = "[A-Za-z0-9-]"
    label = (
        f"{letter}({body}{{0,2}}{letter}|{body}({letter}{body}|-{letter}){body}{{0,58}}{letter})?"
    )
    domain = f"{letter}({body}{{0,61}}{letter})?(\\.{letter}({body}{{0,61}}{letter})?)*"
    atom = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
    quoted = '"([ !#-\\[\\]-~]|\\\\[ -~])*"'
    escape = "%[0-9A-Fa-f]{2}"
    plain = "A-Za-z0-9._~!$&'()*+,;="
    char = f"([{plain}:@-]|{escape})"
    host = f"(\\[({ipv6}|[Vv][0-9A-Fa-f]+\\.[{plain}:-]+)\\]|([{plain}-]|{escape})*)"
    authority = f"(([{plain}:-]|{escape})*@)?{host}(:[0-9]*)?"
    path = f"(//{authority}(/{char}*)*|/({char}+(/{char}*)*)?|{char}+(/{char}*)*)?"
    return {
        "date": date,
        "time": time_,
        "date-time": f"{date}[Tt]{time_}",
        "duration": f"P({digits}W|{days}({clock})?|{clock})",
        "uuid": "[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
        "ipv4": ipv4,
        "ipv6": ipv6,
        "hostname": f"{label}(\\.{label})*",
        "email": f"({atom}(\\.{atom})*|{quoted})@({domain}|\\[({ipv4}|IPv6:{ipv6})\\])",
        "uri": f"[A-Za-z][A-Za-z0-9+.-]*:{path}(\\?({char}|[/?])*)?(#({char}|[/?])*)?",
    }


def leap_seconds() -> str:
    """Second 60 is 23:59:60 in UTC: here for the offsets of whole and half hours."""
    found = ["23:59:60(\\.[0-9]+)?[Zz]"]
    for minutes in range(0, 24 * 60, 30):
        for sign in (1, -1):
            local = (23 * 60 + 59 + sign * minutes) % (24 * 60)
            clock, zone = (f"{m // 60:02}:{m % 60:02}" for m in (local, minutes))
            found.append(f"{clock}:60(\\.[0-9]+)?[{'+' if sign > 0 else '-'}]{zone}")
    return "|".join(found)


FORMATS = formats()


# ---------------------------------------------------------------- JSON strings


def string(lo: int = 0, hi: int | None = None, patterns: list[Node] = ()) -> Node:
    """JSON strings, with their quotes, of lo to hi characters that match all patterns.

    patterns: sets of texts over code points, as `parse_regex` makes them. A character counts as
    one however it is spelled; those that a pattern asks for are spelled in one way, see `char`.
    EMPTY where there is no such string.
    """
    patterns = tuple(p for p in dict.fromkeys(patterns) if p is not ALL)
    if not patterns:
        return quoted(CHAR, lo, hi)
    if len(patterns) == 1 and type(patterns[0]) is Repeat and one_character(patterns[0].key[0]):
        what, least, most = patterns[0].key  # [a-z]{2,20}: the counts meet
        most = min((n for n in (hi, most) if n is not None), default=None)
        return quoted(spell(what, json=True), max(lo, least), most)
    if len(patterns) == 1 and (lo, hi) == (0, None):
        return quoted(spell(patterns[0], json=True))
    return quoted(both(patterns).text(0, lo, hi))


def quoted(node: Node, lo: int = 1, hi: int | None = 1) -> Node:
    return EMPTY if hi is not None and lo > hi else seq(QUOTE, repeat(node, lo, hi), QUOTE)


def one_character(node: Node) -> bool:
    return all(type(n) is Symbol for n in (node.key if type(node) is Alt else [node]))


def keys(names: list[str], patterns: list[Node] = ()) -> list[tuple[frozenset, Node]]:
    """JSON strings other than the names, by the set of (indices of) patterns that they match.

    Each character is spelled in one way, so that no name comes back as an escape. Where a name is
    complete, neither its quote nor a backslash may follow: a model that writes a name in the
    wrong place can then only make it longer, not escape the quote that it wanted.

    Example: keys(["ab"], [parse_regex("^a", search=True)]) -> [({}, "", "b", "ba", ...),
    ({0}, "a", "abc", ...)]
    """
    if not patterns:
        return [(frozenset(), quoted(other(names)))]
    spelled = [seq(*(Symbol(ord(c), ord(c)) for c in name)) for name in dict.fromkeys(names)]
    moves, states = determine((*patterns, *spelled, ALL))
    matched = [{i for i, rest in state if rest.null} for state in states]
    for number, found in enumerate(matched):
        if any(len(patterns) <= i < len(patterns) + len(spelled) for i in found):
            moves[number] = [(minus(ranges, ESCAPED), then) for ranges, then in moves[number]]
            found.clear()
            found.add(None)  # no set of patterns
    sets = [frozenset(found - {len(patterns) + len(spelled)}) for found in matched]
    groups = []
    for which in dict.fromkeys(s for s in sets if None not in s):
        text = Dfa(moves, [s == which for s in sets], char(ANY, json=True)).text(0, 0)
        if text is not EMPTY:
            groups.append((which, quoted(text)))
    return groups


class Other(Node):
    """Texts in a JSON string that are none of these, which begin with what was read so far."""

    def set(self, *names):
        self.null = "" not in names

    def begin(self):
        after: dict[int, list[str]] = {}
        for name in self.key:
            if name:
                after.setdefault(ord(name[0]), []).append(name[1:])
        paths = [([(code, code)], other(names)) for code, names in after.items()]
        paths.append((minus(ANY, [(code, code) for code in after]), other(())))
        for ranges, rest in paths:
            ranges = merged(ranges) if self.null else minus(ranges, ESCAPED)
            for lo, hi, more in char(ranges, json=True).first():
                yield lo, hi, seq(more, rest)


def other(names) -> Node:
    return Other(*sorted(set(names))) if names else repeat(char(ANY, json=True))


class Dfa:
    """Patterns as a finite automaton over code points; states are numbers, 0 is the first.

    moves: for each state [(ranges, next state)]. ends: whether a text may end in it. wild: the node
    of any character, for states from which all texts are good.

    A length bound asks: from this state, does a text of k characters end for some k in need..left?
    The set of states from which one of exactly k ends follows from the set for k - 1, so the sets
    repeat after `start` with a `period`; one table of them answers for every length.

    Example: (ab)* has states 0, 1 and the sets {0}, {1}, {0}, ...: start 0, period 2
    """

    def __init__(self, moves: list[list], ends: list[bool], wild: Node):
        self.moves, self.ends, self.wild = moves, ends, wild
        self.free = {s for s, move in enumerate(moves) if ends[s] and move == [(ANY, s)]}
        arrows = [(s, then) for s, move in enumerate(moves) for _, then in move]
        source, target = np.array(arrows, np.int64).reshape(-1, 2).T
        sets, seen, now = [], {}, np.array(ends)
        limit = CELLS // len(moves)
        while seen.setdefault(now.tobytes(), len(sets)) == len(sets):
            sets.append(now)
            if len(sets) > limit:
                raise SchemaError("#", "pattern", "its lengths need too large a table")
            now = np.zeros(len(moves), bool)
            now[source[sets[-1][target]]] = True
        self.start = seen[now.tobytes()]
        self.period = len(sets) - self.start
        self.table = np.ascontiguousarray(np.array(sets).T)  # (states, start + period)

    def shortest(self, state: int, need: int) -> int | None:
        """The least number of characters, `need` or more, after which a text ends."""
        row = self.table[state]
        at = need if need < self.start else self.start + (need - self.start) % self.period
        for begin, skipped in ((at, -at), (self.start, len(row) - at - self.start)):
            found = begin + int(row[begin:].argmax())
            if row[found]:
                return need + found + skipped
        return None

    def text(self, state: int, need: int, left: int | None = None) -> Node:
        """The texts from a state on, of `need` to `left` characters."""
        length = self.shortest(state, need)
        if length is None or left is not None and length > left:
            return EMPTY
        return (
            repeat(self.wild, need, left) if state in self.free else Text(self, state, need, left)
        )


class Text(Node):
    """The texts that a Dfa reads from a state, of `need` to `left` more characters, in JSON."""

    def set(self, dfa, state, need, left):
        self.null = not need and dfa.ends[state]

    def begin(self):
        dfa, state, need, left = self.key
        for ranges, then in dfa.moves[state]:
            rest = dfa.text(then, max(need - 1, 0), left if left is None else left - 1)
            if rest is not EMPTY:
                for lo, hi, more in char(ranges, json=True).first():
                    yield lo, hi, seq(more, rest)

    def clamp(self, longest):
        dfa, state, need, left = self.key
        if longest is None:
            return Text(dfa, state, 0, None)
        most = longest + dfa.start + dfa.period  # lengths from here on repeat with the period
        if left is not None and left > most and left - need >= dfa.period:
            left = None
        if left is None:
            return Text(dfa, state, min(need, most), None)
        past = max(need - most, 0) // dfa.period * dfa.period
        return Text(dfa, state, need - past, left - past)


@lru_cache(256)
def both(patterns: tuple[Node, ...]) -> Dfa:
    """The texts that match all patterns. Kept: only texts of the same Dfa can be one node."""
    moves, states = determine(patterns)
    ends = [len({i for i, rest in state if rest.null}) == len(patterns) for state in states]
    return Dfa(moves, ends, CHAR)


def determine(patterns: tuple[Node, ...]) -> tuple[list[list], list[frozenset]]:
    """The moves of a Dfa for several patterns at once, and its states: sets of (index, rest)."""
    start = frozenset(enumerate(patterns))
    numbers, states, moves = {start: 0}, [start], []
    deadline = thread_time() + COMPILE_S
    for state in states:  # grows on the way
        found: dict[int, list] = {}
        edges = [(lo, hi, (i, then)) for i, rest in state for lo, hi, then in rest.first()]
        for lo, hi, then in split(edges):
            full = {i for i, rest in then if rest is ALL}
            then = frozenset((i, rest) for i, rest in then if rest is ALL or i not in full)
            number = numbers.setdefault(then, len(states))
            if number == len(states):
                states.append(then)
            found.setdefault(number, []).append((lo, hi))
        moves.append([(merged(ranges), number) for number, ranges in found.items()])
        if len(states) > DFA_STATES or thread_time() > deadline:
            limit = f"{COMPILE_S} s" if len(states) <= DFA_STATES else f"{DFA_STATES} states"
            reason = f"with lengths, names or other patterns it needs more than {limit}"
            raise SchemaError("#", "pattern", reason)
    return moves, states


# ---------------------------------------------------------------- characters as bytes


def merged(ranges) -> tuple[tuple[int, int], ...]:
    """The same code points in order, in the fewest ranges."""
    done: list[tuple[int, int]] = []
    for lo, hi in sorted(ranges):
        if done and lo <= done[-1][1] + 1:
            done[-1] = done[-1][0], max(hi, done[-1][1])
        else:
            done.append((lo, hi))
    return tuple(done)


def inverse(ranges) -> tuple[tuple[int, int], ...]:
    """All other numbers up to the last code point."""
    done, begin = [], 0
    for lo, hi in [*merged(ranges), (LAST + 1, LAST + 1)]:
        if begin < lo:
            done.append((begin, lo - 1))
        begin = hi + 1
    return tuple(done)


def minus(ranges, others) -> tuple[tuple[int, int], ...]:
    """The code points of the ranges that are not in the others."""
    return inverse([*inverse(ranges), *others])


LAST = 0x10FFFF  # code point
SURROGATES = ((0xD800, 0xDFFF),)
ANY = minus([(0, LAST)], SURROGATES)
ALL = repeat(symbols(*ANY))  # all texts
ESCAPED = ((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C))  # what cannot stand raw in a JSON string
QUOTE = literal('"')


@lru_cache(1 << 12)
def spell(node: Node, json: bool = False) -> Node:
    """A set of texts over code points as one over bytes: UTF-8, in JSON with its escapes."""
    if type(node) is Seq:
        done, run = [], ""
        for part in [*node.parts(), NOTHING]:
            if type(part) is Symbol and part.key[0] == part.key[1]:
                run += chr(part.key[0])
            else:
                done += [literal(escape(run) if json else run), spell(part, json)]
                run = ""
        return seq(*done)
    if type(node) in (Symbol, Alt):
        options = node.key if type(node) is Alt else [node]
        ranges = merged(o.key for o in options if type(o) is Symbol)
        one = CHAR if json and ranges == ANY else char(ranges, json)
        return alt(one, *(spell(o, json) for o in options if type(o) is not Symbol))
    if type(node) is Repeat:
        what, lo, hi = node.key
        return repeat(spell(what, json), lo, hi)
    return node


@lru_cache(1 << 14)
def char(ranges: tuple[tuple[int, int], ...], json: bool = False) -> Node:
    """One of these code points in UTF-8.

    In JSON each is spelled in one way: a quote, a backslash and controls with the short escape
    or else four digits in lower case, all others raw.
    """
    if not json:
        return utf8(ranges)
    return alt(utf8(minus(ranges, ESCAPED)), escapes(minus(ESCAPED, inverse(ranges))))


@cache
def escapes(ranges: tuple[tuple[int, int], ...]) -> Node:
    """One of these characters in its escape."""
    return prefix_tree([escape(chr(c)).encode() for lo, hi in ranges for c in range(lo, hi + 1)])


def escape(text: str) -> str:
    """The text as it stands between quotes in JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def utf8(ranges) -> Node:
    """One of these code points as 1 to 4 bytes.

    Example: 0x7f-0x80 -> 7f | c2 80; 0x800-0xffff -> e0 a0-bf 80-bf | e1-ef 80-bf 80-bf
    """
    options, begin = [], 0
    for more, (lead, end) in enumerate(
        [(0, 0x80), (0xC0, 0x800), (0xE0, 1 << 16), (0xF0, 1 << 21)]
    ):
        some = [(max(lo, begin), min(hi, end - 1)) for lo, hi in ranges]
        options.append(encoded(tuple((lo, hi) for lo, hi in some if lo <= hi), more, lead))
        begin = end
    return alt(*options)


@lru_cache(1 << 14)
def encoded(ranges: tuple[tuple[int, int], ...], more: int, lead: int) -> Node:
    """Numbers as a byte that counts from `lead`, and `more` bytes with 6 bits each."""
    if not more:
        return symbols(*((lead + lo, lead + hi) for lo, hi in ranges))
    size, parts = 1 << 6 * more, {}
    for lo, hi in ranges:
        for n in range(lo // size, hi // size + 1):
            part = max(lo - n * size, 0), min(hi - n * size, size - 1)
            parts.setdefault(n, []).append(part)
    return forks(
        [(lead + n, lead + n, encoded(tuple(part), more - 1, 0x80)) for n, part in parts.items()]
    )


def prefix_tree(options: list[bytes], depth: int = 0) -> Node:
    """One of several texts, each beginning written once."""
    if len(options) < 2 or depth == NESTED:
        return alt(*map(literal, options))
    shared = commonprefix(options)
    after: dict[int, list[bytes]] = {}
    for option in options:
        if option != shared:
            tail = option[len(shared) :]
            after.setdefault(tail[0], []).append(tail[1:])
    ends = NOTHING if shared in options else EMPTY
    edges = [(byte, byte, prefix_tree(tails, depth + 1)) for byte, tails in after.items()]
    return seq(literal(shared), alt(ends, forks(edges)))


def forks(edges: list[tuple[int, int, Node]]) -> Node:
    """A first byte in lo..hi, then the rest; neighbours with the same rest are one."""
    done: list[tuple[int, int, Node]] = []
    for lo, hi, rest in sorted(edges, key=lambda edge: edge[0]):
        if done and done[-1][1] + 1 == lo and done[-1][2] is rest:
            lo = done.pop()[0]
        done.append((lo, hi, rest))
    return alt(*(seq(Symbol(lo, hi), rest) for lo, hi, rest in done))


# ---------------------------------------------------------------- JSON numbers

DIGIT = Symbol(48, 57)
WHOLE, FRACTION = 64, 20  # most digits before and after the point, unless a bound needs more
POWERS = (-324, -5), (16, 308)  # of ten: numbers that json.dumps writes with an exponent
BOUND = 1000  # most digits of a bound


def number(
    lo=None,
    hi=None,
    lo_open=False,
    hi_open=False,
    integer=False,
    multiple=None,
    path="#",
    point=True,
) -> Node:
    """JSON numbers from lo to hi (exact; None: no bound; open: without the bound itself).

    integer: 1 and (point) 1.0, but not 1.5 or 1e0. multiple: what they are divisible by. EMPTY if
    there is none. Raises SchemaError for a bound of over 1000 digits.

    Numbers without bounds are plain digits. Else a state is the set of values that what follows
    may still have: an arithmetic progression, in units of the last digit there may be. A digit
    leaves the values that begin with it; one that leaves none is refused, so nothing is a dead
    end. The text may end where 0 is left. A set of all values is plain digits again, and equal
    sets are one state. From 1.7 to 3 with one digit after the point (in units of 0.1):

        text    values left    may follow
                17 .. 30       1  2  3
        1       7 .. 9         .            not the end: 1 is too small
        1.      7 .. 9         7  8  9
        2       0 .. 9         .  end       all values: plain digits
        3       0              .  end
        3.      0              0

    Beside a bound an exponent is taken where json.dumps writes one (1e-07, but not 7e-1) and all
    digits before it are inside by themselves; beside `multiple` never. A text that double precision
    reads as an open bound is outside: nothing below 1 begins with 0.99999999999999999.
    """
    given = [Fraction(x) for x in (lo, hi, multiple) if x is not None]
    if not given:
        whole = alt(literal("0"), seq(Symbol(49, 57), repeat(DIGIT, 0, WHOLE - 1)))
        end = optional(literal(".0")) if point else NOTHING
        if not integer:
            end = seq(decimals(FRACTION), optional(exponent(POWERS[0][0], POWERS[1][1])))
        return seq(optional(literal("-")), whole, end)
    if any(max(abs(x.numerator), x.denominator) >= 10**BOUND for x in given):
        raise SchemaError(path, "", f"a number of more than {BOUND} digits as a bound")
    lo = -math.inf if lo is None else Fraction(lo)
    hi = math.inf if hi is None else Fraction(hi)
    multiple = multiple and Fraction(multiple)
    if integer:  # in units of 0.1, for the .0
        fraction, multiple = int(point), Fraction(multiple or 1).numerator
    else:
        fraction = max(FRACTION, *(places(x) + 1 for x in given))
        lo, lo_open = reads_as(lo, math.inf) if lo_open else (lo, False)
        hi, hi_open = reads_as(hi, -math.inf) if hi_open else (hi, False)
    above = unsigned((lo, lo_open), (hi, hi_open), fraction, multiple)
    below = unsigned((-hi, hi_open), (-lo, lo_open), fraction, multiple)
    return alt(above, seq(literal("-"), below))


def places(value: Fraction) -> int:
    """Digits after the point."""
    return next(n for n in range(4 * BOUND) if 10**n % value.denominator == 0)


def reads_as(bound: Fraction, toward: float) -> tuple:
    """The bound, open or not, of what double precision tells from a bound, in one direction."""
    if abs(bound) > 10**308:
        return bound, True
    near = float(bound)
    middle = (Fraction(near) + Fraction(math.nextafter(near, toward))) / 2
    return middle, float(middle) == near


def unsigned(low: tuple, high: tuple, fraction: int, multiple) -> Node:
    """The numbers without a sign between two bounds (value, open).

    The length of the digits before the point is chosen first; then each digit has its place.
    """
    low, one = max(low, (Fraction(0), False)), 10**fraction
    step = int(multiple * one) if multiple else 1
    most = max(WHOLE, len(str(int(max(low[0], multiple or 0)))) + 1)
    values = between(low, min(high, (Fraction(10**most), True)), Fraction(1, one), step)
    inside = low <= (1, False) and high >= (10, False)  # else 7 might be left to end in e-05 only
    options = scientific(low, high, fraction) if inside and not multiple else []
    shortest, longest = (len(str(values[i] // one)) for i in (0, -1)) if values else (1, 0)
    whole = []  # lengths of which all numbers are inside: chosen later, digit by digit
    for n in range(shortest, longest + 1):
        first, end = 10 ** (n - 1) * one if n > 1 else 0, 10**n * one
        here = part(values, first, end)
        if n > 1 and here == part(range(0, end, step), first, end):
            whole.append(n)
        else:
            options.append(decimal(here, n + fraction, fraction))
    if whole:
        options.append(multiples(step, whole[0], whole[-1], fraction))
    return alt(*options)


def scientific(low: tuple, high: tuple, fraction: int) -> list[Node]:
    """The numbers between two bounds as one digit, perhaps a point and more, and an exponent."""
    options, one = [], 10**fraction
    high = min(high, (Fraction(sys.float_info.max), False))
    for least, most in POWERS:
        first, last = max(least, power(low[0])), min(most, power(high[0]))
        if first > last:
            continue
        for n in {first, last}:
            values = part(between(low, high, Fraction(10) ** (n - fraction), 1), one, 10 * one)
            options.append(seq(decimal(values, fraction + 1, fraction), exponent(n, n)))
        if first + 1 < last:
            values = decimal(range(one, 10 * one), fraction + 1, fraction)
            options.append(seq(values, exponent(first + 1, last - 1)))
    return options


def power(value: Fraction):
    """The exponent of a number in scientific notation."""
    if value <= 0:
        return -math.inf
    n = len(str(value.numerator)) - len(str(value.denominator))
    return n if Fraction(10) ** n <= value else n - 1


def exponent(lo: int, hi: int) -> Node:
    """e and a power of ten from lo to hi, in one to three digits."""

    def power_of(values: range) -> Node:
        return alt(*(decimal(part(values, 0, 10**n), n, 0) for n in (1, 2, 3)))

    plus = seq(optional(literal("+")), power_of(range(max(lo, 0), hi + 1)))
    minus = seq(literal("-"), power_of(range(max(-hi, 0), 1 - lo)))
    return seq(symbols((69, 69), (101, 101)), alt(plus, minus))


def between(low: tuple, high: tuple, unit: Fraction, step: int) -> range:
    """The multiples of step that, times the unit, lie between two bounds (value, open)."""
    (lo, lo_open), (hi, hi_open) = low, high
    first = lo // unit + 1 if lo_open else -(-lo // unit)
    end = -(-hi // unit) if hi_open else hi // unit + 1
    return range(-(-first // step) * step, end, step)


def part(values: range, lo: int, end: int) -> range:
    """Those in lo..end - 1."""
    skipped = max(0, -((values.start - lo) // values.step))
    return range(values.start + skipped * values.step, min(values.stop, end), values.step)


def follow(values: range, digit: int, unit: int) -> range:
    """What is left to follow a digit of this unit."""
    here = part(values, digit * unit, (digit + 1) * unit)
    return range(here.start - digit * unit, here.stop - digit * unit, here.step)


def decimals(most: int) -> Node:
    return optional(seq(literal("."), repeat(DIGIT, 1, most))) if most else NOTHING


def decimal(values: range, left: int, point: int | None) -> Node:
    """Some of the numbers of `left` digits, the last `point` of them after a point, if wanted.

    values: those numbers, read without the point. point: None where it was typed already.
    """
    if not values:
        return EMPTY
    if values != range(10**left):
        return Digits(values, left, point)
    if point is None:
        return repeat(DIGIT, 0, left)
    return seq(repeat(DIGIT, left - point, left - point), decimals(point))


class Digits(Node):
    """What `decimal` says, of values that are not all. Zeros at the end are optional."""

    def set(self, values, left, point):
        self.null = 0 in values and (point is None or left == point)

    def begin(self):
        values, left, point = self.key
        if left == point:
            start = Digits(values, left, None).first()
            yield 46, 46, alt(*(seq(Symbol(lo, hi), rest) for lo, hi, rest in start))
            return
        for d in range(10):
            rest = follow(values, d, 10 ** (left - 1))
            if rest:
                yield 48 + d, 48 + d, decimal(rest, left - 1, point)


class Multiples(Node):
    """What goes on to a multiple of step: least to most digits, perhaps a point and more.

    values: for 0, 1, ... digits before the point, what is then wanted, as `decimal` takes it. The
    last of these is so long that every start can be completed; longer ones follow from it.
    """

    def set(self, values, step, least, most, fraction):
        self.null = least == 0 and 0 in values[0]

    def begin(self):
        values, step, least, most, fraction = self.key
        if least == 0:
            yield from decimal(values[0], fraction, fraction).first()
        if most >= len(values):
            last = values[-1]
            values = *values, range(10 * last.start % step, 10 * last.stop, step)
        for d in range(10) if most else ():
            then = [follow(v, d, 10 ** (n + fraction)) for n, v in enumerate(values[1:])]
            if then[-1] or any(then[least - 1 if least else 0 :]):
                rest = Multiples(tuple(then), step, max(least - 1, 0), most - 1, fraction)
                yield 48 + d, 48 + d, rest


def multiples(step: int, least: int, most: int, fraction: int) -> Node:
    """The multiples of step, without leading zeros, of so many digits before the point."""
    values = [range(0, 10 ** (n + fraction), step) for n in range(most + 1)]
    enough = next((n for n, v in enumerate(values) if v.stop >= step), most)
    start = Multiples(tuple(values[: enough + 1]), step, least, most, fraction).first()
    return alt(*(seq(Symbol(lo, hi), rest) for lo, hi, rest in start if lo > 48))


# ---------------------------------------------------------------- regular expressions


class Reader:
    """A pattern or grammar that is parsed from left to right.

    A kind of it has `fail(reason, at)`, which raises SchemaError with the place (by default the one
    where the reader is); `sequence()`, what stands between two `|`, and `either`, what joins such;
    and `escaped(inside)`: the ranges of code points of an escape, after its backslash; inside: of
    a class.
    """

    counts = re.compile(r"([*+?])|\{([0-9]+)(?:(,)([0-9]*))?\}")

    def __init__(self, text: str):
        self.text, self.at, self.depth = text, 0, 0
        if len(text) > LONGEST:
            self.fail(f"it is longer than {LONGEST} characters")

    def take(self, token: str) -> bool:
        found = self.text.startswith(token, self.at)
        self.at += len(token) * found
        return found

    def next(self) -> str:
        if self.at == len(self.text):
            self.fail("it ends too early")
        self.at += 1
        return self.text[self.at - 1]

    def hex(self, n: int) -> int:
        found = re.compile("[0-9a-fA-F]{%d}" % n).match(self.text, self.at)
        if not found:
            self.fail(f"an escape with fewer than {n} hexadecimal digits")
        self.at = found.end()
        return int(found[0], 16)

    def quantifier(self) -> tuple[int, int | None] | None:
        """How often, from and to, where that is said here."""
        begin, found = self.at, self.counts.match(self.text, self.at)
        if not found:
            return None
        self.at = found.end()
        sign, lo, comma, hi = found.groups()
        if sign:
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[sign]
        if len(lo) + len(hi or "") > 18:
            self.fail("a count with too many digits", begin)
        if hi and int(lo) > int(hi):
            self.fail("counts in the wrong order", begin)
        return int(lo), int(hi) if hi else None if comma else int(lo)

    def alternatives(self):
        options = [self.sequence()]
        while self.take("|"):
            options.append(self.sequence())
        return self.either(*options)

    def nested(self):
        """The inside of a group up to its `)`."""
        begin = self.at - 1
        self.depth += 1
        if self.depth > NESTED:
            self.fail(f"groups nested more than {NESTED} deep", begin)
        found = self.alternatives()
        self.depth -= 1
        if not self.take(")"):
            self.fail("a group without its )", begin)
        return found

    def members(self):
        """The code points of a class up to its `]`, as ranges."""
        begin, invert, found = self.at - 1, self.take("^"), []
        while not self.take("]"):
            if self.at == len(self.text):
                self.fail("a class without its ]", begin)
            at, lows = self.at, self.member()
            found += lows
            if self.text.startswith("-", self.at) and not self.text.startswith("-]", self.at):
                self.at += 1
                highs = self.member()
                found += highs
                lo, hi = lows[0][0], highs[0][1]
                if lows != ((lo, lo),) or highs != ((hi, hi),):
                    found.append((ord("-"), ord("-")))  # [\w-.]: there is no range
                elif lo > hi:
                    self.fail("a range in the wrong order", at)
                else:
                    found.append((lo, hi))
        return inverse(found) if invert else merged(found)

    def member(self):
        c = self.next()
        return self.escaped(inside=True) if c == "\\" else ((ord(c), ord(c)),)


def parse_regex(pattern: str, path: str = "regex", search: bool = False) -> Node:
    """An ECMA-262 regular expression as a set of texts over code points.

    search: the pattern may match anywhere in the text, as JSON Schema has it. Escapes are those
    of the flag u. Look-around (but see `look_aheads`), word boundaries, back references, flags and
    scripts are refused.
    """
    reader = Regex(pattern, path)
    found = reader.alternatives()
    if reader.at < len(pattern):
        reader.fail("a ) without its group")
    options = []
    for (begins, ends), node in found.items():
        if search and node.null and not (begins and ends):
            return ALL
        before, after = NOTHING if begins else ALL, NOTHING if ends else ALL
        options.append(seq(before, node, after) if search else node)
    return alt(*options)


def look_aheads(pattern: str) -> tuple[list[tuple[str, bool]], str]:
    """The look-aheads right behind a pattern's first `^`, as patterns that a text has to match
    (True) or not to match (False), and the pattern without them.

    Example: ^(?!0$)[0-9]+$ -> [("^(?:0$)", False)], "^[0-9]+$"
    """
    found = []
    while look := re.match(r"\^\(\?([=!])", pattern):
        reader = Regex(pattern, "#")
        reader.at = look.end()
        reader.nested()
        found.append((f"^(?:{pattern[look.end() : reader.at - 1]})", look[1] == "="))
        pattern = "^" + pattern[reader.at :]
    reader = Regex(pattern, "#")
    reader.sequence()
    if found and reader.at < len(pattern):
        reader.fail("a look-ahead with an alternative to it is not supported")
    return found, pattern


class Regex(Reader):
    """Parses a pattern.

    Anchors  An expression is a dictionary (begins, ends) -> Node: the texts that it matches
             anywhere, only where nothing is in front, only where nothing follows, only as a
             whole. Where an anchor meets a neighbour that must be read, no text is left: a^b.
    """

    def __init__(self, pattern: str, path: str):
        self.path, self.keyword = path, "" if path == "regex" else "pattern"
        if not isinstance(pattern, str):
            raise SchemaError(path, self.keyword, f"{pattern!r} is not a string")
        super().__init__(pattern)

    def fail(self, reason, at=None):
        place = (self.at if at is None else at) + 1
        reason = f"{reason}, at character {place} of {self.text[:100]!r}"
        raise SchemaError(self.path, self.keyword, reason)

    @staticmethod
    def either(*options: dict) -> dict:
        kinds = dict.fromkeys(kind for option in options for kind in option)
        return {kind: alt(*(o[kind] for o in options if kind in o)) for kind in kinds}

    def sequence(self) -> dict:
        begin, parts = self.at, []
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            parts.append(self.term())
        if sum(len(part) > 1 for part in parts) > ANCHORED:
            self.fail(f"more than {ANCHORED} groups in a row with anchors in them", begin)
        done = free(NOTHING)
        for part in reversed(parts):
            done = join(part, done)
        return done

    def term(self) -> dict:
        begin, c = self.at, self.next()
        if c == "^":
            done = {(True, False): NOTHING}
        elif c == "$":
            done = {(False, True): NOTHING}
        elif c == "(":
            self.group()
            done = self.nested()
        elif c in "*+?" or c == "{" and re.match(r"[0-9]*,?[0-9]+,?\}", self.text[self.at :]):
            self.fail("nothing to repeat", begin)
        else:
            done = free(self.one(c, begin))
        counts = self.quantifier()
        if not counts:
            return done
        self.take("?")  # lazy: another order of search, the same texts
        if c in "^$" or self.quantifier():
            self.fail("nothing to repeat", begin)
        return self.times(done, *counts, begin)

    def one(self, c: str, begin: int) -> Node:
        """The texts of one character: itself, a class, or an escape."""
        if c == ".":
            return symbols(*minus(ANY, [(10, 10), (13, 13), (0x2028, 0x2029)]))
        if c not in "[\\" and ord(c) < SURROGATES[0][0]:
            return Symbol(ord(c), ord(c))
        ranges = ((ord(c), ord(c)),)
        if c == "[":
            ranges = self.members()
        elif c == "\\":
            ranges = self.escaped(inside=False)
        left = minus(ranges, SURROGATES)
        if ranges and not left:
            self.fail("half of a surrogate pair", begin)
        return symbols(*left)

    def group(self) -> None:
        """Reads what stands at the beginning of a group."""
        begin = self.at - 1
        if self.take("?") and not self.take(":"):
            name = re.compile(r"P?<[A-Za-z_$][\w$]*>").match(self.text, self.at)
            if not name:
                kinds = {"=": "look-ahead", "!": "look-ahead", "<": "look-behind"}
                kind = kinds.get(self.text[self.at : self.at + 1], "a flag or an unknown group")
                self.fail(f"{kind} is not supported", begin)
            self.at = name.end()

    def times(self, what: dict, lo: int, hi: int | None, begin: int) -> dict:
        if set(what) <= {FREE}:
            return free(repeat(what.get(FREE, EMPTY), lo, hi))
        if max(lo, hi or 0) > 8:
            self.fail("an anchor that is repeated more than 8 times", begin)
        maybe = self.either(what, free(NOTHING))
        more = [maybe] * ((hi or lo) - lo)
        if hi is None:  # all but the first and the last are read where texts are on both sides
            more = [maybe, free(repeat(what.get(FREE, EMPTY))), maybe]
        done = free(NOTHING)
        for part in [what] * lo + more:
            done = join(done, part)
        return done

    def escaped(self, inside):
        begin, c = self.at - 1, self.next()
        if c.lower() in CLASSES:
            return CLASSES[c] if c in CLASSES else inverse(CLASSES[c.lower()])
        if c in "tnvfr" or c == "b" and inside:
            code = ord("\t\n\v\f\r\b"["tnvfrb".index(c)])
        elif c == "0" and not self.text[self.at : self.at + 1].isdigit():
            code = 0
        elif c == "c" and re.match("[A-Za-z]", self.text[self.at : self.at + 1]):
            code = ord(self.next()) % 32
        elif c == "x":
            code = self.hex(2)
        elif c == "u":
            code = self.unicode(begin)
        elif c in "pP":
            ranges = self.category(begin)
            return ranges if c == "p" else inverse(ranges)
        elif c in "bB":
            self.fail("a word boundary is not supported", begin)
        elif c in "123456789k":
            self.fail("a back reference is not supported", begin)
        elif c.isalnum():
            self.fail(f"unknown escape \\{c}", begin)
        else:
            code = ord(c)
        return ((code, code),)

    def unicode(self, begin: int) -> int:
        if self.take("{"):
            found = re.compile(r"0*([0-9a-fA-F]{1,6})\}").match(self.text, self.at)
            if not found or int(found[1], 16) > LAST:
                self.fail("\\u{...} is not a code point", begin)
            self.at = found.end()
            return int(found[1], 16)
        code = self.hex(4)
        low = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})").match(self.text, self.at)
        if 0xD800 <= code < 0xDC00 and low:
            self.at = low.end()
            code = 0x10000 + (code - 0xD800 << 10) + (int(low[1], 16) - 0xDC00)
        return code

    def category(self, begin: int):
        found = re.compile(r"\{(?:(?:gc|General_Category)=)?(\w+)\}").match(self.text, self.at)
        name = CATEGORIES.get(found[1], found[1]) if found else ""
        ranges = categories().get(name)
        if not ranges:
            self.fail("only general categories such as \\p{L} or \\p{Lu} are supported", begin)
        self.at = found.end()
        return ranges


FREE = (False, False)


def free(node: Node) -> dict:
    """An expression without anchors."""
    return {FREE: node}


def join(one: dict, other: dict) -> dict:
    """One expression, then the other: an anchor between them leaves only empty texts there."""
    done: dict[tuple, list[Node]] = {}
    for (begins, stops), left in one.items():
        for (starts, ends), right in other.items():
            if (not starts or left.null) and (not stops or right.null):
                node = seq(NOTHING if starts else left, NOTHING if stops else right)
                done.setdefault((begins or starts, stops or ends), []).append(node)
    return {kind: alt(*nodes) for kind, nodes in done.items()}


@cache
def categories() -> dict[str, tuple[tuple[int, int], ...]]:
    """Unicode's general categories, such as L and Lu, as ranges of code points."""
    found: dict[str, list] = {}
    begin, current = 0, "Cc"
    for code in range(1, LAST + 2):
        kind = unicodedata.category(chr(code)) if code <= LAST else ""
        if kind != current:
            for name in (current, current[0]):
                found.setdefault(name, []).append((begin, code - 1))
            begin, current = code, kind
    return {name: merged(ranges) for name, ranges in found.items()}


CLASSES = {
    "d": ((48, 57),),
    "w": ((48, 57), (65, 90), (95, 95), (97, 122)),
    "s": merged(
        [(9, 13), (32, 32), (160, 160), (0x1680, 0x1680), (0x2000, 0x200A)]
        + [(0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)]
    ),
}
CATEGORIES = {"Letter": "L", "Mark": "M", "Number": "N", "Punctuation": "P", "digit": "Nd"}
CHAR = spell(  # of a JSON string, in all its spellings
    parse_regex(
        r'[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u(?:[0-9a-ce-fA-CE-F][0-9a-fA-F]{3}|'
        r"[dD](?:[0-7][0-9a-fA-F]{2}|[89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})))"
    )
)


# ---------------------------------------------------------------- GBNF


def parse_gbnf(text: str) -> Rule:
    """A grammar in llama.cpp's notation as its rule `root`.

    `a ::= a x | b` is read as `b x*`. Line breaks may stand between all parts of a rule.
    """
    return Gbnf(text).parse()


class Gbnf(Reader):
    """Parses rules, over bytes: each character is spelled in UTF-8 at once."""

    counts = re.compile(r"([*+?])|\{\s*([0-9]+)\s*(?:(,)\s*([0-9]*)\s*)?\}")
    name = re.compile(r"[A-Za-z0-9_-]+")
    space = re.compile(r"(?:\s|#[^\n]*)*")
    head = re.compile(r"[A-Za-z0-9_-]+(?:\s|#[^\n]*)*::=")
    either = staticmethod(alt)

    def __init__(self, text: str):
        if not isinstance(text, str):
            raise SchemaError("grammar", "", f"{text!r} is not a string")
        super().__init__(text)
        self.rules: dict[str, Rule] = {}
        self.called: dict[str, int] = {}  # the first place

    def fail(self, reason, at=None):
        at = self.at if at is None else at
        line, column = self.text.count("\n", 0, at) + 1, at - self.text.rfind("\n", 0, at)
        raise SchemaError("grammar", f"line {line}, column {column}", reason)

    def skip(self) -> None:
        self.at = self.space.match(self.text, self.at).end()

    def parse(self) -> Rule:
        self.skip()
        while self.at < len(self.text):
            begin, found = self.at, self.name.match(self.text, self.at)
            if not self.head.match(self.text, self.at):
                self.fail("expected a rule: name ::= ...")
            rule = self.rule(found[0])
            if rule.body is not None:
                self.fail(f"a second rule {rule.name}", begin)
            self.at = self.head.match(self.text, self.at).end()
            rule.body = self.alternatives()
            unroll(rule)
        for name, at in self.called.items():
            if self.rules[name].body is None:
                self.fail(f"there is no rule {name}", at)
        if "root" not in self.rules:
            self.fail("there is no rule root")
        return self.rules["root"]

    def rule(self, name: str) -> Rule:
        return self.rules.setdefault(name, Rule(name))

    def sequence(self) -> Node:
        parts = []
        self.skip()
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            if self.head.match(self.text, self.at):
                break
            parts.append(self.item())
            self.skip()
            while counts := self.quantifier():
                parts[-1] = repeat(parts[-1], *counts)
                self.skip()
        return seq(*parts)

    def item(self) -> Node:
        begin = self.at
        name = self.name.match(self.text, self.at)
        if name:
            self.at = name.end()
            self.called.setdefault(name[0], begin)
            return Call(self.rule(name[0]))
        c = self.next()
        if c == '"':
            return self.string(begin)
        if c == "(":
            return self.nested()
        if c == "[":
            return char(minus(self.members(), SURROGATES))
        if c == ".":
            return char(ANY)
        self.fail("tokens are not supported" if c == "<" else f"unexpected {c}", begin)

    def string(self, begin: int) -> Node:
        done = []
        while not self.take('"'):
            if self.at == len(self.text):
                self.fail('a text without its "', begin)
            ((code, _),) = self.member()
            if 0xD800 <= code < 0xE000:
                self.fail("half of a surrogate pair", begin)
            done.append(chr(code))
        return literal("".join(done))

    def escaped(self, inside):
        begin, c = self.at - 1, self.next()
        if c in "nrt":
            code = ord("\n\r\t"["nrt".index(c)])
        elif c in "xuU":
            code = self.hex({"x": 2, "u": 4, "U": 8}[c])
        elif c in '\\"[]':
            code = ord(c)
        else:
            self.fail(f"unknown escape \\{c}", begin)
        if code > LAST:
            self.fail("not a code point", begin)
        return ((code, code),)


def unroll(rule: Rule) -> None:
    """Left recursion as a repetition: a ::= a x | a y a | b becomes b (x | y b)*."""
    options = rule.body.key if type(rule.body) is Alt else (rule.body,)
    me = Call(rule)
    parts = [o.parts() if type(o) is Seq else [o] for o in options]
    first = alt(*(seq(*p) for p in parts if p[0] is not me))
    more = [p[1:] for p in parts if p[0] is me]
    if more:
        more = [seq(*p[:-1], first if p[-1] is me else p[-1]) for p in more if p]
        rule.body = seq(first, repeat(alt(*more)))


# ---------------------------------------------------------------- the experiment

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "maximum": 130}},
    "required": ["name"],
    "additionalProperties": False,
}
TEXT = '{"name":"Ada","age":36}'
WORDS = ['{"', '":', '":"', '","', '"}', "na", "name", "age", "ge", "Ad", "ada", "36", "6}", "true"]
ASCII = [bytes([b]) for b in range(32, 127)]
WAYS = 7  # drawn of a rule


def shown(lo: int, hi: int) -> str:
    """Bytes as people read them: a, 0-9, \\n, \\xc3."""
    ends = [
        chr(b) if 32 < b < 127 else "space" if b == 32 else repr(bytes([b]))[2:-1] for b in (lo, hi)
    ]
    return ends[0] if lo == hi else "-".join(ends)


def expected(grammar: Grammar, config: int) -> str:
    """What may come next, in bytes."""
    machine = grammar.machine
    stacks, ends = machine.configs[config]
    ranges = [edge[:2] for number, _ in stacks for edge in machine.look(number).edges]
    return ", ".join([shown(lo, hi) for lo, hi in merged(ranges)] + ["the end"] * ends)


def explain(grammar: Grammar, text: str) -> tuple[str, bool]:
    """Whether a text is in the grammar, and what is wrong with the first byte that is not."""
    config, data = grammar.start, text.encode()
    for at, byte in enumerate(data):
        after = grammar.machine.step(config, byte)
        if not after:
            before = data[:at].decode(errors="replace")
            wrong = f"refused at byte {at}: {shown(byte, byte)}, after {before[-60:]!r}"
            return f"{wrong}\nexpected: {expected(grammar, config)}", False
        config = after
    if grammar.machine.configs[config][1]:
        return f"accepted, {len(data)} bytes", True
    return f"not finished after {len(data)} bytes\nexpected: {expected(grammar, config)}", False


def draw(machine: Machine, rule: Rule) -> list[str]:
    """A rule's automaton, a line for each way from one fork to the next."""
    names, lines, todo = {}, [], [machine.start(rule)]

    def name(number: int) -> str:
        state = machine.look(number)
        if not state.edges and not state.calls:
            return "end"
        if number not in names:
            names[number] = len(names) + 1
            todo.append(number)
        return f"{names[number]}" + " or end" * state.accepts

    def ways(number: int) -> list[tuple[str, int]]:
        state, found = machine.look(number), {}
        for lo, hi, then in state.edges:
            found.setdefault(machine.state(then), []).append(shown(lo, hi))
        calls = sorted((f" <{callee.name}> ", then) for callee, then in state.calls)
        return [("|".join(texts), then) for then, texts in found.items()] + calls

    name(todo.pop())
    for number in todo:
        for text, then in ways(number):
            while len(onward := ways(then)) == 1 and not machine.look(then).accepts:
                more, then = onward[0]
                text += more
            lines.append(f"{names[number]:>5}  {text[:56]:<56}  -> {name(then)}")
    return lines[:WAYS] + [f"{'':>7}and {len(lines) - WAYS} more"] * (len(lines) > WAYS)


def rules(grammar: Grammar) -> list[str]:
    lines = ["Its rules: a|b bytes, <rule> a call; the numbers are the forks of a rule's automaton"]
    called = [node.key[0] for node in reachable(grammar.root) if type(node) is Call]
    for rule in dict.fromkeys([grammar.root, *reversed(called)]):
        if type(rule.body) is not Call:
            lines += [f"<{rule.name}>", *draw(grammar.machine, rule)]
    return lines


def picture(schema, text: str | None) -> str:
    """The rules of a schema, and the legal tokens before each token of a text."""
    vocabulary = Vocabulary([*ASCII, *(word.encode() for word in WORDS), None], [109])
    grammar = compile(vocabulary, json_schema=schema, whitespace="compact")
    lines = [*textwrap.wrap(json.dumps(schema), 100), "", *rules(grammar)]
    if text is None:
        return "\n".join(lines)
    lines += ["", f"{text}: the legal ones of {len(vocabulary.tokens) - 1} tokens, longest first"]
    matcher, ids = grammar.matcher(), [*cut(vocabulary, text), None]
    for token in ids:
        bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
        legal = set(np.flatnonzero(bits).tolist()) - vocabulary.stop_ids
        words = sorted((vocabulary.tokens[i].decode() for i in legal), key=lambda w: (-len(w), w))
        shown = " ".join(words[:12]) + f" and {len(words) - 12} more" * (len(words) > 12)
        shown += " (stop)" * matcher.ends
        forced = matcher.forced(lambda text: cut(vocabulary, text))
        if forced:
            shown += "   forced: " + " ".join(vocabulary.tokens[i].decode() for i in forced)
        taken = "(stop)" if token is None else vocabulary.tokens[token].decode()
        lines.append(f"{taken:>8}{len(legal) + matcher.ends:>5}  {shown}".rstrip())
        if token is not None:
            matcher.accept(token)
    return "\n".join(lines)


BENCH = {
    "anything": (True, '{"title": "On floating bodies", "pages": [1, 2.5, null], "new": true}'),
    "person": (
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 40},
                "age": {"type": "integer", "minimum": 0, "maximum": 130},
                "born": {"type": "string", "format": "date"},
                "tags": {"type": "array", "items": {"enum": ["staff", "guest"]}, "maxItems": 4},
            },
            "required": ["name", "age"],
            "additionalProperties": False,
        },
        '{"name": "Ada Lovelace", "age": 36, "born": "1815-12-10", "tags": ["guest", "staff"]}',
    ),
    "tool call": (
        {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {"tool": {"const": tool}, "query": {"type": "string"}},
                    "required": ["tool", "query"],
                    "additionalProperties": False,
                }
                for tool in ("search", "weather", "calculator")
            ]
        },
        '{"tool": "weather", "query": "Is it raining in Syracuse?"}',
    ),
    "pattern": (
        {"type": "string", "pattern": "^[A-Z]{2,3}-[0-9]{4,9}$"},
        '"ABC-1234567"',
    ),
}


def standard_words(most: int) -> list[bytes]:
    """A vocabulary to time with: all bytes, and the most frequent pieces of Python's own source."""
    counts = Counter()
    for path in sorted(Path(json.__file__).parents[1].glob("*.py")):
        text = path.read_bytes()
        counts.update(re.findall(rb" ?[A-Za-z]+|\d{1,3}| ?[^\sA-Za-z0-9]+|\s+", text))
    singles = [bytes([b]) for b in range(256)]
    pieces = [piece for piece, _ in counts.most_common(most) if 1 < len(piece) <= 64]
    return singles + pieces[: most - 256]


def cut(vocabulary: Vocabulary, words: str) -> list[int]:
    """A text as the longest token each time."""
    text = words.encode()
    ids, node, best = [], 0, (-1, 0)
    start = at = 0
    while start < len(text):
        node = vocabulary.children.get(node << 8 | text[at]) if at < len(text) else None
        at += 1
        if node and vocabulary.token[node] >= 0:
            best = int(vocabulary.token[node]), at
        if not node:
            ids.append(best[0])
            start = at = best[1]
            node = 0
    return ids


def bench() -> str:
    """Compile and mask times, this process alone."""
    tokens = standard_words(32_000)
    built = perf_counter()
    vocabulary = Vocabulary([*tokens, None], [len(tokens)])
    taken = perf_counter() - built
    lines = [
        f"{len(tokens):,} tokens out of Python's source: trie built in {taken * 1e3:.0f} ms",
        "",
    ]
    lines += ["             compile   masks of the first request    of the third"]
    lines += ["                  ms     mean us      max us           mean us"]
    for name, (schema, text) in BENCH.items():
        begun = perf_counter()
        grammar = compile(vocabulary, json_schema=schema)
        compiled, rounds = perf_counter() - begun, []
        for _ in range(3):
            matcher, times = grammar.matcher(), []
            for token in cut(vocabulary, text):
                begun = perf_counter()
                matcher.mask()
                times.append((perf_counter() - begun) * 1e6)
                assert matcher.accept(token), f"{name} refuses its text"
            rounds.append(times)
        first, third = rounds[0], rounds[-1]
        mean = sum(first) / len(first)
        lines.append(
            f"{name:<12}{compiled * 1e3:8.2f}{mean:12.0f}{max(first):12.0f}"
            f"{sum(third) / len(third):18.1f}"
        )
    return "\n".join(lines)


def main() -> int:
    import argparse

    parser = argparse.ArgumentParser(description="Compile a schema, and see what it allows.")
    parser.add_argument("--schema", metavar="FILE|JSON", help="another JSON Schema")
    parser.add_argument("--text", help="which byte of this text is refused first, and what was due")
    parser.add_argument("--bench", action="store_true", help="time compilation and masks")
    args = parser.parse_args()
    try:
        schema = SCHEMA
        if args.schema is not None:
            inline = args.schema.lstrip()[:1] in ("{", "[", '"') or args.schema in ("true", "false")
            schema = args.schema if inline else Path(args.schema).read_text()
        if args.bench:
            words, fine = bench(), True
        elif args.text is not None:
            vocabulary = Vocabulary([*(bytes([b]) for b in range(256)), None], [256])
            words, fine = explain(compile(vocabulary, json_schema=schema), args.text)
        else:
            schema = json.loads(schema) if isinstance(schema, str) else schema
            words, fine = picture(schema, None if args.schema else TEXT), True
    except OSError as error:
        parser.error(f"--schema {args.schema}: {error.strerror}")
    except ValueError as error:
        parser.error(f"--schema {args.schema}: {error}")
    print(words)
    return 0 if fine else 1


if __name__ == "__main__":
    raise SystemExit(main())
