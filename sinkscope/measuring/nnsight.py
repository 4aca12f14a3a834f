"""nnsight, imported without its mount: by default it gives every object of the process an attribute `save`.

Its configuration can turn the mount off, but is read while nnsight is imported. So it is imported here first, and
changed for so long only. Where the user has imported nnsight before, it is as they have it; where they import it
later, `nnsight.save(x)` does what `x.save()` would.
"""

import sys
from importlib.util import find_spec, module_from_spec


def _import_without_mount() -> None:
    spec = find_spec("nnsight")
    if "nnsight" in sys.modules or spec is None or spec.loader is None:
        return
    package = sys.modules["nnsight"] = module_from_spec(spec)
    try:
        from nnsight.schema.config import CONFIG

        wanted, CONFIG.APP.PYMOUNT = CONFIG.APP.PYMOUNT, False
        spec.loader.exec_module(package)
        CONFIG.APP.PYMOUNT = wanted
    except BaseException:
        del sys.modules["nnsight"]
        raise


_import_without_mount()

from nnsight import NNsight, save  # noqa: E402
from nnsight.intervention.interleaver import OutOfOrderError  # noqa: E402

__all__ = ["NNsight", "OutOfOrderError", "save"]
