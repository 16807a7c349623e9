"""Fakes and checks, for your tests and ours."""
