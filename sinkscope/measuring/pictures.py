"""Pictures: attention to their patches, and tokens that are large in few coordinates or in norm.

A visual token of a language model that reads pictures is a sink if it is large in the coordinates of the model's own
massive activations (Kang et al. 2025, Visual Attention Sink):

    φ(h) = max over c in D of |h_c| ÷ √(mean of h² + 1e-6) > 20        D: the massive coordinates on text

The null is φ on as many random coordinates. In a vision transformer (Darcet et al. 2024, Vision Transformers Need
Registers) some patches have a norm many times that of the others, and take the place of registers.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import torch
from transformers import PreTrainedModel

from sinkscope.attention.kernels import upcast
from sinkscope.attention.weights import AttentionRead, row_chunks
from sinkscope.errors import InputError, counted
from sinkscope.measuring.observables.massive import Massive
from sinkscope.measuring.observables.observable import Observable, Reading, Rows, Settings
from sinkscope.measuring.subject import Subject
from sinkscope.measuring.tracer import open_tracer
from sinkscope.models.edits import attending_by
from sinkscope.models.family import NO_POSITIONS, Family, text_tower
from sinkscope.models.loading import LoadedModel, load_processor
from sinkscope.options.measuring import RunConfig
from sinkscope.results.findings import PHI
from sinkscope.results.tables import HEAD, SEQUENCE, Column, Columns, names_of
from sinkscope.text.batch import Batch
from sinkscope.text.inputs import TokenInputs, numbered
from sinkscope.text.pictures import Picture, Places, question_batch, read_pictures

PICTURES_CONDITION = "pictures"  # the condition of a run on pictures alone
RANDOM_SETS = 20  # sets of random coordinates
FEWEST_COORDINATES = 2  # coordinates of φ in a model without massive activations

_ROW = Column("row", "row of the patch from the top; −1 for CLS and registers, which precede the patches", kind="whole")
_COLUMN = Column("column", "column of the patch from the left; of a special token, its index", kind="whole")
PICTURE_TABLES: dict[str, Columns] = {
    "picture": (
        SEQUENCE,
        Column("name", "file name of the picture", kind="text"),
        Column("thumbnail", "a small copy, as a data URI", kind="text"),
    ),
    "visual_patch": (
        SEQUENCE, Column("tile", "part of the picture, if the processor cuts it", kind="whole"), _ROW, _COLUMN,
        Column("mass", "attention of the text after the picture, mean over its queries and heads", "attention"),
        Column("phi", "φ of the layer's input at the model's massive coordinates (Kang et al. 2025)"),
        Column("random_share", f"share of {RANDOM_SETS} sets of as many random coordinates at which φ is above 20",
            "share"),
    ),
    "visual_head": (
        SEQUENCE, HEAD,
        Column("first_mass", "attention of the text after the picture to position 0", "attention"),
        Column("visual_mass", "to all visual tokens", "attention"),
        Column("sink_mass", "to visual sinks, with φ above 20", "attention"),
        Column("random_sink_mass", "to visual sinks by random coordinates", "attention"),
    ),
    "encoder_patch": (
        SEQUENCE, _ROW, _COLUMN,
        Column("norm", "L2 norm of the layer's output"),
        Column("mass", "attention that the token receives, mean over queries and heads", "attention"),
    ),
}  # fmt: skip


class VisualSinks(Observable):
    """Measures φ of every visual token, and the attention that the text after the picture gives it."""

    name = "visual-sinks"
    about = "attention to each patch of a picture, and visual sink tokens"
    sites: ClassVar = ("layer_in", "attention")

    def __init__(self, settings: Settings, coordinates: Sequence[int], width: int) -> None:
        super().__init__(settings)
        self.coordinates = torch.tensor(sorted(coordinates))
        others = torch.tensor([coordinate for coordinate in range(width) if coordinate not in set(coordinates)])
        generator = torch.Generator().manual_seed(settings.seed)  # type: ignore[attr-defined]  # a run's settings
        drawn = [torch.randperm(len(others), generator=generator)[: len(coordinates)] for _ in range(RANDOM_SETS)]
        self.random = others[torch.stack(drawn)]  # (draws, coordinates)
        self.places: Places | None = None  # of the next picture
        self.of_layer: dict[str, torch.Tensor] = {}
        self.patches, self.heads = Rows(list), Rows(list)

    def see(self, layer: int, site: str, reading: Reading, batch: Batch) -> None:
        assert self.places is not None
        hidden = upcast(reading.tensor[0].detach().cpu())[self.places.column]
        in_random = torch.stack([phi(hidden, coordinates) for coordinates in self.random])
        is_random = (in_random > PHI).to(hidden.dtype).mean(0)
        self.of_layer = {"phi": phi(hidden, self.coordinates), "random_share": is_random}

    def see_attention(self, layer: int, read: AttentionRead, batch: Batch) -> None:
        assert self.places is not None
        columns, length = self.places.column, read.length
        start = int(columns[-1]) + 1
        if start == length:
            raise InputError("no text follows the picture, whose attention to it could be measured")
        chunks = [slice(start + rows.start, start + rows.stop) for rows in row_chunks(length - start)]
        sums = [read.weights(rows, slice(0, length))[0][0].sum(1) for rows in chunks]
        mass = (torch.stack(sums).sum(0) / (length - start)).cpu()  # (H,T)
        on_patches = mass[:, columns]
        sinks = (self.of_layer["phi"] > PHI).to(mass.dtype)
        self.patches.add({
            "layer": layer, "sequence": batch.first, "tile": self.places.tile,
            "row": self.places.grid_row, "column": self.places.grid_column, "mass": on_patches.mean(0), **self.of_layer,
        })  # fmt: skip
        self.heads.add({
            "layer": layer, "sequence": batch.first, "head": np.arange(len(mass)),
            "first_mass": mass[:, 0], "visual_mass": on_patches.sum(1),
            "sink_mass": on_patches @ sinks,
            "random_sink_mass": on_patches @ self.of_layer["random_share"].to(mass.dtype),
        })  # fmt: skip

    def tables(self) -> dict[str, pd.DataFrame]:
        return {
            "visual_patch": self.patches.table("layer", "sequence"),
            "visual_head": self.heads.table("layer", "sequence", "head"),
        }


def phi(hidden: torch.Tensor, coordinates: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of states (N,D) at some coordinates ÷ their root mean square, (N,)."""
    return hidden[:, coordinates].abs().amax(-1) / (hidden.square().mean(-1) + 1e-6).sqrt()


