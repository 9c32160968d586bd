"""grammar.py's JSON Schema: what each keyword lets through, what is refused, and by which name.

By hand; known bugs; the door; and, slow, random schemas against jsonschema. The vocabulary is the
256 bytes, so that what a schema accepts is what its automata accept.
"""

import itertools
import json
import random
import time

import pytest

import grammar
from grammar import SchemaError

BYTES = grammar.Vocabulary([bytes([b]) for b in range(256)] + [None], [256])


# ---------------------------------------------------------------- helpers


def compiled(schema, **options):
    return grammar.compile(BYTES, json_schema=schema, **options)


def rows(table):
    """One test a row, named by its schema."""
    return pytest.mark.parametrize(
        "schema, good, bad", table, ids=[json.dumps(row[0])[:70] for row in table]
    )


def assert_reads(schema, good, bad, **options):
    made = compiled(schema, **options)
    assert [text for text in good if not made.accepts(text)] == []
    assert [text for text in bad if made.accepts(text)] == []


def obj(required=(), **properties):
    return {"type": "object", "properties": properties, "required": list(required)}


INTEGER, STRING, NUMBER, OBJECT = ({"type": t} for t in ("integer", "string", "number", "object"))


# ---------------------------------------------------------------- by hand


@rows(
    [
        (True, ["1", "null", '"a"', "[]", '{"a":[{}]}', "-1.5e3"], ["", "a", "nul", "[1", "1 "]),
        ({}, ['{"a":{"b":[true,null]}}', "0"], ["{a:1}", "[1,]", "01", "[,1]"]),
        ({"type": "null"}, ["null"], ["0", "false", '""']),
        ({"type": "boolean"}, ["true", "false"], ["0", "null", '"true"', "True"]),
        (STRING, ['""', '"a"', '"\\u00e4\\n"', '"ä"'], ["a", "1", '"', '"a', '"\n"']),
        (INTEGER, ["0", "-7", "12", "1.0"], ["1.5", "01", "-", "1e3", '"1"', "+1"]),
        (NUMBER, ["0", "-0.5", "1e5", "2.50"], ["01", ".5", "1.", "--1", "NaN", "1e"]),
        ({"type": "array"}, ["[]", '[1,"a",null,[]]'], ["{}", "1", "[1 2]"]),
        (OBJECT, ["{}", '{"a":1}', '{"":{"b":[]}}'], ["[]", '{"a"}', '{"a":1,}', "null"]),
        ({"type": ["string", "null"]}, ['"x"', "null"], ["1", "[]"]),
        ({"type": ["integer", "number"]}, ["1", "1.5"], ['"1"']),
    ]
)
def test_a_type_lets_its_values_through_and_no_others(schema, good, bad):
    assert_reads(schema, good, bad)


@rows(
    [
        ({"maximum": 3}, ["3", "-9", '"long"', "null", "[9]", '{"a":9}'], ["4", "3.01"]),
        ({"minLength": 2}, ['"ab"', "1", "[]", "{}"], ['"a"', '""']),
        ({"required": ["a"]}, ["1", '"x"', '{"a":1}', "[]"], ["{}", '{"b":1}']),
        ({"minItems": 1}, ["{}", "[1]", '""'], ["[]"]),
        ({"format": "ipv4"}, ['"1.2.3.4"', "1", "null"], ['"1.2.3"', '"256.0.0.1"']),
        ({"properties": {"a": INTEGER}}, ["1", "{}", '{"a":1}'], ['{"a":"x"}']),
        ({"type": "string", "maximum": 3}, ['"x"'], ["3"]),
        ({"type": "integer", "pattern": "(?=x)"}, ["1"], ['"x"']),
    ]
)
def test_a_keyword_binds_its_own_kind_of_value_only(schema, good, bad):
    assert_reads(schema, good, bad)


@rows(
    [
        ({"minimum": 2, "maximum": 5} | NUMBER, ["2", "5", "4.99", "5.0"], ["1", "5.7", "1.99"]),
        ({"exclusiveMinimum": 0} | NUMBER, ["0.1", "3"], ["0", "0.0", "-1"]),
        ({"exclusiveMaximum": 5} | INTEGER, ["4", "-100"], ["5", "5.0"]),
        ({"minimum": 5, "exclusiveMinimum": 5} | INTEGER, ["6"], ["5"]),
        ({"minimum": 5, "exclusiveMinimum": True} | INTEGER, ["6"], ["5"]),
        ({"multipleOf": 0.01} | NUMBER, ["99.99", "1", "0.50"], ["99.995", "0.001"]),
        ({"multipleOf": 16} | INTEGER, ["0", "16", "-32", "160"], ["8", "17"]),
        ({"multipleOf": 4, "allOf": [{"multipleOf": 6}]}, ["12", "24", '"a"'], ["4", "6", "18"]),
        ({"multipleOf": 1.5} | INTEGER, ["3", "0", "-6"], ["1.5", "1", "4.5"]),
        ({"minimum": -5} | INTEGER, ["-5", "-4", "0", "99"], ["-6", "-"]),
        ({"minimum": 3} | INTEGER, ["3", "10"], ["01", "2", "03"]),
        ({"maximum": 4.5} | NUMBER, ["4.50", "-0.0", "4.5"], ["4.51", "5"]),
    ]
)
def test_numbers_have_exact_bounds(schema, good, bad):
    assert_reads(schema, good, bad)


