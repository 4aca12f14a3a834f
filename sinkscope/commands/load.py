"""`sinkscope.load`: loads a model by name, also a retrofitted one."""

import sinkscope.retrofits  # noqa: F401  # registers the model types of saved retrofitted models
from sinkscope.models.loading import load

__all__ = ["load"]
