"""Files and folders that a user names: look up, open and parse them (text, JSON, YAML).

Opening a pipe waits for a writer that may never come; a name may be too long, in a loop of links, or not permitted;
a file may be so large that it fills the memory. Each of these is an `InputError` here, so that readers need no checks
of their own.
"""

import json
import os
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import AfterValidator, BaseModel, ValidationError

from sinkscope.errors import InputError, closest, one_line, unknown

LARGEST_FILE = 1 << 26  # bytes of a file that is read completely and parsed
DEEPEST = 100  # levels of nesting; real files have about ten


def user_path(name: str | os.PathLike[str]) -> Path:
    """Return the path that a user gave, with ~ replaced by the home folder. Raises InputError if there is none."""
    path = plain_path(name)
    try:
        return plain_path(path.expanduser())
    except RuntimeError:
        raise InputError(f"{one_line(name)}: no home folder of this user is known: write the path in full") from None


def plain_path(name: str | os.PathLike[str]) -> Path:
    """Return the path that a user gave, without expanding ~.

    Raises InputError if the path, or the target of its links, is not UTF-8, because tables, weights, run.json and the
    libraries that write them cannot hold such a name.
    """
    path = Path(name)
    try:
        is_path = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:  # half of a surrogate pair
        is_path = False
    if not is_path:
        raise InputError(f"{ascii(os.fspath(name))[:200]} holds characters that no path has")
    try:
        real = os.path.realpath(path)
    except OSError:  # the working folder was deleted
        real = str(path)
    if not (is_utf8(real) and is_utf8(str(path))):
        raise InputError(f"{one_line(real)} is not UTF-8: rename the file or folder, or name another one")
    return path


def is_utf8(text: str) -> bool:
    """Return whether a text can be written as UTF-8; a name of other bytes has halves of surrogate pairs."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def kind_of(path: Path) -> Literal["file", "folder"] | None:
    """Return whether a path is a file or a folder, or None if it does not exist. Raises InputError for other kinds."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise InputError(f"{one_line(path)} cannot be used: {error.strerror}") from None
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "folder"
    raise InputError(f"{one_line(path)} is a pipe, a socket or a device: give an ordinary file or folder")


def _looked_up(path: Path) -> Path:
    full = user_path(path)
    kind_of(full)
    return full


UserPath = Annotated[Path, AfterValidator(_looked_up)]  # the type of an option: a path that may or may not exist


def names_in(folder: Path) -> list[str]:
    """Return the sorted names of all entries of a folder; InputError if it cannot be read."""
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise InputError(f"{one_line(folder)} cannot be read: {error.strerror}") from None


def check_readable(path: Path) -> None:
    """Raise InputError unless there is an ordinary file that may be read."""
    _first_bytes(path, 0)


def _first_bytes(path: Path, count: int) -> bytes:
    kind = kind_of(path)
    if kind != "file":
        raise InputError(f"{one_line(path)}: {'this is a folder' if kind else 'no such file'}")
    try:
        with path.open("rb") as file:
            return file.read(count)
    except OSError as error:
        raise InputError(f"{one_line(path)} cannot be read: {error.strerror}") from None


def read_text_file(path: Path, largest: int = LARGEST_FILE) -> str:
    """Return the text of a file without a byte order mark; InputError if it is unreadable, too large or not UTF-8."""
    content = _first_bytes(path, largest + 1)
    if len(content) > largest:
        raise InputError(f"{one_line(path)} has more than {largest >> 20} MB: it is another kind of file")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"{one_line(path)} is not UTF-8 text") from None


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; InputError if it is unreadable, not JSON, or too deep."""
    try:
        content = json.loads(read_text_file(path))
        json.dumps(content, ensure_ascii=False).encode()  # JSON can hold half of a surrogate pair, which is not text
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else one_line(error)
        raise InputError(f"{one_line(path)} is not readable JSON: {why}") from None
    check_depth(path, content)
    return content


def read_object(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file with an object; InputError as in `read_json`, or for another kind of value."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise InputError(f"{one_line(path)} is JSON, but not an object")
    return content


def wrong_entry(error: ValidationError, levels: int | None = None) -> str:
    """Describe the first wrong entry of a JSON object, from pydantic's error; `levels` shortens the path to it."""
    worst = error.errors()[0]
    entry, value = one_line(".".join(map(str, worst["loc"][:levels])), 80), one_line(repr(worst["input"]), 50)
    if worst["type"] == "missing":
        return f"`{entry}` is missing"
    problem = worst["msg"].removeprefix("Value error, ").replace("Input should", "it should")
    return f"`{entry}` cannot be used: {problem}, not {value}"