@rows(
    [
        (
            {"maxLength": 2} | STRING,
            ['"ab"', '"\\"\\n"', '"\\u0041b"', '"😀😀"'],
            ['"abc"', '"a\\n\\t"'],
        ),
        ({"maxLength": 1} | STRING, ['"\\ud83d\\ude00"', '"ä"'], ['"\\ud83d"', '"ab"']),
        ({"minLength": 2, "maxLength": 3} | STRING, ['"ab"', '"abc"'], ['"a"', '"abcd"']),
        ({"pattern": "b"} | STRING, ['"abc"', '"b"'], ['"a"', '""']),
        ({"pattern": "^a|b$"} | STRING, ['"ax"', '"xb"'], ['"xa"', '"bx"']),
        ({"pattern": "\\S"} | STRING, ['" x "'], ['" "', '""']),
        ({"pattern": "^[a-z]+$", "maxLength": 3} | STRING, ['"abc"'], ['"abcd"', '"A"', '""']),
        ({"pattern": "^a", "allOf": [{"pattern": "z$"}]}, ['"az"', '"abz"', "1"], ['"a"', '"z"']),
        (
            {"pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"},  # as pydantic writes a Decimal
            ['"0.50"', '"-12"', '".5"', '"7."'],
            ['"."', '"-"', '""', '"+."', '"1e5"', '"a"'],
        ),
        (
            {"pattern": "^(?=.*[0-9])(?!admin)[a-z0-9]+$", "maxLength": 6},
            ['"a1"', '"adm1n"', '"1admin"'],
            ['"abc"', '"admin1"', '"a123456"', '"A1"'],
        ),
        ({"format": "date"}, ['"0001-01-01"', '"0004-02-29"'], ['"0000-01-01"', '"0000-02-29"']),
        ({"format": "date", "pattern": "^2"}, ['"2024-01-31"'], ['"1999-01-31"', '"2024-1-31"']),
        (STRING, ['"I\'m"'], ['"I\\\'m"', '"\\x41"', '"\x00"']),
    ]
)
def test_strings_are_counted_in_characters_and_match_all_patterns(schema, good, bad):
    assert_reads(schema, good, bad)


@rows(
    [
        ({"const": "http://a/b"}, ['"http://a/b"'], ['"http:\\/\\/a\\/b"', '"http://a"']),
        ({"enum": ["开心", "难过"]}, ['"开心"', '"难过"'], ['"\\u5f00\\u5fc3"']),
        ({"const": 'a"\\\n'}, ['"a\\"\\\\\\n"'], ['"a\\u0022\\\\\\n"']),
        (
            {"enum": [1, 2.0, 0.5, 1e300]},
            ["1", "1.0", "2", "2.0", "0.5", "1e+300"],
            ["true", "0.50"],
        ),
        ({"enum": [True, None]}, ["true", "null"], ["1", "false", "0"]),
        ({"const": {"a": [1, {}], "b": "x"}}, ['{"a":[1,{}],"b":"x"}'], ['{"a":[1],"b":"x"}']),
        ({"type": ["string", "null"], "enum": ["a", None, 3]}, ['"a"', "null"], ["3"]),
        ({"enum": ["a", "abc", 7], "minLength": 2, "maximum": 5}, ['"abc"'], ['"a"', "7"]),
        ({"enum": [[1], [1, 1]], "uniqueItems": True}, ["[1]"], ["[1,1]"]),
        ({"enum": [{"a": 1}, {"b": 1}], "required": ["b"]}, ['{"b":1}'], ['{"a":1}']),
        ({"enum": ["a", "b"], "const": "b"}, ['"b"'], ['"a"']),
        (
            {"allOf": [{"enum": [1, 2, 3]}, {"enum": [2, 3, 4]}, {"not": {"const": 3}}]},
            ["2"],
            ["3", "1"],
        ),
        ({"const": -0.0}, ["0", "0.0"], ["1"]),
        ({"enum": [1, 2, 3], "exclusiveMinimum": 1, "exclusiveMaximum": 3}, ["2"], ["1", "3"]),
        ({"allOf": [{"enum": [1, "a"]}, {"enum": [1.0, True]}]}, ["1", "1.0"], ["true", '"a"']),
    ]
)
def test_listed_values_have_one_spelling_and_meet_the_keywords_beside_them(schema, good, bad):
    assert_reads(schema, good, bad)


@rows(
    [
        (
            obj(a=INTEGER, b=STRING),
            ["{}", '{"a":1}', '{"b":""}', '{"a":1,"b":""}'],
            ['{"b":"","a":1}'],
        ),
        (obj(["b"], a=INTEGER, b=STRING), ['{"b":""}', '{"a":1,"b":""}'], ["{}", '{"a":1}']),
        (obj(["a", "z"], a={}), ['{"a":1,"z":0}', '{"a":1,"z":0,"b":0}'], ['{"a":1}', '{"z":0}']),
        (obj(a={"const": 1}), ['{"b":2,"c":3}', '{"a":1,"b":2}'], ['{"b":2,"a":1}', '{"a":2}']),
        (obj(a=False) | {"required": []}, ["{}", '{"b":1}'], ['{"a":1}']),
        ({"type": "object", "properties": {}}, ["{}", '{"a":1}'], ["[]"]),
        (
            obj(a=INTEGER) | {"additionalProperties": False},
            ["{}", '{"a":1}'],
            ['{"b":1}', '{"":1}'],
        ),
        (
            obj(a=STRING) | {"additionalProperties": INTEGER},
            ['{"a":"","b":1}', '{"b":1}'],
            ['{"b":""}'],
        ),
        (
            {"required": ["k"], "additionalProperties": INTEGER} | OBJECT,
            ['{"k":1}', '{"k":1,"l":2}'],
            ['{"k":"x"}', "{}"],
        ),
        (
            obj(ab=INTEGER, abc=STRING),
            ['{"ab":1,"abc":""}', '{"abd":[]}'],
            ['{"ab":""}', '{"abc":1}'],
        ),
        (obj(**{'q"': INTEGER}), ['{"q\\"":1}'], ['{"q\\"":""}']),
        (
            obj(a={"type": "array", "items": STRING}),
            ['{"a":["x","y"]}'],
            ['{"a":[1]}', '{"a":"x"}'],
        ),
    ]
)
def test_members_come_in_the_order_of_the_schema_then_others(schema, good, bad):
    assert_reads(schema, good, bad)


