"""What was asked, as pydantic models. Nothing here imports torch."""
