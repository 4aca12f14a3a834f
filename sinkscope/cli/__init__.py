"""The command line: typer's options made from the pydantic fields of `options/`, how commands end, what is printed."""
