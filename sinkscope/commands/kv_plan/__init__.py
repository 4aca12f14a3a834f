"""`kv-plan`: what to keep of a KV cache, by budget."""

from sinkscope.commands.kv_plan.options import KvPlanOptions
from sinkscope.options.register import Command

COMMANDS = (
    Command(
        "kv-plan",
        __name__,
        KvPlanOptions,
        public={"kv_plan": ".command:kv_plan"},
        manifest=".manifest:KvPlanManifest",
        report=".findings:report",
        tables=(".plan:KV_PLAN_TABLES",),
        figures={
            "one run": (
                ("kv-plan", "perplexity and retrieval by the memory that plans for the KV cache keep", "kv_plan"),
            ),
        },
        files=".findings:files",
        script="page.js",
        lists={
            "rankings": (
                "scores of heads for a cache", "table kv_plan", ".plan:RANKINGS about",
                "ranking", "what it scores heads by", "plugin",
            ),
        },
    ),
)  # fmt: skip
