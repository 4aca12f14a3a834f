"""Turns a source of text into token ids."""
