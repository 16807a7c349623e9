"""The session as a pure state machine: a frozen checkpoint and the changes it allows."""
