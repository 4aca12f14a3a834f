"""Pictures from a folder, as the sequences that a model of pictures and text reads."""

import base64
import io
from dataclasses import dataclass
from math import isqrt
from pathlib import Path
from typing import Any

import torch

from sinkscope.errors import InputError, explained
from sinkscope.text.batch import Batch

PICTURE_ENDINGS = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
QUESTION = "Describe this image."
THUMBNAIL = 224  # pixels of the longer side


@dataclass(frozen=True)
class Picture:
    name: str
    image: Any  # a PIL image, in RGB

    @property
    def thumbnail(self) -> str:
        """A small copy as a data URI."""
        small, file = self.image.copy(), io.BytesIO()
        small.thumbnail((THUMBNAIL, THUMBNAIL))
        small.save(file, "JPEG", quality=80)
        return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def read_pictures(folder: Path, most: int) -> list[Picture]:
    """Return the first pictures of a folder by name; InputError if there is none, or one is damaged."""
    from PIL import Image  # comes with matplotlib

    if not folder.is_dir():
        raise InputError(f"--images {folder}: no such folder")
    files = sorted(file for file in folder.iterdir() if file.suffix.lower() in PICTURE_ENDINGS)[:most]
    if not files:
        raise InputError(f"--images {folder}: it holds no picture ({', '.join(PICTURE_ENDINGS)})")
    pictures = []
    for file in files:
        with explained(f"--images {file}: not a picture that can be read"):
            pictures.append(Picture(file.name, Image.open(file).convert("RGB")))
    return pictures


@dataclass(frozen=True)
class Places:
    """Where each visual token of a sequence is: (N,) each. A picture that is cut into tiles has several grids."""

    column: torch.Tensor  # index of the token in the sequence
    tile: torch.Tensor
    grid_row: torch.Tensor
    grid_column: torch.Tensor


def question_batch(picture: Picture, processor: Any, visual_id: int, first: int) -> tuple[Batch, Places]:
    """Return QUESTION about a picture as a batch of one sequence, and where its visual tokens are.

    The question is put by the processor's chat template, or else follows the mark for a picture and a line break.
    """
    mark = getattr(processor, "boi_token", None) or getattr(processor, "image_token", "")
    text = f"{mark}\n{QUESTION}"
    if getattr(processor, "chat_template", None):
        parts = [{"type": "image"}, {"type": "text", "text": QUESTION}]
        text = processor.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
    # a template has written the BOS already, which the processor would add again
    bos = getattr(getattr(processor, "tokenizer", None), "bos_token", None)
    as_it_is = {"add_special_tokens": False} if bos and text.startswith(bos) else {}
    with explained(f"{type(processor).__name__} cannot read {picture.name} with a question"):
        read = dict(processor(images=[picture.image], text=[text], return_tensors="pt", **as_it_is))
    ids, mask = read.pop("input_ids"), read.pop("attention_mask", None)
    read.pop("labels", None)  # PaliGemma: for training
    places = places_of(ids[0] == visual_id, read.get("image_grid_thw"))
    if not len(places.column):
        raise InputError(f"{type(processor).__name__} gives no token with the id {visual_id} for {picture.name}")
    return Batch(ids, torch.ones_like(ids) if mask is None else mask, first, pictures=read), places


def places_of(visual: torch.Tensor, grid: torch.Tensor | None = None) -> Places:
    """Return where visual tokens are, by which tokens of the sequence they are (T,).

    Each unbroken run is a tile in reading order. Its grid has the proportions of `grid` (1,3: time, height, width in
    patches before merging, as Qwen-VL's processors give it), is a square, or else a single row.
    """
    column = visual.nonzero()[:, 0]
    starts = torch.ones_like(column, dtype=torch.bool)
    starts[1:] = column.diff() > 1
    tile = starts.cumsum(0) - 1
    grid_row, grid_column = torch.zeros_like(column), torch.zeros_like(column)
    for number in tile.unique():
        inside = tile == number
        count = int(inside.sum())
        width = isqrt(count) if isqrt(count) ** 2 == count else count
        if grid is not None and len(grid) == 1:
            merged = isqrt(int(grid[0].prod()) // count)  # patches that are merged into a token, along each side
            width = int(grid[0, 2]) // max(1, merged)
        index = torch.arange(count)
        grid_row[inside], grid_column[inside] = index // width, index % width
    return Places(column, tile, grid_row, grid_column)
