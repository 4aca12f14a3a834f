"""A source becomes token ids."""
