"""Scan a made checkpoint within 2 GB of memory: `python tests/benchmarks/scan.py FOLDER`.

It streams random bfloat16 shards of the shape of Llama-2-7B (13 GB) into FOLDER, with one planted super weight, scans
them in a process of its own, prints its peak of resident memory, its time and the first candidate, and removes the
shards. With `--layers N` the checkpoint has fewer layers.
"""

import argparse
import json
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

LIMIT = 2 << 30  # bytes of private memory of the process that scans
WIDTH, NEURONS, VOCABULARY = 4096, 11008, 32_000
PLANTED = (2, 1415, 7890)  # layer, coordinate, neuron
CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": WIDTH, "intermediate_size": NEURONS, "vocab_size": VOCABULARY,
    "num_attention_heads": 32,
}  # fmt: skip
OF_LAYER = {
    **dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"), (WIDTH, WIDTH)),
    **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (NEURONS, WIDTH)),
    "mlp.down_proj": (WIDTH, NEURONS),
    **dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (WIDTH,)),
}
SCAN = """
import resource, sys
resource.setrlimit(resource.RLIMIT_DATA, (int(sys.argv[2]),) * 2)
import sinkscope
first = sinkscope.scan(sys.argv[1]).tables["scan"].nlargest(1, "gain").iloc[0]
place = [int(first[name]) for name in ("layer", "coordinate", "neuron")]
print(*place, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def chunks(name: str, shape: tuple[int, ...]) -> Iterator[bytes]:
    """Yield the bytes of a random tensor, some rows at a time."""
    for first in range(0, shape[0], 512):
        rows = torch.empty(min(512, shape[0] - first), *shape[1:], dtype=torch.bfloat16).normal_(0, 0.02)
        layer, row, column = PLANTED
        if name == f"model.layers.{layer}.mlp.down_proj.weight" and first <= row < first + 512:
            rows[row - first, column] = 30.0
        yield rows.view(torch.int16).numpy().tobytes()


def write_shard(path: Path, tensors: dict[str, tuple[int, ...]]) -> None:
    entries, end = {}, 0
    for name, shape in tensors.items():
        begin, end = end, end + 2 * torch.Size(shape).numel()
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name, shape in tensors.items():
            file.writelines(chunks(name, shape))


def write_checkpoint(folder: Path, layers: int) -> None:
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    shards: dict[str, dict[str, tuple[int, ...]]] = {}
    for layer in range(layers):
        shard = shards.setdefault(f"model-{layer // 6:05}.safetensors", {})
        shard |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in OF_LAYER.items()}
    ends = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (VOCABULARY, WIDTH))
    shards["model-ends.safetensors"] = {**ends, "model.norm.weight": (WIDTH,)}
    for name, tensors in shards.items():
        write_shard(folder / name, tensors)
    places = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))


def scan_within(folder: Path, limit: int) -> tuple[tuple[int, ...], int, float]:
    """Scan in a process with this limit; return the place of the first candidate, the peak in bytes, and seconds."""
    start = time.time()
    line = [sys.executable, "-c", SCAN, str(folder), str(limit)]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    *place, peak = map(int, done.stdout.split())
    return tuple(place), peak, time.time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    arguments = parser.parse_args()
    folder = arguments.folder / "made-checkpoint"
    try:
        write_checkpoint(folder, arguments.layers)
        size = sum(path.stat().st_size for path in folder.iterdir())
        place, peak, seconds = scan_within(folder, LIMIT)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{size / 1e9:.1f} GB, peak {peak / 1e9:.2f} GB, {seconds:.0f} s, first {place}, planted {PLANTED}")
    print(f"the memory of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB")


if __name__ == "__main__":
    main()
