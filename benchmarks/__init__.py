"""Measurements: each module is a command that says what it needs and what it writes."""
