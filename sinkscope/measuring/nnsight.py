"""nnsight, imported without its mount, which by default gives every object of the process an attribute `save`.

nnsight's configuration can turn the mount off, but is read while nnsight is imported. This module changes the
configuration during the import only. If the user has imported nnsight before, it stays as it is; if they import it
later, `nnsight.save(x)` replaces `x.save()`.
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
