"""Random JSON Schemas, values near to what they allow, and what `jsonschema` says of them.

The verdicts are those of the specification: numbers are compared exactly, `pattern` is read as
ECMA-262 reads it, formats are assertions. `jsonschema` and the packages of its formats are
imported by `validator` alone; the rest needs the standard library.

    python tests/schemas.py > tests/golden/verdicts.jsonl      what test_grammar.py reads
"""

import copy
import json
import random
import re
from decimal import Decimal
from fractions import Fraction

NAMES = [
    "a", "b", "ab", "id", "name", "x-1", "x-2", "", "a b", "0", "$ref", "/", "type", 'q"t',
    "back\\slash", "tab\there", "line\nfeed", "\u00fcn\u00ef", "\u540d\u524d", "\U0001f600",
    "x\u0001",
]  # fmt: skip
TEXTS = NAMES + [
    "abc", "b@c.de", "A", "zzzzzz", "x12", "\u00e9\u00e8", "\U0001f600\U0001f64f", "2024-02-29",
    "2023-02-29", "12:30:00Z", "2024-12-31T23:59:59+01:00", "P3DT4H", "127.0.0.1", "::1",
    "123e4567-e89b-12d3-a456-426614174000", "http://example.com/p", "x" * 40, '"', "\\", "\n", " ",
]  # fmt: skip
PATTERNS = {  # pattern -> texts it finds itself in
    "^[a-z]+$": ["a", "abc", "zzzzzz"],
    "b": ["b", "abc", "\nb"],
    "^a|b$": ["ax", "xb", "ab", "a\n"],
    "\\d{2,4}": ["12", "x12", "12345"],
    "\\S": ["abc", " x"],
    "^\\S+@\\S+$": ["b@c.de", "\u00e9@\u540d"],
    "^(red|green)$": ["red", "green"],
    '^[^"\\\\]*$': ["", "abc", "\n", "\u00e9"],
    "^.{2,3}$": ["ab", "\u00e9\u00e8", "\U0001f600\U0001f64f", "abc"],
    "[\u00e9-\u00ff]": ["\u00e9\u00e8", "a\u00ff"],
    "^[A-Z]{3}-\\d{3}$": ["ABC-123"],
    "\\\\": ["back\\slash", "\\"],
    '"': ['"', 'q"t'],
    "^$": [""],
    "^(ab)*c": ["c", "ababc", "abcx"],
    "^x-": ["x-1", "x-"],
    "^[\\w.]{1,64}$": ["a.b_c", "x"],
    "\\.json$": [".json", "a.json"],
    "^\\s": [" x", "\n", "\u2028"],
    "\\n": ["line\nfeed", "\n"],
    "^[\U0001f600-\U0001f64f]+$": ["\U0001f600", "\U0001f600\U0001f64f"],
    "^(?:a|bc?){1,2}$": ["a", "bca", "bb"],
    "^[a-c]?d": ["d", "ad", "bdx"],
}
FORMATS = {  # format -> texts that have it
    "date": ["2024-02-29", "1999-12-31"],
    "time": ["12:30:00Z", "00:00:00+05:30", "23:59:59.123Z"],
    "date-time": ["2024-12-31T23:59:59+01:00", "2024-02-29T00:00:00Z"],
    "duration": ["P3DT4H", "PT5M", "P1Y2M3D", "P2W"],
    "uuid": ["123e4567-e89b-12d3-a456-426614174000"],
    "ipv4": ["127.0.0.1", "255.255.255.255"],
    "ipv6": ["::1", "2001:db8::ff00:42:8329", "1:2:3:4:5:6:7:8"],
    "email": ["b@c.de", "first.last@example.com"],
    "hostname": ["example.com", "a-b.c"],
    "uri": ["http://example.com/p", "urn:isbn:123"],
}


ATOM, LABEL = "[\\w!#$%&'*+/=?^`{|}~-]+", "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
QUOTED = r'"([ !#-\[\]-~]|\\[ -~])*"'
STRICTER = {
    "email": f"(?a:({ATOM}(\\.{ATOM})*|{QUOTED})@{LABEL}(\\.{LABEL})*)",
    "uuid": "(?i:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12})",
    "hostname": ".*[^.]",
    "duration": "(?!.*Y[0-9]+D)(?!.*H[0-9]+S)[A-Z0-9]*",
}


