"""`sinkscope.load`: loads a model by name, also a retrofitted one."""

import sinkscope.retrofits  # noqa: F401  # registers the model types of saved retrofitted models
from sinkscope.models import loading
from sinkscope.options.measuring import ModelOptions
from sinkscope.options.signatures import spelled_for_python

load = spelled_for_python(ModelOptions)(loading.load)
