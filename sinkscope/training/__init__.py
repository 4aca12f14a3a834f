"""Training: the Trainer, blocks of text, tokenizer, architectures, tasks."""
