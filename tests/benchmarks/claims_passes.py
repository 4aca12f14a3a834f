"""Counts how often `claims` reads its text, by run, beside the passes that it expects.

python tests/benchmarks/claims_passes.py [MODEL] [OPTIONS]    # those of `sinkscope claims`
"""

import sys
from collections import Counter
from contextlib import suppress
from typing import Any

from torch.nn.modules.module import register_module_forward_pre_hook

from sinkscope.cli.app import app
from sinkscope.commands.claims import command
from sinkscope.commands.claims.command import ClaimBench


def main(arguments: list[str]) -> None:
    tokens: Counter[str] = Counter()
    expected: dict[str, int] = {}
    layers: set[int] = set()
    run, text_tokens = "natural", 0
    passes, print_line = ClaimBench._passes, command.print_line

    def count(module: Any, args: tuple) -> None:
        if (index := getattr(getattr(module, "self_attn", None), "layer_idx", None)) is not None and args:
            layers.add(index)
            tokens[run] += args[0].shape[:2].numel()

    def expect(bench: ClaimBench, roles: Any) -> int:
        nonlocal text_tokens
        name = roles[0].record.run or roles[0].name
        text_tokens = bench.subject.inputs.num_tokens
        expected[name] = passes(bench, roles)
        return expected[name]

    def note(console: Any, text: str) -> None:
        nonlocal run
        if (named := text.split(" (")[0]) in expected:
            run = named
        print_line(console, text)

    register_module_forward_pre_hook(count)
    command.print_line, ClaimBench._passes = note, expect  # type: ignore[method-assign]
    with suppress(SystemExit):
        app(["claims", *arguments])
    one = text_tokens * len(layers)
    for name, number in tokens.items():
        print(f"{name:30} {number / one:8.2f} {expected.get(name, 1):5}")
    print(f"{'all':30} {tokens.total() / one:8.2f} {1 + sum(expected.values()):5}")


if __name__ == "__main__":
    main(sys.argv[1:] or ["SmolLM2-135M-Instruct"])
