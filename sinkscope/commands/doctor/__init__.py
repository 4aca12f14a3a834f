"""`doctor`: checks a model before a long run."""

from sinkscope.commands.doctor.options import DoctorOptions
from sinkscope.options.register import Command

COMMANDS = (
    Command(
        "doctor",
        __name__,
        DoctorOptions,
        public={"doctor": ".command:doctor"},
        manifest=".manifest:DoctorManifest",
        report=".findings:report",
        tables=(".overflow:OVERFLOW_TABLES",),
        figures={
            "one run": (
                ("overflow-headroom",
                    "largest magnitude of each site by layer, and the limit of the dtype (doctor --dtype)",
                    "overflow"),
            ),
        },
        script="page.js",
    ),
)  # fmt: skip
