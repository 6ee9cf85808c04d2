"""Third-party libraries that one feature needs: imported where it runs, named if they are missing.

A library that fails in any way at import counts as absent: a release that does not fit another
library may raise an AttributeError or an OSError.
"""

from importlib import import_module
from types import ModuleType
from typing import Any


class MissingLibrary(ImportError):  # noqa: N818, it is the library that is missing
    """A library cannot be imported; the message says why, and what works."""


PIP = {  # pip's name of a module, or of its package, if not the package's name
    "backports": "backports.zstd",
    "dask": "'dask[distributed]'",
    "dask_jobqueue": "dask-jobqueue",
    "lm_eval": "lm-eval",
    "megatron": "megatron-core",
    "PIL": "pillow",
    "torch.utils.tensorboard": "tensorboard",
}


def load(module: str, works: str = "") -> ModuleType:
    """The module, imported. works: an alternative without it, such as "--compress gzip". Raises
    MissingLibrary."""
    package = module.partition(".")[0]
    name = PIP.get(module, PIP.get(package, package))
    pip = f"pip install {name}"
    try:
        found = import_module(module)
        if getattr(found, "__file__", "") is None:  # such as wandb/, which a run makes
            raise ModuleNotFoundError(f"{found.__name__} is a folder without code")
        return found
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if not isinstance(error, ModuleNotFoundError):
            pip = f"another release of {name}"
        cure = f"{pip}, or {works}" if works else pip
        raise MissingLibrary(f"{module} cannot be imported ({reason}); {cure} works") from error


def failure(module: str) -> str:
    """Why the module cannot be imported; an empty string if it can."""
    try:
        load(module)
    except MissingLibrary as error:
        return str(error)
    return ""


class Library:
    """A module that is imported when one of its attributes is first used.

    Its attributes are those of the module. Arguments and errors: see `load`.
    """

    def __init__(self, module: str, works: str = "") -> None:
        self._arguments = module, works
        self._module: ModuleType | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copy, pickle and inspect ask for these of any object
            raise AttributeError(name)
        if self._module is None:
            self._module = load(*self._arguments)
        return getattr(self._module, name)
