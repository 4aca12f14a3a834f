"""Options as pydantic models: a command line, a recipe and a run.json are three spellings of the same model.

Nothing here imports torch, so that `--help` answers at once.
"""

from sinkscope.commands.analyze.options import AnalyzeOptions
from sinkscope.commands.benchmark.options import BenchmarkOptions
from sinkscope.commands.card.options import CardOptions
from sinkscope.commands.claims.options import ClaimsOptions
from sinkscope.commands.compare.options import CompareOptions
from sinkscope.commands.doctor.options import DoctorOptions
from sinkscope.commands.intervene.options import InterveneOptions
from sinkscope.commands.kv_plan.options import KvPlanOptions
from sinkscope.commands.list.options import ListOptions
from sinkscope.commands.quantize.options import QuantizeOptions
from sinkscope.commands.run.options import RunOptions
from sinkscope.commands.show.options import ShowOptions
from sinkscope.commands.sweep.options import SweepOptions
from sinkscope.commands.train.options import RetrofitOptions, TrainOptions
from sinkscope.options.option import Options

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
