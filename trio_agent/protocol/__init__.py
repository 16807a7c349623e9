"""The vocabulary between a frontend and a session: frozen records and their wire form."""
