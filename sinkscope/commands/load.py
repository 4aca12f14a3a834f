"""`sinkscope.load`: a model by name, retrofitted ones among them."""

import sinkscope.retrofits  # noqa: F401  # registers the model types of saved retrofitted models
from sinkscope.models.loading import load

__all__ = ["load"]