# ---------------------------------------------------------------- schemas


def random_schema(rng: random.Random, depth: int = 3) -> dict:
    """A schema as text may hold it: `json.loads` of its `json.dumps`, so that it is a tree."""
    schema = _schema(rng, depth)
    if not isinstance(schema, dict):
        schema = {"allOf": [schema]}
    if '"#/$defs/' in json.dumps(schema):
        leaf = {"type": rng.choice(["string", "integer", "null"])}
        inside = {"$ref": "#/$defs/node"}
        node = {
            "type": "object",
            "properties": {
                "value": _scalar(rng),
                "next": rng.choice([inside, {"anyOf": [inside, {"type": "null"}]}]),
                "all": {"type": "array", "items": inside, "maxItems": 2},
            },
            "required": rng.sample(["value", "all"], rng.randint(0, 2)),
            "additionalProperties": rng.choice([False, True, leaf]),
        }
        schema["$defs"] = {"leaf": leaf, "node": node}
    return json.loads(json.dumps(schema))


def _schema(rng, depth):
    if depth <= 0:
        return _scalar(rng)
    kinds = [_object] * 6 + [_array] * 3 + [_any_of] * 2 + [_all_of, _one_of, _typed, _rarer]
    kinds += [lambda rng, depth: _scalar(rng)] * 3 + [lambda rng, depth: _reference(rng)]
    return rng.choice(kinds)(rng, depth)


def _scalar(rng):
    makers = [_string] * 3 + [_number] * 3 + [_literals] * 2
    makers += [lambda rng: {"type": "boolean"}, lambda rng: {"type": "null"}, lambda rng: True]
    return rng.choice(makers)(rng)


def _reference(rng):
    return {"$ref": rng.choice(["#/$defs/node", "#/$defs/leaf"])}


def _string(rng):
    schema = {"type": "string"} if rng.random() < 0.8 else {}
    how = rng.random()
    if how < 0.35:
        schema["pattern"] = rng.choice(list(PATTERNS))
    elif how < 0.5:
        schema["format"] = rng.choice(list(FORMATS))
    if rng.random() < 0.4:
        shortest = rng.choice([0, 0, 1, 2, 3])
        schema["minLength"] = shortest
        schema["maxLength"] = shortest + rng.choice([0, 1, 2, 5, 40, 2000])
        if rng.random() < 0.5:
            del schema[rng.choice(["minLength", "maxLength"])]
    return schema


def _bound(rng):
    digits = rng.choice([0, 0, 0, 1, 2, 3])
    return round(rng.uniform(*rng.choice([(-20, 20), (0, 3), (-1200, 1200)])), digits or None)


def _number(rng):
    schema = {"type": rng.choice(["integer", "number"])} if rng.random() < 0.8 else {}
    if rng.random() < 0.6:
        low, high = sorted([_bound(rng), _bound(rng)])
        schema[rng.choice(["minimum", "exclusiveMinimum"])] = low
        schema[rng.choice(["maximum", "exclusiveMaximum"])] = high
        if rng.random() < 0.5:
            del schema[rng.choice([name for name in schema if name != "type"])]
    if rng.random() < 0.2:
        schema["multipleOf"] = rng.choice([1, 2, 3, 7, 10, 0.1, 0.01, 0.5])
    return schema


def _literals(rng):
    if rng.random() < 0.4:
        schema = {"const": random_value(rng, 2)}
    else:
        schema = {"enum": [random_value(rng, 1) for _ in range(rng.randint(1, 5))]}
    if rng.random() < 0.2:
        schema |= rng.choice([_string, _number, lambda rng: {"type": ["string", "null"]}])(rng)
    return schema


