"""Model types of sinkscope's own, so that a retrofitted model is never mistaken for the plain one.

`sinkscope_llama` is Llama with a retrofit: its configuration is Llama's and a field that says which one. transformers
alone does not know the type and says so; where sinkscope has been imported, its auto classes know it.

Nothing here imports torch or transformers: `import sinkscope` is to cost nothing.
"""

import sys
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from sinkscope.models.families import PREFIX, base_type

AUTO = "transformers.models.auto.configuration_auto"


def _named_base(model_type: object) -> str | None:
    """The plain type that a `sinkscope_*` one names; None for any other, and for a retrofit's retrofit."""
    if not isinstance(model_type, str) or not model_type.startswith(PREFIX):
        return None
    base = base_type(model_type)
    return None if base.startswith(PREFIX) else base


@cache
def config_class(base: str) -> Any:
    """The configuration class of `sinkscope_<base>`: the base's, with the field `retrofit`."""
    from transformers import CONFIG_MAPPING

    parent: Any = CONFIG_MAPPING[base]

    class Config(parent):
        model_type = PREFIX + base
        retrofit: dict | None = None  # method, parameters, and the sinkscope that made it

        def __post_init__(self, **kwargs: Any) -> None:
            super().__post_init__(**kwargs)
            # Before any auto class looks for the model there is its configuration: soon enough to make the model's
            # class, and no modelling code is imported for a type that nobody uses.
            from sinkscope.retrofits.saving import register_model

            register_model(base)

    Config.__name__ = Config.__qualname__ = f"Sinkscope{parent.__name__}"
    return Config


def teach_transformers() -> None:
    """Let transformers' auto classes know every `sinkscope_*` type: at once if they are there, else as they come."""
    if AUTO in sys.modules:
        _know_types(sys.modules[AUTO])
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


def _know_types(auto: ModuleType) -> None:
    """transformers keeps a table from type to configuration class. It has room for more (`register`), but wants the
    class itself, and making one for every architecture costs a second; so the table is taught to make them when asked.
    """
    table: Any = auto.CONFIG_MAPPING
    if not getattr(table, "knows_retrofits", False):
        table.__class__ = _knowing(type(table))


def _knowing(table_class: Any) -> Any:
    class Table(table_class):
        knows_retrofits = True

        def __contains__(self, model_type: object) -> bool:
            return super().__contains__(model_type) or super().__contains__(_named_base(model_type))

        def __getitem__(self, model_type: str) -> Any:
            if not super().__contains__(model_type) and model_type in self:
                self.register(model_type, config_class(base_type(model_type)))
            return super().__getitem__(model_type)

    return Table


class _AfterImport(MetaPathFinder, Loader):
    """Waits for transformers' table of configurations to be imported, once, and then teaches it."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != AUTO:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            self.loader = spec.loader
            spec.loader = self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        _know_types(module)
