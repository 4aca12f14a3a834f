"""The command line: typer's options, made from the pydantic fields of `options/`, exit statuses, and printing."""
