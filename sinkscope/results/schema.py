"""The entries that run.json must have, for each command. Code that reads a run uses no other entries.

Other entries are not checked: they are for people, or from another version.
"""

from pathlib import PurePath
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, model_validator


def _inside(path: str) -> str:
    """Check that a path stays in its folder and is written with slashes, on every system."""
    pure = PurePath(path)
    if pure.anchor or ".." in pure.parts or not pure.parts or pure.as_posix() != path.removesuffix("/"):
        raise ValueError("it leads out of the folder")
    return path


Name = Annotated[str, StringConstraints(pattern=r"^[\w.+=@-]+$", max_length=200), AfterValidator(_inside)]
Count = Annotated[int, Field(ge=1, le=2**53)]
Reasons = dict[str, str]  # omitted part → reason


class ManifestPart(BaseModel):
    """A part of run.json: values of JSON types, without conversions."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class Manifest(ManifestPart):
    """The entries of every run.json."""

    sinkscope: str
    format: int
    command: str
    config: dict[str, Any]
    tables: list[Name]
    files: list[Annotated[str, AfterValidator(_inside)]]
    drawn: bool = True  # False until figures and the page are drawn
    failed_figures: Reasons = {}  # may include the page, index.html
    read: dict[str, str] | None = None  # file that a cell of a sweep read → digest


class Config(ManifestPart):
    seq_len: Count
    window: Count
    positions: Count
    epsilon: float
    gguf_file: str | None = None


class ModelOfRun(ManifestPart):
    name: str
    source: str
    revision: str | None
    weights: str | None = None
    parameters: Count | None = None
    layer_types: list[str] | None
    sliding_window: bool | int | float | None
    operations: list[str] = []


class FamilyOfRun(ManifestPart):
    name: str
    wiring: str
    positions: str
    gated: bool = False
    prefix: int = 0
    kinds: list[str] | None = None


class Input(ManifestPart):
    sequences: Count
    tokens: Count
    shortest: Count
    longest: Count
    token_zero: str
    sha256: str
    text: str = ""
    texts: list[Annotated[int, Field(ge=0)]] | None = None  # the number of each sequence's text, if some are copies

    @model_validator(mode="after")
    def _numbers_texts(self) -> "Input":
        if self.texts is not None and (len(self.texts) != self.sequences or max(self.texts) >= self.sequences):
            raise ValueError("`texts` does not number the text of each sequence")
        return self


class RecipeContent(ManifestPart):
    figures: list[str] = []


class RecipeOfRun(ManifestPart):
    name: str
    content: RecipeContent


class RunManifest(Manifest):
    """The entries of a run with its own tables."""

    config: Config  # type: ignore[assignment]
    condition: str
    model: ModelOfRun
    family: FamilyOfRun
    absent: Reasons
    outside: dict[str, list[int]] = {}  # attended term outside the text → its layers
    not_measured: Reasons = {}
    dtype: str
    kernel: str
    input: Input
    activations: list[Name] = []  # sites of activations.safetensors
    recipe: RecipeOfRun | None = None
    w8a8: dict[str, Annotated[float, Field(allow_inf_nan=True)]] | None = None  # only arms of a training have it