def phi_coordinates(massive: pd.DataFrame) -> tuple[list[int], bool]:
    """Return the coordinates of a model's massive activations, and whether it has any; without any, two others."""
    coordinates = massive.loc[massive["is_massive"], "coordinate"]
    if len(coordinates):
        return sorted(map(int, coordinates.unique())), True
    largest = massive.sort_values("ratio", ascending=False)["coordinate"].unique()[:FEWEST_COORDINATES]
    return sorted(map(int, largest)), False


def visual_id(model: PreTrainedModel) -> int | None:
    """Return the id of the placeholder tokens for patches of a picture; None for a model that reads no pictures."""
    names = ("image_token_id", "image_token_index")
    token_id = next((getattr(model.config, name) for name in names if hasattr(model.config, name)), None)
    return token_id if text_tower(model)[0] else None


def processor_for(subject: Subject, config: RunConfig) -> Any:
    """Return the model's processor. Raises InputError where --images cannot be measured."""
    if visual_id(subject.loaded.model) is None:
        raise InputError(f"--images: {subject.loaded.name} reads no pictures")
    if config.observables is not None and Massive.name not in config.observables:
        raise InputError("--images needs the model's massive coordinates: name massive in --observables, too")
    return load_processor(subject.loaded.source, subject.loaded.revision)


def picture_batches(subject: Subject, config: RunConfig, folder: Path) -> list[Batch]:
    """Return a question about each of the first pictures of a folder, numbered on from the subject's sequences."""
    processor, token_id = processor_for(subject, config), visual_id(subject.loaded.model)
    assert token_id is not None
    pictures = enumerate(read_pictures(folder, config.num_seqs), len(subject.inputs))
    return [question_batch(picture, processor, token_id, number)[0] for number, picture in pictures]


def measure_pictures(
    subject: Subject, config: RunConfig, pictures: Sequence[Picture], processor: Any, massive: pd.DataFrame
) -> tuple[dict[str, pd.DataFrame], dict[str, Any]]:
    """Measure a language model on each picture. Returns its tables, and facts for run.json.

    `massive` is the run's table on text, which names the coordinates of φ.
    """
    model, token_id = subject.loaded.model, visual_id(subject.loaded.model)
    assert token_id is not None
    coordinates, has_massive = phi_coordinates(massive)
    observable = VisualSinks(config, coordinates, model.config.get_text_config().hidden_size)
    with open_tracer(model, subject.family, config.attn) as tracer:
        for number, picture in enumerate(pictures):
            batch, observable.places = question_batch(picture, processor, token_id, number)
            tracer.forward(batch, [observable])
    facts = {"pictures": len(pictures), "coordinates": coordinates, "is_massive": has_massive}
    return observable.tables() | {"picture": picture_table(pictures)}, facts


