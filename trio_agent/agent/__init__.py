"""The engine. Private: import from `trio_agent` instead."""
