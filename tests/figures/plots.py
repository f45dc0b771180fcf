"""All figures of the course and the colours that they share, by name."""

import importlib
from inspect import isfunction

from conftest import ROOT

_ROOMS = ROOT / "lessons"
_FILES = [*ROOT.glob("course_utils/draw/*.py"), *_ROOMS.glob("*/*figures.py"), *_ROOMS.glob("*/*_pictures.py")]

for _file in _FILES:
    _name = ".".join(_file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    _module = importlib.import_module(_name)
    for _key, _value in vars(_module).items():
        _figure = isfunction(_value) and _value.__annotations__.get("return") == "Figure"
        _drawing = _figure and _key not in ("empty_figure", "new_figure")
        if not _key.startswith("_") and (_drawing or _key.endswith("_COLORS")):
            globals()[_key] = _value

__all__ = sorted(name for name, value in globals().items() if isfunction(value))