@rows(
    [
        ({"patternProperties": {"^x": INTEGER}}, ['{"x":1,"y":""}', "{}"], ['{"xy":""}']),
        (
            {"patternProperties": {"^x": INTEGER, "y$": {"minimum": 5}}},
            ['{"xy":5}', '{"x":1}', '{"y":"s"}'],
            ['{"xy":1}', '{"xy":"s"}', '{"y":1}'],
        ),
        (
            {"properties": {"xa": {"maximum": 3}}, "patternProperties": {"^x": INTEGER}},
            ['{"xa":3}', '{"xb":9}'],
            ['{"xa":4}', '{"xa":"s"}'],
        ),
        (
            {"patternProperties": {"^x": INTEGER}, "additionalProperties": False} | OBJECT,
            ['{"x1":1}', "{}"],
            ['{"y":1}'],
        ),
        (
            {"propertyNames": {"pattern": "^[a-z]+$"}},
            ['{"ab":1}', "{}", "1"],
            ['{"A":1}', '{"":1}'],
        ),
        ({"propertyNames": {"enum": ["b", "a"]}}, ['{"b":1,"a":2}', '{"a":2}'], ['{"c":1}']),
        ({"propertyNames": {"maxLength": 1}}, ['{"a":1}'], ['{"ab":1}']),
        ({"propertyNames": {"not": {"enum": ["a"]}}}, ['{"b":1}'], ['{"a":1}']),
        (obj(abc=INTEGER) | {"propertyNames": {"maxLength": 2}}, ['{"x":1}'], ['{"abc":1}']),
        ({"propertyNames": False}, ["{}", "1"], ['{"a":1}']),
        ({"minProperties": 1} | OBJECT, ['{"a":1}', '{"a":1,"b":2}'], ["{}"]),
        ({"maxProperties": 1} | OBJECT, ["{}", '{"a":1}'], ['{"a":1,"b":2}']),
        (
            obj(a={}, b={}, c={}) | {"minProperties": 2, "maxProperties": 2},
            ['{"a":1,"c":1}', '{"b":1,"x":1}', '{"x":1,"y":1}'],
            ['{"a":1}', '{"a":1,"b":1,"c":1}', "{}"],
        ),
        (
            obj(["c"], a={}, b={}, c={}) | {"maxProperties": 2, "additionalProperties": False},
            ['{"c":1}', '{"a":1,"c":1}', '{"b":1,"c":1}'],
            ['{"a":1,"b":1}', '{"a":1,"b":1,"c":1}', "{}"],
        ),
    ]
)
def test_names_by_pattern_and_their_number(schema, good, bad):
    assert_reads(schema, good, bad)


@rows(
    [
        ({"items": INTEGER} | {"type": "array"}, ["[]", "[1]", "[1,2]"], ['["a"]', "[1,null]"]),
        ({"items": False}, ["[]", "1"], ["[1]"]),
        (
            {"prefixItems": [INTEGER, STRING]},
            ["[]", "[1]", '[1,""]', '[1,"",null]'],
            ['[""]', "[1,2]"],
        ),
        ({"prefixItems": [INTEGER], "items": STRING}, ['[1,"a","b"]'], ["[1,2]", '["a"]']),
        ({"prefixItems": [INTEGER], "items": False, "minItems": 1}, ["[1]"], ["[]", "[1,2]"]),
        ({"items": [INTEGER], "additionalItems": STRING}, ['[1,"a"]', "[]"], ["[1,2]"]),
        ({"items": [INTEGER], "additionalItems": False}, ["[1]", "[]"], ["[1,2]"]),
        (
            {"minItems": 2, "maxItems": 3, "items": INTEGER},
            ["[1,2]", "[1,2,3]"],
            ["[1]", "[1,2,3,4]"],
        ),
        ({"contains": INTEGER}, ["[1]", '["a",1,"b"]', "{}"], ["[]", '["a"]']),
        ({"contains": INTEGER, "minContains": 2}, ["[1,2]", '[1,"",2,3]'], ["[1]", '["",1]']),
        (
            {"contains": INTEGER, "maxContains": 1},
            ["[1]", '["",1,""]'],
            ["[]", "[1,2]", '[1,"",1]'],
        ),
        ({"contains": INTEGER, "minContains": 0}, ["[]", '[""]'], ["["]),
        ({"contains": INTEGER, "maxItems": 2}, ["[1]", '["",1]'], ['["","",1]', '["",""]', "[]"]),
        (
            {"items": {"enum": ["a", "b", 3]}, "uniqueItems": True, "minItems": 2},
            ['["a","b"]', '[3,"b","a"]'],
            ['["a"]', '["a","a"]', '["a","b","a"]', "[3,3.0]"],
        ),
        (
            {"items": {"type": "boolean"}, "uniqueItems": True},
            ["[]", "[true,false]"],
            ["[true,true]"],
        ),
        ({"uniqueItems": True, "maxItems": 1}, ["[]", "[1]"], ["[1,2]"]),
        ({"uniqueItems": False, "items": INTEGER}, ["[1,1]"], ['["a"]']),
    ]
)
def test_items_by_place_by_number_and_by_what_they_contain(schema, good, bad):
    assert_reads(schema, good, bad)


