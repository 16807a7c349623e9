"""Run an LLM agent as a durable session inside trio's structured concurrency."""

__version__ = "0.1.0.dev0"
