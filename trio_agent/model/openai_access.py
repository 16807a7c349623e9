"""Where the two formats of OpenAI are spoken: the address, the key, and how it is shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from trio_agent.model.http import Access, require_httpx2

_URL: Final = "https://api.openai.com/v1"


def openai_access(api_key: str | None, base_url: str | None) -> Access:
    """Return whom to ask, with which key: see `Access`.

    Raises:
        ConfigError: If a key is missing, the address is unsafe or httpx2 is not
            installed.
    """
    require_httpx2("openai")
    return Access(
        api_key=api_key,
        base_url=base_url,
        key_variable="OPENAI_API_KEY",
        url_variable="OPENAI_BASE_URL",
        default_url=_URL,
    )


def with_bearer(headers: Mapping[str, str] | None, access: Access) -> dict[str, str]:
    """Return *headers* with the key of *access*, if it has one."""
    bearer = {"authorization": f"Bearer {access.key}"} if access.key else {}
    return {**(headers or {}), **bearer}