def picture_table(pictures: Sequence[Picture]) -> pd.DataFrame:
    rows = [(-1, number, picture.name, picture.thumbnail) for number, picture in enumerate(pictures)]
    return pd.DataFrame(rows, columns=["layer", *names_of(PICTURE_TABLES["picture"])])


# --- vision transformers


@torch.no_grad()
def encoder_patches(model: Any, processor: Any, pictures: Sequence[Picture]) -> tuple[pd.DataFrame, int, list[Picture]]:
    """Return the norm of every token of a vision transformer after each layer, and the attention that it receives.

    Special tokens, which precede the patches, are in row −1: CLS is column 0, registers follow. Also returns the number
    of tokens of a picture, and the pictures as the processor cuts them. Raises InputError for an encoder whose tokens
    are not in this order.
    """
    from PIL import Image  # comes with matplotlib

    rows, tokens, seen = Rows(list), 0, []
    masses: list[torch.Tensor] = []  # the attention that each token receives in each layer, (T,)
    mean, std = (torch.tensor(getattr(processor, f"image_{name}"))[:, None, None] for name in ("mean", "std"))

    def attend(
        unchanged: Callable, module: Any, query: torch.Tensor, key: torch.Tensor, *args: Any, **more: Any
    ) -> Any:
        scaling = more.get("scaling") or query.shape[-1] ** -0.5
        sums = [
            torch.softmax(upcast(query[0, :, rows]) @ upcast(key[0]).transpose(-1, -2) * scaling, -1).sum((0, 1))
            for rows in row_chunks(query.shape[2])
        ]
        masses.append(torch.stack(sums).sum(0) / (query.shape[1] * query.shape[2]))
        return unchanged(module, query, key, *args, **more)

    for number, picture in enumerate(pictures):
        pixels = processor(images=picture.image, return_tensors="pt")["pixel_values"]
        colors = (255 * (pixels[0] * std + mean)).round().clamp(0, 255).to(torch.uint8)  # before it was normalized
        seen.append(Picture(picture.name, Image.fromarray(colors.permute(1, 2, 0).numpy())))
        masses.clear()
        with attending_by(model, attend):
            inputs = pixels.to(next(model.parameters()).device, next(model.parameters()).dtype)
            states = model(pixel_values=inputs, output_hidden_states=True).hidden_states[1:]
        high, wide = (side // model.config.patch_size for side in pixels.shape[-2:])
        tokens = states[0].shape[1] if states[0].dim() == 3 else 0
        special = tokens - high * wide
        if special < 0 or len(masses) < len(states):
            raise InputError(f"{type(model).__name__}: its layers do not attend to one token per patch")
        index = np.arange(tokens) - special
        for layer, (state, mass) in enumerate(zip(states, masses, strict=False)):
            rows.add({
                "layer": layer, "sequence": number,
                "row": np.where(index < 0, -1, index // wide),
                "column": np.where(index < 0, np.arange(tokens), index % wide),
                "norm": torch.linalg.vector_norm(upcast(state[0]), dim=-1).cpu(), "mass": mass.cpu(),
            })  # fmt: skip
    return rows.table("layer", "sequence"), tokens, seen


def measure_encoder(loaded: LoadedModel, pictures: Sequence[Picture]) -> tuple[dict[str, pd.DataFrame], Subject]:
    """Measure a vision transformer on pictures: its tables, and the subject of the run, with a sequence a picture."""
    processor = load_processor(loaded.source, loaded.revision, text=False)
    patches, tokens, seen = encoder_patches(loaded.model, processor, pictures)
    ends = {"layer_in": "input", "layer_out": "output"}
    family = Family(loaded.model.config.model_type, "", "", ends, "unknown", NO_POSITIONS, causal=False)
    # the number of the picture in place of token ids: copies of a picture have the same
    numbers = numbered(np.asarray(picture.image) for picture in pictures)
    sequences = tuple(np.full(tokens, number, np.int64) for number in numbers)
    said = f"{counted(len(pictures), 'picture')}, the first is {pictures[0].name}"
    inputs = TokenInputs(PICTURES_CONDITION, sequences, "a special token or the first patch", "", said=said)
    return {"encoder_patch": patches, "picture": picture_table(seen)}, Subject(loaded, family, inputs)
