"""Files and folders that a user names: looked up, opened and parsed here, whoever reads them.

Opening a pipe waits for a writer that may never come; a name may be too long, in a circle of links, or not permitted;
a small file's place may be taken by one that fills the memory. Each is an `InputError` here, so that no reader has to
think of it.
"""

import json
import os
import stat
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from sinkscope.errors import InputError, one_line

LARGEST = 1 << 26  # bytes of a file that is read whole to be parsed
DEEPEST = 100  # nesting of its content; real ones have ten


def user_path(name: str | os.PathLike[str]) -> Path:
    """What a user named, with the home folder in place of ~.

    Raises:
        InputError: there is no such user, or no path can have this name.
    """
    path = plain_path(name)
    try:
        return path.expanduser()
    except RuntimeError:
        raise InputError(f"{one_line(name)}: no home folder of this user is known: write the path in full") from None


def plain_path(name: str | os.PathLike[str]) -> Path:
    """The same where ~ stands for itself."""
    path = Path(name)
    try:
        is_path = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:  # half of a surrogate pair
        is_path = False
    if not is_path:
        raise InputError(f"{ascii(os.fspath(name))[:200]} holds characters that no path has")
    return path


def kind_of(path: Path) -> Literal["file", "folder"] | None:
    """What there is at a path; None: nothing.

    Raises:
        InputError: it cannot be used, or is neither a file nor a folder.
    """
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
    kind_of(plain_path(path))
    return path


UserPath = Annotated[Path, AfterValidator(_looked_up)]  # of an option: there is nothing, a file or a folder


def names_in(folder: Path) -> list[str]:
    """The names of all entries of a folder, sorted. Raises: InputError."""
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


def read_text(path: Path, largest: int = LARGEST) -> str:
    """The text of a file that is to be parsed, a byte order mark left out.

    Raises:
        InputError: there is no such file, it cannot be read, it is too large, or it is not UTF-8.
    """
    content = _first_bytes(path, largest + 1)
    if len(content) > largest:
        raise InputError(f"{one_line(path)} has more than {largest >> 20} MB: it is another kind of file")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"{one_line(path)} is not UTF-8 text") from None


def read_json(path: Path) -> Any:
    """What a JSON file holds.

    Raises:
        InputError: as `read_text`, and for what is no JSON or nested too deeply.
    """
    try:
        content = json.loads(read_text(path))
        json.dumps(content, ensure_ascii=False).encode()  # half a character, which JSON can write, is no text
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else one_line(error)
        raise InputError(f"{one_line(path)} is not readable JSON: {why}") from None
    check_depth(path, content)
    return content


def check_depth(path: Path, content: Any) -> None:
    """Raise InputError for content nested deeper than anything that copies or prints it can follow."""
    level = [content]
    for _ in range(DEEPEST):
        parts = [part.values() if isinstance(part, dict) else part for part in level if isinstance(part, dict | list)]
        level = [child for part in parts for child in part]
        if not level:
            return
    raise InputError(f"{one_line(path)} is nested too deeply: more than {DEEPEST} levels")
