"""Finds the pipeline that ``app:name`` means: in a module, or in a file."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from sideline.errors import ConfigurationError, NotFoundError
from sideline.pipeline import Pipeline

HINT = "Write it like examples/users.py:users or app.users:users."


def load(target: str) -> Pipeline:
    """The pipeline, with its module prepared to travel to the workers."""
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        message = f"{target!r} does not name a pipeline."
        raise ConfigurationError(message, hint=HINT)
    return pick(read(place), place, name)


def read(place: str) -> ModuleType:
    """The module or the file that ``place`` names, imported."""
    return _from_file(Path(place)) if _is_file(place) else _from_module(place)


def pick(module: ModuleType, place: str, name: str) -> Pipeline:
    """The pipeline of that name in a module that was read."""
    found = getattr(module, name, None)
    if isinstance(found, Pipeline):
        return found
    others = sorted(key for key, value in vars(module).items() if isinstance(value, Pipeline))
    what = "is not a pipeline" if found is not None else "does not exist there"
    message = f"{place} was read, but {name!r} {what}."
    hint = f"It has: {', '.join(others)}." if others else "It declares no pipeline."
    raise NotFoundError(message, hint=hint)


def module_of(pipeline: Pipeline) -> ModuleType | None:
    """The module in which the pipeline's handler was written."""
    return sys.modules.get(getattr(pipeline.handle, "__module__", ""))


def _is_file(place: str) -> bool:
    return place.endswith(".py") or os.sep in place


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise NotFoundError(f"there is no file {str(path)!r}.", hint=HINT)
    name = path.stem
    if name in sys.modules or not name.isidentifier():
        # A file called json.py must not become everybody's json.
        name = f"sideline_app_{abs(hash(str(path.resolve())))}"
    _see(path.resolve().parent)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigurationError(f"{str(path)!r} is not a Python file.", hint=HINT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        raise _broken(str(path), error) from error
    return module


def _from_module(name: str) -> ModuleType:
    _see(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            message = f"there is no module {name!r}."
            raise NotFoundError(message, hint=HINT) from error
        raise _broken(name, error) from error
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{name!r} is not a module's name.", hint=HINT) from error
    except BaseException as error:
        raise _broken(name, error) from error


def _see(folder: Path) -> None:
    """Modules beside the user's own can be imported, here and by the workers."""
    text = str(folder)
    if text not in sys.path:
        sys.path.insert(0, text)
    known = os.environ.get("PYTHONPATH", "")
    if text not in known.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (text, known)))


def find_like(folders: Sequence[str]) -> None:
    """Find modules where the driver finds them, in its order; ours of which it knows nothing last.

    Otherwise a worker's PYTHONPATH could hide what stands beside the user's own program.
    """
    sys.path[:] = [*folders, *[own for own in sys.path if own not in folders]]


def _broken(place: str, error: BaseException) -> Exception:
    if isinstance(error, ConfigurationError):
        return error
    if isinstance(error, KeyboardInterrupt):
        raise error
    shown = f"{type(error).__name__}: {error}"
    return ConfigurationError(f"{place} cannot be imported: {shown}", hint=_own_traceback(error))


def _own_traceback(error: BaseException) -> str:
    """The traceback from the user's first line on: how we got there is nobody's concern."""
    frames = traceback.extract_tb(error.__traceback__)
    here = str(Path(__file__).resolve().parent)
    own = [
        frame
        for frame in frames
        if not frame.filename.startswith((here, "<frozen importlib"))
        and f"{os.sep}importlib{os.sep}" not in frame.filename
    ]
    lines = traceback.format_list(own) + traceback.format_exception_only(error)
    return "".join(lines).rstrip()
