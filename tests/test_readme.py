"""The README is true: its files exist, its commands parse, its pictures are the files' own."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_pictures import EXPECTED, RUNS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
COMMANDS = sorted(set(re.findall(r"python (\w+\.py)((?: --[a-z-]+)*)", README)))


def test_the_first_screen_is_one_sentence_and_one_block_with_both_commands():
    title, sentence, block = README.split("\n\n", 2)
    assert title == "# Octavo" and sentence.count(". ") == 0
    first = block.split("```")[1]
    commands = re.findall(r"^\$ (.*)$", first, re.MULTILINE)
    assert len(commands) == 2
    assert "pip install" in commands[0] and "python generate.py --prompt" in commands[0]
    assert commands[1] in (ROOT / ".ci" / "run").read_text(), "the gate runs the same tests"


def test_every_file_it_names_exists():
    names = set(re.findall(r"`((?:tests/)?[\w/]+\.(?:py|json|txt))`", README))
    assert names
    missing = {name for name in names if not (ROOT / name).exists()} - {"config.json"}
    assert missing <= {"tokenizer.json"}, missing


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c[0] + c[1])
def test_every_command_it_names_has_those_flags(command):
    file, flags = command
    assert (ROOT / file).is_file()
    source = (ROOT / file).read_text()
    for flag in flags.split():
        name = flag.removeprefix("--").replace("-", "_")
        assert flag == "--help" or f'"{flag}"' in source or f'"{name}"' in source, (
            f"{file} has no {flag}"
        )


def test_every_top_level_file_is_in_the_table():
    for path in ROOT.glob("*.py"):
        assert f"`{path.name}`" in README, path.name


def test_its_pictures_are_what_the_files_draw():
    blocks = re.findall(r"^```\n\$ python (\w+\.py)(.*)\n([^$`]+?)```", README, re.MULTILINE)
    blocks = [b for b in blocks if "--profile" not in b[1] and "--prompt" not in b[1]]  # times
    assert blocks
    drawn = {tuple(arguments): EXPECTED / f"{name}.txt" for name, arguments in RUNS.items()}
    for file, flags, text in blocks:
        arguments = (file, *flags.split())
        if arguments in drawn:  # which test_pictures.py compares with what is drawn
            expected = drawn[arguments].read_text()
        else:
            command = [sys.executable, *arguments]
            expected = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, check=True
            ).stdout
        assert text.strip() == expected.strip(), f"python {file}{flags}"


def test_its_letters_are_those_of_the_comments():
    letters = set(re.findall(r"`([A-Z])` \|", README))
    for path in ROOT.glob("*.py"):
        for shape in re.findall(r"# \(([A-Z](?:, [A-Z])*)\)", path.read_text()):
            assert set(shape.split(", ")) <= letters, f"{path.name}: ({shape})"
