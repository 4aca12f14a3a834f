"""The one door into attention."""