def _typed(rng, depth):
    """No type at all, or several: keywords bind their own type only."""
    schema = {}
    for part in rng.sample([_object, _array, _string, _number], 2):
        schema |= part(rng, depth - 1) if part in (_object, _array) else part(rng)
    schema.pop("type", None)
    if rng.random() < 0.5:
        kinds = ["string", "integer", "number", "object", "array", "null", "boolean"]
        schema["type"] = rng.sample(kinds, rng.randint(1, 3))
    return schema


def _object(rng, depth):
    schema = {"type": "object"} if rng.random() < 0.8 else {}
    if rng.random() < 0.2:  # a map
        schema["additionalProperties"] = _schema(rng, depth - 1)
        if rng.random() < 0.5:
            schema["minProperties"] = rng.randint(0, 2)
            schema["maxProperties"] = schema["minProperties"] + rng.randint(0, 2)
        if rng.random() < 0.4:
            schema["propertyNames"] = rng.choice(
                [{"pattern": rng.choice(list(PATTERNS))}, {"maxLength": 3}, {"enum": NAMES[:4]}]
            )
        return schema
    names = rng.sample(NAMES, rng.randint(0, 5))
    schema["properties"] = {name: _schema(rng, depth - 1) for name in names}
    required = [name for name in names if rng.random() < 0.5]
    required += [rng.choice(NAMES)] * (rng.random() < 0.1)
    if required and rng.random() < 0.9:
        schema["required"] = list(dict.fromkeys(required))
    extra = rng.random()
    if extra < 0.6:
        schema["additionalProperties"] = extra < 0.2 if extra < 0.4 else _schema(rng, 0)
    if rng.random() < 0.15:
        found = rng.sample(["^x-", "^[a-z]+$", "b", "\\d", "^"], rng.randint(1, 2))
        schema["patternProperties"] = {pattern: _schema(rng, 0) for pattern in found}
    if rng.random() < 0.08:
        schema[rng.choice(["minProperties", "maxProperties"])] = rng.randint(0, 1)
    return schema


