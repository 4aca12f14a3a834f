"""A name becomes a wired model."""
