"""``aiohttp.web`` without aiohttp's client, which would take a third of the CPU time and memory of the import."""

import importlib.util
import sys
from typing import Any

_PACKAGE = "aiohttp"


def _import_server() -> None:
    """Import ``aiohttp.web`` below a package that has not run its ``__init__``, which imports the client."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.loader is None or _PACKAGE in sys.modules:
        return
    loader, package = spec.loader, importlib.util.module_from_spec(spec)

    def load(name: str) -> Any:
        """The attribute that somebody else wants, after all."""
        vars(package).pop("__getattr__", None)
        loader.exec_module(package)
        return getattr(package, name)

    vars(package)["__version__"] = ""  # for the default of the header `Server`, which our pages replace
    sys.modules[_PACKAGE] = package
    try:
        importlib.import_module(f"{_PACKAGE}.web")
    except (ImportError, AttributeError):  # a later release may need more of the package
        for name in [name for name in sys.modules if name.partition(".")[0] == _PACKAGE]:
            del sys.modules[name]
    else:
        vars(package)["__getattr__"] = load


_import_server()

from aiohttp import web  # noqa: E402 - the rest of aiohttp is imported by then

__all__ = ["web"]