@rows(
    [
        ({"anyOf": [INTEGER, {"minLength": 2}]}, ["1", '"ab"', "null", "1.5"], ['"a"']),
        ({"anyOf": [INTEGER, STRING], "maximum": 3}, ["3", '"x"'], ["4", "null"]),
        (
            obj(a={}, b={}) | {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
            ['{"a":1}', '{"b":1}', '{"a":1,"b":1}'],
            ["{}", '{"c":1}'],
        ),
        ({"allOf": [{"minimum": 1}, {"maximum": 3}], "type": "integer"}, ["1", "3"], ["0", "4"]),
        (
            {"allOf": [obj(["a"], a=INTEGER), obj(["b"], b=STRING)]},
            ['{"a":1,"b":""}'],
            ['{"a":1}', '{"b":""}', '{"a":"","b":""}'],
        ),
        (
            {"allOf": [obj(a={"minimum": 2}), obj(a=INTEGER) | {"additionalProperties": False}]},
            ['{"a":2}', "{}"],
            ['{"a":1}', '{"a":2.5}', '{"b":1}'],
        ),
        ({"oneOf": [STRING, INTEGER]}, ['"a"', "1"], ["null", "1.5"]),
        ({"oneOf": [INTEGER, {"minimum": 2}]}, ["1", "2.5", '"a"'], ["3", "1.5"]),
        (
            {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]} | OBJECT,
            ['{"a":1}'],
            ['{"a":1,"b":1}', "{}"],
        ),
        ({"oneOf": [{"const": "a"}, {"const": "b"}, {"const": "b"}]}, ['"a"'], ['"b"', '"c"']),
        (
            {"oneOf": [{"format": "uuid"}, {"pattern": "^\\$[A-Z]+$"}], "type": "string"},
            ['"$AB"', '"123e4567-e89b-12d3-a456-426614174000"'],
            ['"x"', '"$"'],
        ),
        ({"not": {"type": "string"}}, ["1", "null", "[]"], ['"a"']),
        ({"not": INTEGER} | NUMBER, ["1.5", "-0.25"], ["1", "1.0", "2"]),
        ({"not": {"const": "ab"}} | STRING, ['"a"', '"abc"', '"b"'], ['"ab"', "1"]),
        (
            {"not": {"enum": [2, 3]}, "minimum": 1, "maximum": 4} | INTEGER,
            ["1", "4"],
            ["2", "3", "2.0"],
        ),
        ({"not": {"required": ["a"]}} | OBJECT, ["{}", '{"b":1}'], ['{"a":1}']),
        ({"not": {"pattern": "^a"}} | STRING, ['"b"', '""'], ['"a"', '"ab"']),
        ({"not": {"minItems": 1}}, ["[]"], ["[1]", "1"]),
        ({"not": {"items": INTEGER}}, ['["a"]', '[1,"a"]'], ["[]", "[1]", "1"]),
        ({"not": {"properties": {"a": INTEGER}}}, ['{"a":"x"}'], ["{}", '{"a":1}', "1"]),
        ({"not": False}, ["1"], ["x"]),
    ]
)
def test_combinations_are_merged_and_negated_exactly(schema, good, bad):
    assert_reads(schema, good, bad)


CARD = obj(card={}, bill={})


@rows(
    [
        (
            obj(["kind"], kind={"enum": ["a", "b"]}, x={})
            | {"if": {"properties": {"kind": {"const": "a"}}}, "then": {"required": ["x"]}},
            ['{"kind":"a","x":1}', '{"kind":"b"}'],
            ['{"kind":"a"}', '{"kind":"c"}'],
        ),
        (
            {"if": {"maximum": 0}, "then": INTEGER, "else": {"multipleOf": 2}} | NUMBER,
            ["-3", "4", "0"],
            ["3", "-0.5"],
        ),
        (
            {"if": {"items": STRING}, "then": {"minItems": 1}, "type": "array"},
            ['["a"]', "[1]"],
            ["[]"],
        ),
        (
            {
                "if": {"properties": {"t": {"const": 1}, "u": {"const": 2}}, "required": ["t"]},
                "then": {"properties": {"v": {"minimum": 3}}},
                "else": {"properties": {"v": {"maximum": 2}}},
            },
            ['{"t":1,"u":2,"v":3}', '{"t":1,"u":0,"v":1}', '{"v":2}', '{"t":1,"v":5}'],
            ['{"t":1,"u":2,"v":2}', '{"t":1,"u":0,"v":3}', '{"v":3}'],
        ),
        (CARD | {"dependentRequired": {"card": ["bill"]}}, ["{}", '{"bill":1}'], ['{"card":1}']),
        (CARD | {"dependencies": {"card": ["bill"]}}, ['{"card":1,"bill":1}'], ['{"card":1}']),
        (
            CARD | {"dependentSchemas": {"card": {"required": ["bill"]}}},
            ['{"card":1,"bill":1}', '{"bill":1}', "{}"],
            ['{"card":1}'],
        ),
        (
            CARD | {"dependencies": {"card": {"properties": {"bill": INTEGER}}}},
            ['{"bill":"x"}', '{"card":1,"bill":2}'],
            ['{"card":1,"bill":"x"}'],
        ),
        (
            {"allOf": [obj(a={})], "properties": {"b": {}}, "unevaluatedProperties": False},
            ['{"b":1,"a":1}', "{}"],
            ['{"c":1}'],
        ),
        (
            {"anyOf": [obj(["a"], a={}), obj(["b"], b={})], "unevaluatedProperties": False},
            ['{"a":1}', '{"b":1}', '{"a":1,"b":1}'],
            ['{"a":1,"c":1}', "{}"],
        ),
        (
            {
                "prefixItems": [INTEGER],
                "allOf": [{"prefixItems": [{}, STRING]}],
                "unevaluatedItems": False,
            },
            ['[1,"a"]', "[1]", "[]"],
            ['[1,"a",2]', "[1,2]"],
        ),
    ]
)
def test_what_depends_on_other_members_is_told_apart(schema, good, bad):
    assert_reads(schema, good, bad)


