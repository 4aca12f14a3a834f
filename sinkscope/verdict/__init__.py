"""Tables become findings, and findings become sentences."""
