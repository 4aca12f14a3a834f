"""Tables become words and pictures."""
