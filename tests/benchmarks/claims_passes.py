"""Counts how often `claims` reads its text, by run, beside the passes that it expects.

python tests/benchmarks/claims_passes.py [MODEL] [--num-seqs N] [--seq-len T]    # options of `sinkscope claims`
"""

import sys
from collections import Counter
from typing import Any

from torch.nn.modules.module import register_module_forward_pre_hook

from sinkscope.commands.claims import command
from sinkscope.commands.claims.command import ClaimBench, claims
from sinkscope.options.option import checked
from sinkscope.options.register import options_by_command


def main(arguments: list[str]) -> None:
    asked = dict(zip(arguments[1::2], arguments[2::2], strict=True))
    options: Any = checked(
        options_by_command()["claims"],
        {"model": arguments[0]}
        | {name.removeprefix("--").replace("-", "_"): int(value) for name, value in asked.items()},
    )
    tokens: Counter[str] = Counter()
    expected: dict[str, int] = {}
    layers: set[int] = set()
    label = ["natural"]
    passes, print_line = ClaimBench._passes, command.print_line

    def count(module: Any, args: tuple) -> None:
        if (index := getattr(getattr(module, "self_attn", None), "layer_idx", None)) is not None and args:
            layers.add(index)
            tokens[label[0]] += args[0].shape[:2].numel()

    def expect(bench: ClaimBench, roles: Any) -> int:
        name = roles[0].record.run or roles[0].name
        expected[name] = passes(bench, roles)
        return expected[name]

    def note(console: Any, text: str) -> None:
        if text.split(" (")[0] in expected:
            label[0] = text.split(" (")[0]
        print_line(console, text)

    register_module_forward_pre_hook(count)
    command.print_line, ClaimBench._passes = note, expect  # type: ignore[method-assign]
    claims(config=options)
    one = options.num_seqs * options.seq_len * len(layers)
    for name, number in tokens.items():
        print(f"{name:30} {number / one:8.2f} {expected.get(name, 1):5}")
    print(f"{'all':30} {tokens.total() / one:8.2f} {1 + sum(expected.values()):5}")


if __name__ == "__main__":
    main(sys.argv[1:] or ["SmolLM2-135M-Instruct"])