TREE = {"$defs": {"t": obj(["v"], v=INTEGER, next={"$ref": "#/$defs/t"})}, "$ref": "#/$defs/t"}


@rows(
    [
        (
            TREE,
            ['{"v":1}', '{"v":1,"next":{"v":2,"next":{"v":3}}}'],
            ['{"v":1,"next":{}}', '{"next":{"v":1}}'],
        ),
        ({"items": {"$ref": "#"}, "type": "array"}, ["[]", "[[],[[]]]"], ["[1]", "[[1]]"]),
        ({"$defs": {"a/b": INTEGER}, "$ref": "#/$defs/a~1b"}, ["1"], ['"a"']),
        ({"$defs": {"a~b%": INTEGER}, "$ref": "#/$defs/a~0b%25"}, ["1"], ['"a"']),
        ({"$defs": {"~1": INTEGER, "/": STRING}, "$ref": "#/$defs/~01"}, ["1"], ['"a"']),
        (
            {"oneOf": [obj(["n"], n={"$ref": "#"}), obj(["v"], v=INTEGER)]},
            ['{"v":1}', '{"n":{"v":1}}', '{"n":{"n":{"v":1}}}', '{"n":{"v":1},"v":""}'],
            ["{}", '{"n":{}}', '{"v":""}', '{"n":{"v":1},"v":1}'],
        ),
        ({"$defs": {"x": {"$anchor": "here"} | INTEGER}, "$ref": "#here"}, ["1"], ['"a"']),
        (
            {"$defs": {"x": {"$id": "http://a/b"} | INTEGER}, "$id": "http://a/", "$ref": "b"},
            ["1"],
            ['"a"'],
        ),
        (
            {"definitions": {"x": INTEGER}, "$ref": "#/definitions/x", "minimum": 5},
            ["5"],
            ["4", '"a"'],
        ),
        (
            {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "definitions": {"x": INTEGER},
                "$ref": "#/definitions/x",
                "minimum": 5,
            },
            ["4"],
            ['"a"'],
        ),
        ({"prefixItems": [INTEGER, {"$ref": "#/prefixItems/0"}]}, ["[1,2]"], ['[1,"a"]']),
        ({"properties": {"$ref": STRING}}, ['{"$ref":"x"}'], ['{"$ref":1}']),
        (
            obj(x={"$ref": "#/$defs/e"}, y=INTEGER)
            | {"$defs": {"e": obj(["e"], e={"$ref": "#/$defs/e"})}},
            ["{}", '{"y":1}'],
            ['{"x":{}}', '{"x":{"e":{}}}'],
        ),
    ]
)
def test_references_are_followed_inside_the_document(schema, good, bad):
    assert_reads(schema, good, bad)


FORMAT_ROWS = {
    "date": (
        ["2024-02-29", "2000-02-29", "1999-12-31"],
        ["2023-02-29", "1900-02-29", "2024-04-31", "24-1-1"],
    ),
    "time": (
        ["08:30:06Z", "23:59:60Z", "01:29:60+01:30", "08:30:06.28z", "00:00:00-23:59"],
        ["24:00:00Z", "22:59:60Z", "23:59:60+01:00", "08:30:06", "8:3:6Z", "00:00:00+24:00"],
    ),
    "date-time": (
        ["1998-12-31T15:59:60.1-08:00", "1963-06-19t08:30:06z"],
        ["1990-02-31T15:59:59Z", "2013-350T01:01:01Z"],
    ),
    "duration": (
        ["P4DT12H30M5S", "P2W", "PT36H", "P1Y2M"],
        ["P", "PT", "P1Y2D", "P1W1D", "PT1D", "4D"],
    ),
    "uuid": (
        ["2EB8AA08-aa98-11ea-b4aa-73b441d16380"],
        ["2eb8aa08aa9811eab4aa73b441d16380", "2eb8-a"],
    ),
    "ipv4": (["0.0.0.0", "255.1.20.99"], ["256.0.0.0", "01.0.0.0", "1.2.3", "1.2.3.4.5"]),
    "ipv6": (
        ["::", "::1", "1:2:3:4:5:6:7:8", "1::d6:192.168.0.1"],
        ["1::2::3", "1:2:3", "12345::", "::1%a"],
    ),
    "hostname": (
        ["a.b-c.example", "1x", "a" * 63],
        ["-a", "a-", "a_b", "a.", "a" * 64, ".".join(["a" * 60] * 5)],
    ),
    "email": (
        ["joe.b@example.com", '"a b"@[127.0.0.1]', "~@x"],
        ["a", "a@", ".a@b", "a..b@c", "a@b_c", "a b@c"],
    ),
    "uri": (
        ["http://a.b:80/c?d#e", "urn:x:y", "ldap://[2001:db8::7]/c"],
        ["/abc", "a b:c", "http://a/%6G", "//x"],
    ),
}


@pytest.mark.parametrize("name", FORMAT_ROWS)
def test_a_format_is_enforced(name):
    made = compiled({"format": name, "type": "string"})
    good, bad = FORMAT_ROWS[name]
    assert [text for text in good if not made.accepts(json.dumps(text))] == []
    assert [text for text in bad if made.accepts(json.dumps(text))] == []


