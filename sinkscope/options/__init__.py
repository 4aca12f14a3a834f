"""Options as pydantic models: a command line, a recipe and a run.json are three spellings of the same model.

Nothing here imports torch, so that `--help` answers at once.
"""

from sinkscope.options.measuring import (
    AnalyzeOptions,
    BenchmarkOptions,
    ClaimsOptions,
    DoctorOptions,
    InterveneOptions,
    KvPlanOptions,
    QuantizeOptions,
)
from sinkscope.options.option import Options
from sinkscope.options.output import CardOptions, CompareOptions, ListOptions, RunOptions, ShowOptions, SweepOptions
from sinkscope.options.training import RetrofitOptions, TrainOptions

# command → its options; the command itself is sinkscope/commands/NAME.py (_ for -). In the order of `sinkscope --help`
COMMANDS: dict[str, type[Options]] = {
    "analyze": AnalyzeOptions,
    "claims": ClaimsOptions,
    "intervene": InterveneOptions,
    "quantize": QuantizeOptions,
    "kv-plan": KvPlanOptions,
    "benchmark": BenchmarkOptions,
    "retrofit": RetrofitOptions,
    "train": TrainOptions,
    "run": RunOptions,
    "sweep": SweepOptions,
    "compare": CompareOptions,
    "card": CardOptions,
    "show": ShowOptions,
    "doctor": DoctorOptions,
    "list": ListOptions,
}
