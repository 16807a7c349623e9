"""OpenAI's two wire formats, which many other servers speak as well."""

from trio_agent.model.openai_chat import OpenAIChat
from trio_agent.model.openai_responses import OpenAIResponses

__all__ = ["OpenAIChat", "OpenAIResponses"]