def _array(rng, depth):
    schema = {"type": "array"} if rng.random() < 0.8 else {}
    if rng.random() < 0.8:
        schema["items"] = _schema(rng, depth - 1) if rng.random() < 0.9 else False
    if rng.random() < 0.3:
        schema["prefixItems"] = [_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    if rng.random() < 0.5:
        schema["minItems"] = rng.randint(0, 3)
        schema["maxItems"] = schema["minItems"] + rng.randint(0, 3)
        if rng.random() < 0.5:
            del schema[rng.choice(["minItems", "maxItems"])]
    return schema


def _any_of(rng, depth):
    schema = {"anyOf": [_schema(rng, depth - 1) for _ in range(rng.randint(1, 4))]}
    if rng.random() < 0.3:
        schema |= _object(rng, depth - 1)
    return schema


def _one_of(rng, depth):
    """Objects that a name tells apart, or types that do."""
    if rng.random() < 0.5:
        kinds = rng.sample(["string", "integer", "boolean", "null", "array"], 2)
        return {"oneOf": [{"type": kind} for kind in kinds]}
    branches = []
    for kind in rng.sample(["alpha", "apple", "b", ""], 2):
        branch = _object(rng, depth - 1)
        branch.pop("propertyNames", None)
        branch["type"] = "object"
        branch["properties"] = {"kind": {"const": kind}} | branch.get("properties", {})
        branch["required"] = list(dict.fromkeys(["kind", *branch.get("required", [])]))
        branches.append(branch)
    return {"oneOf": branches}


def _all_of(rng, depth):
    maker = rng.choice([_object, _array, lambda rng, depth: _number(rng),
                        lambda rng, depth: _string(rng), _any_of])  # fmt: skip
    schema = {"allOf": [maker(rng, depth - 1) for _ in range(rng.randint(1, 2))]}
    if rng.random() < 0.5:
        schema |= maker(rng, depth - 1)
    return schema


def _rarer(rng, depth):
    """Keywords that look at the whole value, beside others."""
    part = lambda: _schema(rng, rng.choice([0, 0, depth - 1]))  # noqa: E731
    some = lambda: rng.sample(NAMES[:6], rng.randint(1, 2))  # noqa: E731
    schema = rng.choice([_object, _array, _typed, _any_of])(rng, depth - 1)
    word = rng.choice(["not", "if", "contains", "uniqueItems", "dependentRequired",
                       "dependentSchemas", "oneOf", "unevaluated"])  # fmt: skip
    if word == "not":
        schema["not"] = part()
    elif word == "if":
        schema |= {word: part() for word in ("if", "then", "else") if rng.random() < 0.8}
    elif word == "contains":
        schema["contains"] = part()
        if rng.random() < 0.5:
            schema["minContains"] = rng.randint(0, 2)
            schema["maxContains"] = schema["minContains"] + rng.randint(0, 2)
    elif word == "uniqueItems":
        schema |= {"items": rng.choice([{"type": "boolean"}, _literals(rng)]), "uniqueItems": True}
    elif word == "dependentRequired":
        schema[word] = {name: some() for name in some()}
    elif word == "dependentSchemas":
        schema[word] = {name: part() for name in some()}
    elif word == "oneOf":
        schema[word] = [part() for _ in range(rng.randint(1, 3))]
    else:
        schema[rng.choice(["allOf", "anyOf"])] = [_object(rng, 1), _array(rng, 1)][
            rng.randint(0, 1) :
        ]
        schema["unevaluated" + rng.choice(["Properties", "Items"])] = rng.choice([False, part()])
    return schema


# ---------------------------------------------------------------- values


def random_value(rng: random.Random, depth: int = 2):
    """Any JSON value; numbers are int or float with at most three decimals."""
    kinds = ["text", "text", "int", "float", "bool", "null"] + ["array", "object"] * (depth > 0)
    kind = rng.choice(kinds)
    if kind == "text":
        return rng.choice(TEXTS)
    if kind == "int":
        return rng.choice([0, 1, -1, 2, 7, 10, 42, -20, 100, rng.randint(-2000, 2000)])
    if kind == "float":
        return rng.choice([0.5, -0.25, 4.5, 0.01, 99.995, round(rng.uniform(-20, 20), 2)])
    if kind == "bool":
        return rng.random() < 0.5
    if kind == "null":
        return None
    size = rng.randint(0, 3)
    if kind == "array":
        return [random_value(rng, depth - 1) for _ in range(size)]
    return {name: random_value(rng, depth - 1) for name in rng.sample(NAMES, size)}


def near_value(rng: random.Random, schema, root: dict, depth: int = 6):
    """A value the schema may well allow; `root` is where its references point to."""
    if depth <= 0 or not isinstance(schema, dict) or not schema:
        return random_value(rng, min(depth, 2))
    if "$ref" in schema:
        return near_value(rng, _target(schema["$ref"], root), root, depth - 1)
    if "const" in schema:
        return copy.deepcopy(schema["const"])
    if schema.get("enum"):
        return copy.deepcopy(rng.choice(schema["enum"]))
    parts = [schema] if len(set(schema) - {"$defs", "anyOf", "oneOf", "allOf"}) else []
    for word in ("anyOf", "oneOf"):
        parts += [rng.choice(schema[word])] if schema.get(word) else []
    parts += schema.get("allOf", [])
    if len(parts) > 1 or parts and parts[0] is not schema:
        bare = {key: v for key, v in schema.items() if key not in ("anyOf", "oneOf", "allOf")}
        values = [near_value(rng, bare if p is schema else p, root, depth - 1) for p in parts]
        if all(isinstance(value, dict) for value in values):
            return {name: value for part in values for name, value in part.items()}
        return rng.choice(values)
    kind = schema.get("type") or _implied(schema)
    if isinstance(kind, list):
        kind = rng.choice(kind) if kind else "null"
    return _near(rng, kind, schema, root, depth)


def _target(reference: str, root):
    for part in reference.split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        root = root[int(part)] if isinstance(root, list) else root[part]
    return root


def _implied(schema):
    words = {
        "object": ("properties", "additionalProperties", "required", "propertyNames"),
        "array": ("items", "prefixItems", "minItems", "maxItems"),
        "string": ("pattern", "format", "minLength", "maxLength"),
        "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    }
    return [kind for kind, those in words.items() if any(word in schema for word in those)]


def _near(rng, kind, schema, root, depth):
    if kind == "null":
        return None
    if kind == "boolean":
        return rng.random() < 0.5
    if kind in ("integer", "number"):
        return near_number(rng, schema, kind)
    if kind == "string":
        return near_text(rng, schema)
    if kind == "array":
        first = schema.get("prefixItems", [])
        least = schema.get("minItems", 0)
        size = rng.randint(least, max(least, schema.get("maxItems", least + 3)))
        size = max(0, size + rng.choice([0, 0, 0, 0, 1, -1]))
        rest = schema.get("items", True)
        if rest is False:
            size = min(size, len(first))
        parts = [*first[:size], *[rest] * (size - len(first))]
        return [near_value(rng, part, root, depth - 1) for part in parts]
    value = {}
    properties, required = schema.get("properties", {}), schema.get("required", [])
    for name in [*properties, *(name for name in required if name not in properties)]:
        if rng.random() < (0.97 if name in required else 0.5):
            value[name] = near_value(rng, properties.get(name, True), root, depth - 1)
    extra = schema.get("additionalProperties", True)
    least = schema.get("minProperties", 0)
    more = least + rng.choice([0, 0, 1, 2]) if not properties else rng.choice([0, 0, 0, 1])
    if extra is not False or schema.get("patternProperties"):
        for name in rng.sample(NAMES, min(more, len(NAMES))):
            found = [
                part
                for pattern, part in schema.get("patternProperties", {}).items()
                if re.search(pattern, name)
            ]
            if name not in properties:
                value[name] = near_value(rng, found[0] if found else extra, root, depth - 1)
    return value


def near_number(rng: random.Random, schema: dict, kind: str):
    """A number inside the bounds, on them or just outside."""
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    low = low if low is not None else (high - 30 if high is not None else -30)
    high = high if high is not None else low + 30
    value = rng.choice([low, high, rng.uniform(low, high), rng.uniform(low, high)])
    value += rng.choice([0, 0, 0, 0, 1, -1, 0.1, -0.1, 0.001])
    step = schema.get("multipleOf")
    if step and rng.random() < 0.8:
        value = round(value / step) * step
    if kind == "integer" or rng.random() < 0.3:
        return round(value)
    value = round(value, rng.choice([1, 2, 3]))
    return 0 if value == 0 else value


def near_text(rng: random.Random, schema: dict) -> str:
    """A text of that pattern or format or length, or not quite."""
    if "pattern" in schema:
        text = rng.choice(PATTERNS.get(schema["pattern"], TEXTS))
    elif "format" in schema:
        text = rng.choice(FORMATS.get(schema["format"], TEXTS))
    else:
        least = schema.get("minLength", 0)
        size = rng.randint(least, min(schema.get("maxLength", least + 8), least + 8))
        size = max(0, size + rng.choice([0, 0, 0, 0, 1, -1]))
        text = "".join(rng.choice('ab "\\\n\u00e9\U0001f600/') for _ in range(size))
    return text if rng.random() < 0.8 else changed_text(rng, text)


def changed_text(rng: random.Random, text: str) -> str:
    """One character more, less, or another."""
    at, char = rng.randint(0, len(text)), rng.choice('aZ0-. "\\\n\u00e9\U0001f600@:')
    return text[:at] + rng.choice([char, "", char]) + text[at + rng.choice([0, 1, 1]) :]


def changed(rng: random.Random, value):
    """The value with one part of it changed."""
    value = copy.deepcopy(value)
    places, todo = [(None, None)], [value]
    while todo:
        inside = todo.pop()
        if isinstance(inside, (dict, list)):
            keys = list(inside) if isinstance(inside, dict) else range(len(inside))
            places += [(inside, key) for key in keys]
            todo += [inside[key] for key in keys]
    where, key = rng.choice(places)
    if where is None:
        return _other(rng, value)
    if rng.random() < 0.3:
        del where[key]
    else:
        where[key] = _other(rng, where[key])
    return value


def _other(rng, value):
    how = rng.random()
    if how < 0.3:
        return random_value(rng, 1)
    if isinstance(value, str):
        return changed_text(rng, value)
    if isinstance(value, bool) or value is None:
        return random_value(rng, 0)
    if isinstance(value, (int, float)):
        return round(value + rng.choice([1, -1, 0.1, -0.1, 0.01, 10]), 3)
    if isinstance(value, list):
        return value + [random_value(rng, 1)] if how < 0.7 else value[1:]
    return value | {rng.choice(NAMES): random_value(rng, 1)}


# ---------------------------------------------------------------- spelling


def spell(value, separators=(",", ":")) -> str:
    """As the default options accept it: raw characters, plain numbers."""
    return json.dumps(value, ensure_ascii=False, separators=separators)


def spell_oddly(rng: random.Random, value) -> str:
    """Another text of the same value: escapes, exponents, zeros at the end, spaces."""
    if isinstance(value, dict):
        parts = [_odd_text(rng, k) + ":" + spell_oddly(rng, v) for k, v in value.items()]
        return "{" + ",".join(parts) + "}"
    if isinstance(value, list):
        return "[" + rng.choice([",", ", "]).join(spell_oddly(rng, v) for v in value) + "]"
    if isinstance(value, str):
        return _odd_text(rng, value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        plain = spell(value)
        more = [plain, plain + (".0" if "." not in plain else "0"), plain + "e0", f"{value:.3e}"]
        return rng.choice(more + ["-0"] * (value == 0))
    return spell(value)


def _odd_text(rng, text):
    escaped = json.dumps(text)
    if rng.random() < 0.5 or not text:
        return escaped
    at = rng.randrange(len(text))
    code = json.dumps(text[at], ensure_ascii=True)[1:-1]
    if ord(text[at]) < 0x80:
        code = f"\\u{ord(text[at]):04x}"
    return spell(text[:at])[:-1] + code + spell(text[at + 1 :])[1:]


def arranged(value, schema, root=None):
    """The value with its properties in the order the schema names them, the others after them."""
    root = schema if root is None else root
    parts = _parts(schema, value, root, set())
    if isinstance(value, list):
        return [arranged(v, {"allOf": _items(parts, i)}, root) for i, v in enumerate(value)]
    if not isinstance(value, dict):
        return value
    named = {}
    for part in parts:
        for name in [*part.get("properties", {}), *part.get("required", [])]:
            named.setdefault(name)
    names = [name for name in named if name in value] + [n for n in value if n not in named]
    return {name: arranged(value[name], {"allOf": _members(parts, name)}, root) for name in names}


def _parts(schema, value, root, seen) -> list[dict]:
    """The schema and what it refers to, flat."""
    if not isinstance(schema, dict):
        return []
    parts = [schema]
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#") and reference not in seen:
        try:
            parts += _parts(_target(reference, root), value, root, seen | {reference})
        except (KeyError, IndexError, ValueError, TypeError):
            pass  # it points nowhere, or to a name
    for word in ("allOf", "anyOf", "oneOf"):
        branches = schema.get(word, []) if isinstance(schema.get(word), list) else []
        found = [_parts(branch, value, root, seen) for branch in branches]
        if word != "allOf":  # the branch that the value seems to be of comes first
            found.sort(key=lambda those: not any(_knows(part, value) for part in those))
        parts += [part for those in found for part in those]
    return parts


def _knows(part, value) -> bool:
    """Whether all names of the value, and those it must have, are named."""
    if not isinstance(value, dict) or not isinstance(part.get("properties"), dict):
        return False
    return set(value) <= set(part["properties"]) and set(part.get("required", [])) <= set(value)


def _members(parts, name):
    found = []
    for part in parts:
        if name in part.get("properties", {}):
            found.append(part["properties"][name])
        elif isinstance(part.get("additionalProperties"), dict):
            found.append(part["additionalProperties"])
        found += part.get("patternProperties", {}).values()
    return found


def _items(parts, at):
    found = []
    for part in parts:
        first = part.get("prefixItems", [])
        found += first[at : at + 1] or [part.get("items", True)]
    return found


# ---------------------------------------------------------------- the verdict of jsonschema


def validator(schema):
    """`jsonschema`'s Draft202012Validator, exact in numbers; give it `exactly(text)`.

    It needs tests/requirements.txt. Its `is_valid(value)` asserts formats.
    """
    import jsonschema

    base = jsonschema.Draft202012Validator

    class Formats:
        """Theirs, but for texts that their checks let pass against the standards."""

        def check(self, value, name):
            base.FORMAT_CHECKER.check(value, name)
            if isinstance(value, str) and name in FORMATS:
                if "\n" in value or not re.fullmatch(STRICTER.get(name, ".*"), value):
                    raise jsonschema.exceptions.FormatError(
                        f"{value!r} is not of the format {name}"
                    )

    def multiple_of(self, step, value, schema):
        if self.is_type(value, "number") and Fraction(value) % Fraction(step):
            yield jsonschema.ValidationError(f"{value} is not a multiple of {step}")

    def integer(checker, value):
        if isinstance(value, bool):
            return False
        return isinstance(value, (int, Decimal)) and Fraction(value).denominator == 1

    types = base.TYPE_CHECKER.redefine("integer", integer)
    kind = jsonschema.validators.extend(base, {"multipleOf": multiple_of}, type_checker=types)
    schema = ecma(exactly(schema if isinstance(schema, str) else json.dumps(schema)))
    return kind(schema, format_checker=Formats())


def exactly(text: str):
    """The value of a JSON text, numbers with a point or an exponent as decimals."""
    return json.loads(text, parse_float=Decimal)


def ecma(schema):
    """The schema with its patterns as Python's `re` must spell them."""
    if isinstance(schema, list):
        return [ecma(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    result = {}
    for word, value in schema.items():
        if word == "pattern" and isinstance(value, str):
            result[word] = ecma_pattern(value)
        elif word == "patternProperties":
            result[word] = {ecma_pattern(name): ecma(part) for name, part in value.items()}
        elif word in ("properties", "$defs", "definitions", "dependentSchemas"):
            result[word] = {name: ecma(part) for name, part in value.items()}
        elif word in ("const", "enum", "default", "examples"):
            result[word] = value
        else:
            result[word] = ecma(value)
    return result


SPACE = "\\t\\n\\v\\f\\r \\u00a0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000\\ufeff"


def ecma_pattern(pattern: str) -> str:
    """ECMA-262's `$ . \\d \\w \\s` in Python's words.

    `$` is the very end there and not also before a last line feed; `.` leaves out four ends of
    lines; `\\d` and `\\w` are ASCII, `\\s` is a list of its own.
    """
    inside, out, i = False, [], 0
    words = {"d": "0-9", "w": "A-Za-z0-9_", "s": SPACE}
    while i < len(pattern):
        char = pattern[i]
        if char == "\\":
            i += 1
            char = pattern[i]
            if char in words:
                out.append(words[char] if inside else f"[{words[char]}]")
            elif char.lower() in words and not inside:
                out.append(f"[^{words[char.lower()]}]")
            else:
                out.append("\\" + char if char != "/" else "/")
        elif inside:
            inside = char != "]"
            out.append(char)
        elif char == "[":
            inside = True
            out.append(char)
        else:
            out.append({"$": r"\Z", ".": "[^\\n\\r\\u2028\\u2029]"}.get(char, char))
        i += 1
    return "".join(out)


def main(count: int = 240):
    """Lines of a schema, texts of values it allows and of values it does not."""
    rng = random.Random(0)
    while count:
        schema = random_schema(rng, rng.choice([1, 2, 3]))
        judge, texts = validator(schema), {True: {}, False: {}}
        for _ in range(12):
            value = near_value(rng, schema, schema)
            for each in (value, changed(rng, value)):
                text = spell(arranged(each, schema))
                if len(text) < 200:
                    texts[judge.is_valid(exactly(text))][text] = None
        if len(spell(schema)) < 900 and texts[True] and texts[False]:
            valid, invalid = (list(texts[kind])[:5] for kind in (True, False))
            print(spell({"schema": schema, "valid": valid, "invalid": invalid}))
            count -= 1


if __name__ == "__main__":
    main()