def test_white_space_is_one_slot_between_two_tokens():
    schema = obj(["a"], a={"type": "array", "items": INTEGER})
    compact, loose = '{"a":[1,2]}', '{ "a" : [ 1 , 2 ] }'
    indented = '{\n  "a": [\n\t1,\n' + " " * 20 + "2\n]\n}"
    endless = [
        '{  "a":[]}',
        '{\n\n"a":[]}',
        '{"a":' + " " * 200 + "[]}",
        "{\n" + " " * 21 + '"a":[]}',
    ]
    outer = [' {"a":[]}', '{"a":[]} ', '{"a":[]}\n']
    assert_reads(schema, [compact, loose, indented], endless + outer)
    assert_reads(schema, [compact], [loose, indented, *outer], whitespace="compact")
    assert_reads(schema, [compact, loose, indented, *endless], outer, whitespace="any")
    assert_reads({"const": {"b": [1, 2]}}, ['{"b":[1,2]}', '{"b": [1, 2]}'], ['{"b":  [1,2]}'])


def test_a_schema_may_be_text_and_its_last_duplicate_counts():
    assert_reads('{"type":"integer","type":"string"}', ['"a"'], ["1"])
    assert_reads("true", ["1"], [""])


def test_what_is_an_annotation_is_not_enforced_and_a_format_says_so():
    schema = {"title": 5, "x-any": {"type": "strin"}, "format": "color", "nullable": True} | STRING
    made = compiled({"properties": {"a": schema}})
    assert made.accepts('{"a":"x"}') and not made.accepts('{"a":null}')
    assert made.ignored == ["#/properties/a/nullable", "#/properties/a/format"]


def test_a_lenient_compilation_lists_what_it_ignored():
    schema = {
        "type": "array",
        "uniqueItems": True,
        "items": {"anyOf": [{"pattern": "(?=a)", "maxLength": 3}, {"$ref": "other.json"}]} | STRING,
        "not": {"prefixItems": [{}], "items": INTEGER},
    }
    made = compiled(schema, lenient=True)
    assert made.accepts('["a","a"]') and not made.accepts("[1]")
    assert set(made.ignored) == {
        "#/uniqueItems",
        "#/items/anyOf/0/pattern",
        "#/items/anyOf/1/$ref",
        "#/not",
    }


# ---------------------------------------------------------------- known bugs


def test_alternatives_that_begin_alike_can_all_be_finished():
    option = lambda name: obj(["t", "x"], t={"const": name}, x=INTEGER)  # noqa: E731
    good = ['{"t":"alpha","x":1}', '{"t":"apple","x":2}']
    assert_reads({"anyOf": [option("alpha"), option("apple")]}, good, ['{"t":"alphe","x":1}'])


def test_a_declared_name_cannot_come_back_as_an_escape():
    made = compiled(obj(a=STRING, b=STRING))
    assert made.accepts('{"b":"bar","c":1}')
    assert not made.accepts('{"b":"bar","a":1}') and not made.accepts('{"b":"bar","\\u0061":1}')
    after = made.machine.run(b'{"b":"bar","a', made.start)
    assert not made.machine.step(after, ord('"')) and not made.machine.step(after, ord("\\"))


def test_counts_do_not_cost_what_they_count_to():
    many = {"type": "array", "items": INTEGER, "minItems": 10, "maxItems": 30_000}
    long = {"type": "string", "maxLength": 100_000, "minLength": 5000}
    begin = time.process_time()
    made = compiled(obj(["m"], m=many, l=long))
    assert time.process_time() - begin < 10
    assert made.accepts('{"m":[' + ",".join("1" * 10) + "]}")
    assert not made.accepts('{"m":[' + ",".join("1" * 9) + "]}")
    assert made.accepts('{"m":[' + ",".join("1" * 500) + "]}")


def test_wide_objects_compile_and_run():
    names = [f"p{i}" for i in range(1000)]
    schema = {
        "properties": {name: {"type": "boolean"} for name in names},
        "additionalProperties": False,
    }
    assert_reads(schema, ["{}", '{"p3":true,"p999":false}'], ['{"p9":true,"p3":true}', '{"x":1}'])
    endless = {"type": "object", "properties": {"e": {"$ref": "#/$defs/e"}}, "required": ["e"]}
    few = names[:300]
    schema = obj(["p299"], **{name: INTEGER for name in few}, x={"$ref": "#/$defs/e"})
    schema["$defs"] = {"e": endless}
    assert_reads(schema, ['{"p7":1,"p299":2}'], ["{}", '{"p7":1}', '{"p299":1,"x":{}}'])
    whole = "{" + ",".join(f'"{name}":true' for name in few) + "}"
    assert_reads({"required": few}, [whole], ["{}", '{"p0":true}'])


def test_long_lists_of_titled_values_are_read():
    options = [{"const": f"v{i}", "title": "t"} for i in range(600)]
    for keyword in ("oneOf", "anyOf"):
        assert_reads({keyword: options}, ['"v7"', '"v599"'], ['"v600"', '"v"'])


# ---------------------------------------------------------------- the door


