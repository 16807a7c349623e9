"""What middlewares may add to a prompt and to a frontend; pure."""

from __future__ import annotations

from collections.abc import Sequence

from trio_agent.errors import ConfigError, DuplicateError
from trio_agent.middleware.base import PromptSection
from trio_agent.protocol.frontend import Contribution
from trio_agent.protocol.limits import MAX_NAME_BYTES
from trio_agent.protocol.text import check_text, utf8_length


def render_section(name: str, section: PromptSection) -> str:
    """Return the section of middleware *name* under its own heading.

    Raises:
        ConfigError: If the title is not one line of text or the body is blank.
    """
    title, body = section.title, section.body
    if not title.strip() or not title.isprintable():
        raise ConfigError(f"middleware {name!r}: a prompt section's title is one line of text")
    if not body.strip():
        raise ConfigError(f"middleware {name!r}: the prompt section {title!r} has a blank body")
    text = f"## {title}\n\n{body}"
    try:
        utf8_length(text)
    except ValueError as exc:
        raise ConfigError(f"middleware {name!r}: prompt section: {exc}") from None
    return text


def check_contributions(found: Sequence[tuple[str, Contribution]]) -> None:
    """Check the contributions of all middlewares, each with the name of its own.

    Raises:
        ConfigError: If one names another capability, if the name of a command or the
            value of a reference is blank or has white space, or if a trigger is not
            one visible character.
        DuplicateError: If two commands, or two references of one trigger, are equal.
    """
    commands: dict[str, str] = {}
    references: dict[tuple[str, str], str] = {}
    for name, contribution in found:
        if contribution.capability != name:
            raise ConfigError(
                f"middleware {name!r} contributes as {contribution.capability!r}; "
                "a contribution's capability is the middleware's own name"
            )
        for command in contribution.commands:
            _check_word(name, "command", command.name)
            if command.name in commands:
                raise DuplicateError(
                    f"command {command.name!r} is declared twice: by middlewares "
                    f"{commands[command.name]!r} and {name!r}"
                )
            commands[command.name] = name
        for reference in contribution.references:
            _check_trigger(name, reference.trigger)
            _check_word(name, "reference", reference.value)
            key = (reference.trigger, reference.value)
            if key in references:
                raise DuplicateError(
                    f"reference {''.join(key)!r} is declared twice: by middlewares "
                    f"{references[key]!r} and {name!r}"
                )
            references[key] = name


def _check_word(name: str, what: str, word: str) -> None:
    try:
        check_text(word, name=what, limit=MAX_NAME_BYTES, blank=False)
    except ValueError as exc:
        raise ConfigError(f"middleware {name!r}: {exc}") from None
    if any(char.isspace() for char in word):
        raise ConfigError(f"middleware {name!r}: {what} {word!r} has white space in it")


def _check_trigger(name: str, trigger: str) -> None:
    if len(trigger) != 1 or trigger.isspace() or not trigger.isprintable():
        raise ConfigError(
            f"middleware {name!r}: reference trigger {trigger!r} is not one visible character"
        )
