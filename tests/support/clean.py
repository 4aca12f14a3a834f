"""Programs in processes that have imported neither sinkscope nor a model of transformers.

Importing torch takes seconds. One process imports it, and the other libraries that transformers and sinkscope need; it
forks a child for every program. Of transformers itself it has the lazy top level and `utils`, which every import of a
name from transformers imports first.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from support.forked import work_and_exit

LIBRARIES = (
    "PIL.ExifTags",
    "accelerate",
    "gguf",
    "huggingface_hub.serialization",
    "jinja2",
    "pandas",
    "pyarrow.parquet",
    "pydantic",
    "regex",
    "safetensors.torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers.utils",
)


# Programs have the current folder in front of their path, as `python -c` has it, and not the folder of tests.
SERVER = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from support.clean import serve
del sys.path[0]
serve()
"""


class CleanProcess:
    """Runs one program after the other, each in a fork."""

    def __init__(self, server: subprocess.Popen[str], folder: Path) -> None:
        self._server = server
        self._stdout, self._stderr = folder / "stdout", folder / "stderr"

    def run(self, program: str) -> subprocess.CompletedProcess[str]:
        """What `python -c program` does."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        print(json.dumps([program, str(self._stdout), str(self._stderr)]), file=self._server.stdin, flush=True)
        answer = self._server.stdout.readline()
        assert answer, "the process with the libraries has ended"
        return subprocess.CompletedProcess(
            program, int(answer), self._stdout.read_text("utf-8"), self._stderr.read_text("utf-8")
        )


@contextmanager
def clean_process(cwd: Path) -> Iterator[CleanProcess]:
    """Closed at the end of the block."""
    command = [sys.executable, "-c", SERVER]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(cwd)}
    pipe = subprocess.PIPE
    with (
        TemporaryDirectory() as folder,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd=cwd, env=environment, text=True) as server,
    ):
        yield CleanProcess(server, Path(folder))


def serve() -> None:
    """One line of JSON in, one exit status out."""
    for name in LIBRARIES:
        __import__(name)
    imported = [name for name in sys.modules if name.partition(".")[0] == "sinkscope" or "transformers.models" in name]
    assert not imported, imported
    for line in sys.stdin:
        program, stdout, stderr = json.loads(line)
        child = os.fork()
        if not child:
            work_and_exit(partial(_run, program, stdout, stderr))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    os._exit(0)  # taking all the libraries down takes a second


def _run(program: str, stdout: str, stderr: str) -> None:
    for path, number in ((os.devnull, 0), (stdout, 1), (stderr, 2)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
    try:
        exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
    finally:
        sys.stdout.flush()
