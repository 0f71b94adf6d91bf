"""A file of scripts/ as a module."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parents[1] / "scripts"


def load_script(name: str) -> Any:
    """scripts/NAME.py, not run as main."""
    spec = importlib.util.spec_from_file_location(f"{name}_script", SCRIPTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Before it runs, because dataclasses look their module up by name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
