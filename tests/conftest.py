"""One option: a folder of schemas for test_grammar.py."""


def pytest_addoption(parser):
    parser.addoption(
        "--schemas", metavar="FOLDER", help="for test_grammar.py: JSON-Schema-Test-Suite, or files"
    )
