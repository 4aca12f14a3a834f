"""Peak of resident memory of one pass, for the benchmarks."""

import gc
from collections.abc import Callable

# environment of the process: every large tensor has a mapping of its own, so that freed memory goes back at once and
# the high-water mark is exact
EXACT = {"MALLOC_MMAP_THRESHOLD_": "65536"}


def peak_of(one_pass: Callable[[], object]) -> float:
    """In MB above what was resident before the pass. A short pass before it loads the libraries."""
    gc.collect()  # or the pass would do that, and free more than it takes
    with open("/proc/self/clear_refs", "w") as clear:
        clear.write("5")  # resets the high-water mark
    before = _status("VmRSS")
    one_pass()
    return (_status("VmHWM") - before) / 1024


def _status(field: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field))