def deep(levels):
    schema = STRING
    for _ in range(levels):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    "schema, path, keyword, reason",
    [
        (
            {"properties": {"a": {"uniqueItems": True}}},
            "#/properties/a",
            "uniqueItems",
            "all items",
        ),
        (
            {"properties": {"a/b": {"required": "a"}}},
            "#/properties/a~1b",
            "required",
            "list of names",
        ),
        ({"items": {"minimum": "3"}}, "#/items", "minimum", '"3" is not a number'),
        ({"type": "strin"}, "#", "type", "not a type"),
        ({"minLength": -1}, "#", "minLength", "not a count"),
        ({"maxItems": 1.5}, "#", "maxItems", "not a count"),
        ({"multipleOf": 0}, "#", "multipleOf", "above 0"),
        ({"anyOf": []}, "#", "anyOf", "list of schemas"),
        ({"allOf": [3]}, "#", "allOf", "list of schemas"),
        ({"properties": {"a": 3}}, "#", "properties", "object of schemas"),
        ({"enum": "a"}, "#", "enum", "not a list"),
        ({"uniqueItems": "yes"}, "#", "uniqueItems", "truth value"),
        ({"items": [{}], "prefixItems": [{}]}, "#", "items", "beside prefixItems"),
        (
            {"prefixItems": [{"enum": [1, 2]}], "items": {"const": "A"}, "uniqueItems": True},
            "#",
            "uniqueItems",
            "all items",
        ),
        ({"items": {"pattern": "(?=a)"}}, "#/items", "pattern", "look-ahead"),
        ({"pattern": "^(?!a)b|c"}, "#", "pattern", "alternative"),
        ({"pattern": "^(?!a"}, "#", "pattern", "without its )"),
        ({"patternProperties": {"\\1": {}}}, "#", "patternProperties", "back reference"),
        ({"$dynamicRef": "#a"}, "#", "$dynamicRef", "not supported"),
        ({"items": {"$ref": "http://a/b.json"}}, "#/items", "$ref", "another document"),
        ({"$ref": "#/$defs/none"}, "#", "$ref", "leads to no schema"),
        ({"$ref": "#/type", "type": "object"}, "#", "$ref", "leads to no schema"),
        (
            {"$defs": {"A": {"$ref": "#/$defs/A"}}, "$ref": "#/$defs/A"},
            "#/$defs/A",
            "$ref",
            "itself",
        ),
        ({"anyOf": [STRING, {"$ref": "#"}]}, "#", "$ref", "itself"),
        ({"oneOf": [{"uniqueItems": True}, {"minItems": 1}]}, "#", "oneOf", "excludes"),
        ({"not": {"propertyNames": {"maxLength": 1}}}, "#", "not", "excludes"),
        ({"not": {"const": []}}, "#", "not", "excludes"),
        ({"not": {"patternProperties": {"a": INTEGER}}}, "#", "not", "excludes"),
        (
            {"contains": STRING, "allOf": [{"contains": INTEGER}]},
            "#/allOf/0",
            "contains",
            "two of them",
        ),
        ({"contains": STRING, "minContains": 30_000}, "#", "contains", "states"),
        (
            obj(**{f"p{i}": {} for i in range(500)}) | {"minProperties": 99},
            "#",
            "minProperties",
            "states",
        ),
        ({"$schema": "http://json-schema.org/draft-03/schema#"}, "#", "$schema", "draft-03"),
        ({"minimum": 5, "maximum": 1} | INTEGER, "#", "", "accepts nothing"),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 1} | INTEGER, "#", "", "accepts nothing"),
        (False, "#", "", "accepts nothing"),
        ({"enum": []}, "#", "", "accepts nothing"),
        (obj(["a"], a=False), "#", "", "accepts nothing"),
        (TREE | {"$defs": {"t": obj(["t"], t={"$ref": "#/$defs/t"})}}, "#", "", "accepts nothing"),
        ([1], "#", "", "not a schema"),
        ('{"type":', "#", "", "not JSON"),
        ({"minimum": float("nan")}, "#", "", "not JSON"),
        ({"const": {1, 2}}, "#", "", "not JSON"),
        ({"enum": ["\ud83d"]}, "#", "", "surrogate"),
        ({"enum": ["x" * 300_000]}, "#", "", "bytes"),
        (deep(100), "#", "", "64 levels"),
        ('{"items":' * 5000 + "{}" + "}" * 5000, "#", "", "64 levels"),
        (deep(5000), "#", "", "64 levels"),
        (
            {
                "allOf": [
                    {"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(9)
                ]
            },
            "#",
            "allOf",
            "256",
        ),
        (
            {
                "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(99)},
                "$ref": "#/$defs/d0",
            },
            "#/$defs/d63",
            "$ref",
            "64",
        ),
    ],
)
def test_what_is_not_enforced_is_refused_by_name(schema, path, keyword, reason):
    begin = time.process_time()
    with pytest.raises(SchemaError) as error:
        compiled(schema)
    assert (error.value.path, error.value.keyword) == (path, keyword)
    assert reason in error.value.reason
    assert time.process_time() - begin < 10


@pytest.mark.parametrize(
    "schema, place",
    [
        ({"allOf": [STRING], "$ref": "#/allOf/" + "9" * 5000}, "#/$ref"),
        ({"$id": "http://x", "items": {"$id": "//["}}, "#/items/$id"),
        ({"$id": "http://x", "$ref": "//["}, "#/$ref"),
        ("person.json", "person.json"),
    ],
    ids=["an index with many digits", "a bad $id", "a bad $ref", "a file's name"],
)
def test_what_the_standard_library_refuses_is_refused_by_place(schema, place):
    with pytest.raises(SchemaError, match=place.replace("$", r"\$")) as error:
        compiled(schema)
    assert len(str(error.value)) < 200


@pytest.mark.parametrize(
    "keywords",
    [{}, {"minimum": 0}, {"minimum": -3, "maximum": 120}, {"multipleOf": 4}, {"enum": [4, 12, 0]}],
    ids=json.dumps,
)
def test_an_integer_of_draft_04_has_no_point(keywords):
    draft = {"$schema": "http://json-schema.org/draft-04/schema#"}
    whole, pointed = ["0", "4", "12"], ["0.0", "4.0", "12.0"]
    assert_reads(INTEGER | keywords | draft, whole, [*pointed, "4.", "4.5", "04", "4e0"])
    assert_reads(INTEGER | keywords, [*whole, *pointed], ["4.", "4.5"])


def test_many_objects_told_apart_by_a_constant_are_one_stack(monkeypatch):
    """A call for each of 250 tools once had more meanings than a mask follows."""
    monkeypatch.setattr(grammar, "STACKS", 64)
    tools = [obj(["name", "x"], name={"const": f"tool {i}"}, x=INTEGER) for i in range(99)]
    text = '{"name":"tool 42","x":1}'
    assert_reads({"anyOf": tools}, [text], [text.replace("42", "99")])


