"""Tasks in place of a text."""
