"""Where tools act, and whose consent they need."""