def check_depth(path: Path, content: Any) -> None:
    """Raise InputError for content that is nested too deeply to be copied or printed."""
    level = [content]
    for _ in range(DEEPEST):
        parts = [part.values() if isinstance(part, dict) else part for part in level if isinstance(part, dict | list)]
        level = [child for part in parts for child in part]
        if not level:
            return
    raise InputError(f"{one_line(path)} is nested too deeply: more than {DEEPEST} levels")


@contextmanager
def named_file(path: Path, part: str = "") -> Iterator[None]:
    """Put the name of the file, and of a part of it, in front of the message of an InputError."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{path}: {part}{error}") from None


# ------------------------------------------------------------------------------------------------------------- YAML

YAML_ENDINGS = (".yaml", ".yml")
LARGEST_YAML = 1 << 20  # bytes
MOST_VALUES = 10_000  # values in a file, including repetitions by aliases
MISSPELLED = 0.85  # similarity from which on an unknown key is a misspelling of a known one

AnyContent = TypeVar("AnyContent", bound=BaseModel)


def read_yaml(path: Path, kind: type[AnyContent], what: str, options: Collection[str]) -> AnyContent:
    """Read a YAML file into the model `kind` of its content; InputError if it is unreadable, not YAML, or another kind.

    Messages call the file a `what`, and say which keys belong under `options`.
    """
    text = read_text_file(path, LARGEST_YAML)
    try:
        content = _with_text_for_keys(yaml.load(text, _Loader))
    # a value that looks like a date, a number or another YAML type may raise any of these
    except (yaml.YAMLError, ValueError, TypeError, ArithmeticError, LookupError, RecursionError) as error:
        raise InputError(f"{path} is not YAML: {_yaml_complaint(error)}") from None
    check_depth(path, content)
    try:  # run.json will hold it
        json.dumps(content, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, TypeError) as error:
        raise InputError(f"{path} cannot be written into run.json as JSON: {one_line(error)}") from None
    if content is None:
        raise InputError(f"{path} is empty: a {what} has at least a title")
    if not isinstance(content, dict):
        some = "text" if isinstance(content, str) else "a list" if isinstance(content, list) else f"only {content!r}"
        raise InputError(f"{path} is not a {what}: it holds {some}, and not keys and values, as `title: …`")
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        # an unknown key first: it may be the misspelling of a missing key
        worst = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
        raise InputError(f"{path}: {_complaint(worst, kind, options)}") from None


class _Loader(yaml.SafeLoader):
    """YAML's safe loader with a limit on values, since aliases of aliases double their number with every line."""

    def get_single_node(self) -> Any:
        node = super().get_single_node()
        if _count(node, {}) > MOST_VALUES:
            raise ValueError(f"with all its aliases (*name) it holds more than {MOST_VALUES} values")
        return node


def _count(node: Any, counted: dict[int, int]) -> int:
    """Count the values of a YAML node with its aliases; a node that contains itself has too many."""
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if id(node) not in counted:
        counted[id(node)] = MOST_VALUES + 1
        pairs = node.value if isinstance(node, yaml.MappingNode) else [(part,) for part in node.value]
        counted[id(node)] = min(1 + sum(_count(part, counted) for pair in pairs for part in pair), MOST_VALUES + 1)
    return counted[id(node)]


def _with_text_for_keys(content: Any) -> Any:
    """Convert all keys to text: YAML reads the keys `1` and `on` as a number and a truth value."""
    if not isinstance(content, dict):
        return content
    return {str(key): _with_text_for_keys(value) for key, value in content.items()}


def _yaml_complaint(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    if problem.startswith("but "):  # half of a sentence
        problem = f"{getattr(error, 'context', None) or ''} {problem}"
    hint = " (text with a colon in it needs quotes)" if "mapping values" in problem else ""
    return where + one_line(problem) + hint


_YAML_NEEDED = {  # pydantic's kind of error → the message about the value
    "string_type": "it must be text",
    "dict_type": "it must hold keys and values, as `seq-len: 64`",
    "tuple_type": "it must be a list, as [sink-map, sinks-by-layer]",
}


def _complaint(error: Any, kind: type[BaseModel], options: Collection[str]) -> str:
    """Describe one of pydantic's errors to the author of the file."""
    message = str(error["msg"]).removeprefix("Value error, ")
    if not error["loc"]:  # the error is about several keys together
        return message
    where, key = ".".join(str(part) for part in error["loc"]), str(error["loc"][0])
    if error["type"] == "missing":
        return f"it has no `{key}`"
    if error["type"] == "extra_forbidden":
        if len(error["loc"]) == 1:
            is_option = key.replace("-", "_") in options and closest(key, kind.model_fields, MISSPELLED) is None
            return f"`{key}` belongs under `options`" if is_option else f"key {unknown(key, kind.model_fields)}"
        return f"`{where}`: there is no such key"
    if error["type"] in _YAML_NEEDED:
        return f"`{where}`: {_YAML_NEEDED[error['type']]}, not {error['input']!r}"
    return f"`{where}`: {message}"
