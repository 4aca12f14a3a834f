"""The entries that run.json must have, for each command. Code that reads a run uses no other entries.

Other entries are not checked: they are for people, or from another version.
"""

from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, model_validator

from sinkscope.options.measuring import PerActivation, PerCache, PerWeight


def _inside(path: str) -> str:
    """Check that a path stays in its folder and is written with slashes, on every system."""
    own = PurePath(path)
    if own.anchor or ".." in own.parts or not own.parts or own.as_posix() != path.removesuffix("/"):
        raise ValueError("it leads out of the folder")
    return path


Name = Annotated[str, StringConstraints(pattern=r"^[\w.+=@-]+$", max_length=200), AfterValidator(_inside)]
Count = Annotated[int, Field(ge=1, le=2**53)]
Reasons = dict[str, str]  # omitted part → reason


def _expectation(name: str | None) -> str | None:
    from sinkscope.interventions.intervention import Expectation  # imports torch, and only runs of `intervene` need it

    return name and str(Expectation(name))


class Part(BaseModel):
    """A part of run.json: values of JSON types, without conversions."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class Manifest(Part):
    """The entries of every run.json."""

    sinkscope: str
    format: Annotated[int, Field(ge=1, le=2**31)] = 1
    command: str
    config: dict[str, Any]
    tables: list[Name]
    files: list[Annotated[str, AfterValidator(_inside)]] | None = None
    drawn: bool = True  # False until figures and the page are drawn
    failed_figures: Reasons = {}  # may include the page, index.html
    read: dict[str, str] | None = None  # file that a cell of a sweep read → digest


class Config(Part):
    seq_len: Count
    window: Count
    positions: Count
    epsilon: float
    gguf_file: str | None = None


class Model(Part):
    name: str
    source: str
    revision: str | None
    weights: str | None = None
    parameters: Count | None = None
    layer_types: list[str] | None
    sliding_window: bool | int | float | None
    operations: list[str] = []


class Family(Part):
    name: str
    wiring: str
    positions: str
    gated: bool = False
    prefix: int = 0
    kinds: list[str] | None = None


class Input(Part):
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


class RecipeContent(Part):
    figures: list[str] = []


class Recipe(Part):
    name: str
    content: RecipeContent


class RunManifest(Manifest):
    """The entries of a run with its own tables."""

    config: Config  # type: ignore[assignment]
    condition: str
    model: Model
    family: Family
    absent: Reasons
    outside: dict[str, list[int]] = {}  # attended term outside the text → its layers
    not_measured: Reasons = {}
    dtype: str
    kernel: str
    input: Input
    activations: list[Name] = []  # sites of activations.safetensors
    recipe: Recipe | None = None
    w8a8: dict[str, Annotated[float, Field(allow_inf_nan=True)]] | None = None  # only arms of a training have it


class InterventionArm(Part):
    asked: list[str] = []
    do: list[str]
    paper: str
    expects: Annotated[str | None, AfterValidator(_expectation)]
    watched: list[int]
    controls: list[list[str]]


class InterveneManifest(RunManifest):
    arms: dict[str, InterventionArm]
    skipped: Reasons
    failed: Reasons = {}


class Quantization(Part):
    scheme: Literal["linear", "full"] = "linear"
    bits_weights: Count
    bits_activations: Count
    bits_kv_cache: Count = 8
    weights_per: PerWeight = "tensor"
    activations_per: PerActivation = "tensor"
    kv_cache_per: PerCache | None = None
    calibration: Count
    linear_layers: int
    not_quantized: dict[str, float]  # module → its share of the parameters
    full_precision_modules: list[str] | None = None
    prefix: list[int] = []  # token ids; empty without --prefix
    prefix_text: str = ""
    without_cache: str = ""  # why its keys and values were not saved
    without_rotation: str = ""  # why the model was not rotated


class QuantizeManifest(RunManifest):
    quantization: Quantization


class KvPlan(Part):
    budgets: list[float]
    calibration: Count
    copied: Count  # last tokens of a text that repeat its first ones
    sink_layer: int  # whose output predicts sinks; -1: the first tokens are taken
    sink_coordinates: list[int]
    sink_at_least: float | None  # magnitude of an entry at one of them
    sinks: list[int]  # number of predicted sinks in each measured text


class KvPlanManifest(RunManifest):
    kv_plan: KvPlan


class Overflow(Part):
    dtype: str
    limit: float  # its largest finite number
    refused: Reasons = {}  # remedy → why it was left out


class DoctorManifest(RunManifest):
    overflow: Overflow


class Step(Part):
    step: int
    folder: Name


class SeriesManifest(Manifest):
    model: str
    condition: str
    steps: list[Step]


class TrainingArm(Part):
    method: str
    parameters: dict[str, Any]
    label: str
    seed: int


class ArmsManifest(Manifest):
    arms: dict[Name, TrainingArm]


class ClaimsManifest(Manifest):
    judged: dict[str, dict[str, str]] = {}  # model → role → the folder of its run
    failed: Reasons = {}
    skipped_roles: dict[str, Reasons] = {}  # one entry for each model


class BenchmarkModel(Part):
    name: str
    parameters: Count


class BenchmarkManifest(Manifest):
    model: BenchmarkModel


KINDS: dict[str, type[Manifest]] = {
    "analyze": RunManifest,
    "intervene": InterveneManifest,
    "quantize": QuantizeManifest,
    "kv-plan": KvPlanManifest,
    "doctor": DoctorManifest,
    "analyze_steps": SeriesManifest,
    "retrofit": ArmsManifest,
    "train": ArmsManifest,
    "compare": Manifest,
    "claims": ClaimsManifest,
    "benchmark": BenchmarkManifest,
    "card": Manifest,
    "run": Manifest,
    "sweep": Manifest,
    "training": Manifest,
}
