"""Every python example in the documents is a whole program, and runs."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest

from trio_agent.cli.arguments import parse_arguments

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]+)[^)]*\)")


def blocks(language: str) -> list[tuple[Path, int, str]]:
    """Return page, line number and text of every block in *language*."""
    found: list[tuple[Path, int, str]] = []
    for page in PAGES:
        text = page.read_text()
        found += [
            (page, text[: match.start(2)].count("\n") + 1, match[2])
            for match in FENCE.finditer(text)
            if match[1] == language
        ]
    return found


EXAMPLES = blocks("python")


@pytest.mark.parametrize(
    ("page", "line", "source"),
    EXAMPLES,
    ids=[f"{page.relative_to(ROOT)}:{line}" for page, line, _ in EXAMPLES],
)
def test_an_example_runs(
    page: Path, line: int, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        # Padded, so that a traceback names the line of the page.
        code = compile("\n" * (line - 1) + source, str(page), "exec")
        exec(code, {"__name__": "__main__"})  # that is the test
    if (promised := promised_output(page, line, source)) is not None:
        assert printed.getvalue() == promised


def promised_output(page: Path, line: int, source: str) -> str | None:
    """Return the text block that follows an example with ``It prints:``, if one does."""
    rest = "\n".join(page.read_text().split("\n")[line + source.count("\n") :])
    match = re.match(r"\s*It prints:\s*```text\n(.*?)^```$", rest, re.MULTILINE | re.DOTALL)
    return None if match is None else match[1]


def test_there_are_examples_and_the_first_is_the_readme_s() -> None:
    assert {ROOT / "README.md", ROOT / "docs" / "tools.md"} <= {page for page, _, _ in EXAMPLES}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        assert (page.parent / target).exists(), target


def test_commands_in_the_documents_are_ones_that_the_command_understands() -> None:
    commands = [
        words
        for _, _, text in blocks("sh")
        for part in re.split(r"\n|&&", text)
        if (words := shlex.split(part, comments=True))
        if Path(words[0]).name == "trio-agent"
    ]
    assert commands
    for words in commands:
        parse_arguments(words[1:])


def test_the_readme_and_ci_run_the_tests_with_one_command() -> None:
    command = "HYPOTHESIS_PROFILE=ci {}python -m pytest -q -n auto"
    assert command.format(".venv/bin/") in (ROOT / "README.md").read_text()
    assert command.format("") in (ROOT / ".ci" / "run").read_text()
