"""The `trio-agent` command: a thin frontend over ops and events."""
