"""Writes sinkscope/options/keywords.py, from which type checkers and editors know the options of Python functions.

python tests/keywords.py
"""

import inspect
import subprocess
import sys
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import sinkscope
from sinkscope.options.option import Options
from sinkscope.options.register import options_by_command
from sinkscope.options.signatures import types_of

KEYWORDS = Path(sinkscope.__file__).parent / "options" / "keywords.py"
HEAD = '''"""The types of the options of Python functions: written by tests/keywords.py from the pydantic fields."""

from collections.abc import Iterable, Sequence
from os import PathLike
from typing import Any, Literal, TypedDict

from sinkscope.options.given import Given
'''


def written() -> str:
    """Return the module's text: a TypedDict for each class of options, with the options that the class adds."""
    names = {name: name.replace("-", "_") for name in options_by_command()}
    functions = {name: inspect.unwrap(getattr(sinkscope, public)).__code__ for name, public in names.items()}
    codes = {name: code for name, code in functions.items() if code.co_flags & inspect.CO_VARKEYWORDS}
    # names that a function has as parameters of its own
    named = {name for code in codes.values() for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]}
    parents = [parent for name in codes for parent in reversed(options_by_command()[name].__mro__)]
    kinds = dict.fromkeys(kind for kind in parents if issubclass(kind, Options) and kind is not Options)
    parts = [HEAD, *(_class(kind, named) for kind in kinds)]
    return subprocess.run(
        [sys.executable, "-m", "ruff", "format", "--stdin-filename", KEYWORDS, "-"],
        input="\n\n".join(parts), capture_output=True, check=True, text=True,
    ).stdout  # fmt: skip


def _class(kind: type[Options], named: set[str]) -> str:
    bases = [_name(base) for base in kind.__bases__ if base is not Options] or ["TypedDict"]
    own = {name: of for name, of in types_of(kind).items() if name in kind.__annotations__ and name not in named}
    again = {name for base in kind.__bases__ if issubclass(base, Options) for name in base.model_fields}
    marks = {name: "  # type: ignore[misc]" for name in own if name in again}  # of another type than in the base
    fields = [f"    {name}: {_type(of)}{marks.get(name, '')}" for name, of in own.items()] or ["    pass"]
    return "\n".join([f"class {_name(kind)}({', '.join(bases)}, total=False):", *fields])


def _name(kind: type) -> str:
    return f"{kind.__name__.removesuffix('Options')}Keywords"


def _type(annotation: Any) -> str:
    """Spell a type as in code, the same in all versions of Python."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return " | ".join(map(_type, parts))
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, parts))}]"
    if origin is not None:
        return f"{origin.__name__}[{', '.join(map(_type, parts))}]"
    return "None" if annotation is NoneType else annotation.__name__


if __name__ == "__main__":
    KEYWORDS.write_text(written(), encoding="utf-8")