def test_a_compilation_has_a_time_limit(monkeypatch):
    monkeypatch.setattr(grammar, "COMPILE_S", -1.0)
    with pytest.raises(SchemaError, match="takes more than"):
        compiled(obj(a=INTEGER))


# ---------------------------------------------------------------- by property

NAMES = ["a", "b", "c", "ab", 'x"y']
VALUES = [
    None,
    True,
    False,
    0,
    1,
    2,
    3,
    -1,
    1.5,
    2.0,
    10,
    "",
    "a",
    "b",
    "ab",
    "abc",
    'x"y',
    [],
    [1],
]
VALUES += [
    ["a"],
    [1, 1],
    [1, 2],
    [True, 1],
    {},
    {"a": 1},
    {"b": 2},
    {"a": 1, "b": 2},
    {"a": {"a": 1}},
]
PATTERNS = ["^a", "b$", "a", "^[ab]+$", "^.{2}$", "c|^b"]


def random_schema(r, depth):
    """A schema of random keywords; references are to `#/$defs/A`."""
    if r.random() < 0.08:
        return r.random() < 0.8

    def sub():
        return random_schema(r, depth - 1)

    def named():
        return {name: sub() for name in r.sample(NAMES, r.randint(1, 3))}

    scalar = [
        lambda: {"minimum": r.choice([0, 1, 1.5, 2])},
        lambda: {"exclusiveMaximum": r.choice([1, 2, 3])},
        lambda: {"multipleOf": r.choice([1, 2, 0.5])},
        lambda: {"minLength": r.randint(0, 2)},
        lambda: {"maxLength": r.randint(0, 2)},
        lambda: {"pattern": r.choice(PATTERNS)},
        lambda: {"enum": r.sample(VALUES, r.randint(1, 5))},
        lambda: {"const": r.choice(VALUES)},
        lambda: {"required": r.sample(NAMES, r.randint(1, 2))},
        lambda: {"minProperties": r.randint(0, 2)},
        lambda: {"maxProperties": r.randint(0, 3)},
        lambda: {"minItems": r.randint(0, 2)},
        lambda: {"maxItems": r.randint(0, 3)},
        lambda: {"uniqueItems": True},
        lambda: {"dependentRequired": {r.choice(NAMES): r.sample(NAMES, r.randint(0, 2))}},
    ]
    nested = [
        lambda: {"properties": named()},
        lambda: {"properties": named(), "required": r.sample(NAMES, 1)},
        lambda: {"additionalProperties": sub()},
        lambda: {"additionalProperties": False},
        lambda: {"patternProperties": {p: sub() for p in r.sample(PATTERNS, 2)}},
        lambda: {"propertyNames": r.choice([{"pattern": "^a"}, {"enum": NAMES[:2]}, sub()])},
        lambda: {"items": sub()},
        lambda: {"prefixItems": [sub(), sub()]},
        lambda: {"contains": sub(), "minContains": r.randint(0, 2)},
        lambda: {"contains": sub(), "maxContains": r.randint(1, 2)},
        lambda: {r.choice(["anyOf", "oneOf", "allOf"]): [sub() for _ in range(r.randint(1, 3))]},
        lambda: {"not": sub()},
        lambda: {"if": sub(), r.choice(["then", "else"]): sub()},
        lambda: {"dependentSchemas": {r.choice(NAMES): sub()}},
        lambda: {r.choice(["unevaluatedProperties", "unevaluatedItems"]): r.choice([False, sub()])},
        lambda: {"$ref": r.choice(["#/$defs/A", "#"])},
    ]
    schema = {}
    if r.random() < 0.5:
        schema["type"] = r.choice(["string", "integer", "object", "array", ["number", "object"]])
    for _ in range(r.choice([0, 1, 1, 2, 3])):
        schema |= r.choice(scalar + 2 * nested if depth else scalar)()
    return schema


def random_value(r, depth):
    kind = r.random()
    if not depth or kind < 0.6:
        return r.choice(VALUES)
    if kind < 0.8:
        return [random_value(r, depth - 1) for _ in range(r.randint(0, 3))]
    return {name: random_value(r, depth - 1) for name in r.sample(NAMES, r.randint(0, 3))}


def orders(value):
    """The value with the members of its objects in all orders."""
    if isinstance(value, list):
        yield from map(list, itertools.product(*map(list, map(orders, value))))
    elif isinstance(value, dict):
        for names in itertools.permutations(value):
            for values in itertools.product(*(list(orders(value[name])) for name in names)):
                yield dict(zip(names, values))
    else:
        yield value


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_random_schemas_accept_what_jsonschema_does(seed):
    jsonschema = pytest.importorskip("jsonschema")
    r = random.Random(seed)
    compared = 0
    for _ in range(700):
        schema = random_schema(r, r.choice([1, 2, 2, 3]))
        if "$ref" in json.dumps(schema):
            schema["$defs"] = {"A": random_schema(r, 1)}
        try:
            accepts = compiled(schema, whitespace="compact").accepts
        except SchemaError as error:
            if "accepts nothing" not in str(error):
                continue
            accepts = lambda text: False  # noqa: E731
        validator = jsonschema.Draft202012Validator(schema)
        for _ in range(12):
            value = random_value(r, 2)
            texts = [
                json.dumps(v, separators=(",", ":")) for v in itertools.islice(orders(value), 400)
            ]
            if len(texts) < 400:
                compared += 1
                found = any(map(accepts, texts))
                assert found == validator.is_valid(value), (schema, value)
    assert compared > 4000
