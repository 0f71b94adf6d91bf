"""From command lines to configurations, and from errors to exit codes."""

import ast
import contextlib
import dataclasses
import errno
import inspect
import io
import itertools
import os
import re
import sys
import textwrap
import traceback
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn

import tyro

from giantjax.config import RunConfig
from giantjax.errors import InputError, TrainingFault, did_you_mean, report
from giantjax.fields import leaves

CONFIGS = Path(__file__).resolve().parents[1] / "configs"

COMMON = frozenset(
    (
        *("run_dir", "seed", "model.num_layers", "model.hidden_size", "model.sequence_length"),
        *("training.num_steps", "training.global_batch_size", "training.eval_every", "training.zero_stage"),
        *("training.precision", "training.recompute", "optimizer.learning_rate", "optimizer.warmup"),
        *("mesh.pipe", "mesh.data", "mesh.tensor", "mesh.replica", "pipeline.schedule", "pipeline.num_microbatches"),
        *("pipeline.num_chunks", "pipeline.partition"),
        *("data.train", "data.validation", "data.split", "checkpoint.every", "checkpoint.keep", "checkpoint.accept_change"),
        "runtime.num_cpu_devices",
    )
)
"""Leaves that --help shows; --help-all shows every one."""


def run_main(main: Callable[[], int]) -> NoReturn:
    """Run a script's main and exit: 2 for bad input and 3 for a detected fault, each with one sentence on stderr."""
    try:
        code = main()
        sys.stdout.flush()
    except (InputError, TrainingFault) as error:
        code = report(error)
    except BrokenPipeError:
        # Whoever read the output has seen enough, as `| head` has; a program in C would end by SIGPIPE.
        _discard_output()
        code = 141
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename:
            raise
        _discard_output()
        print("stopped: what is printed cannot be written: No space left on device", file=sys.stderr)
        code = 3
    sys.exit(code)


def _discard_output() -> None:
    """Let what is left in the buffer go nowhere, so that Python does not try to write it once more at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def preset_names() -> list[str]:
    """Names of the shipped configurations."""
    return sorted(path.stem for path in CONFIGS.glob("*.py") if not path.stem.startswith("_"))


def preset(name: str) -> RunConfig:
    """The configuration of a file of configs/, or of the Python file at a path; its `config()` is called.

    Raises:
        InputError: there is no such file, it cannot be run, or it makes no valid configuration.
    """
    path = Path(name) if name.endswith(".py") else CONFIGS / f"{name}.py"
    if not os.path.isfile(path):
        raise InputError(
            f"there is no config {name or repr(name)}{did_you_mean(name, preset_names())} (shipped: {', '.join(preset_names())})"
        )
    module = types.ModuleType(f"giantjax_config_{path.stem}")
    module.__file__ = str(path)
    try:
        # Not imported, for that would leave a __pycache__ beside the user's file.
        exec(compile(path.read_bytes(), str(path), "exec"), vars(module))
        if not callable(getattr(module, "config", None)):
            raise InputError(f"{path} defines no function config()")
        made = module.config()
    except InputError as error:
        raise InputError(f"config {name}: {error}") from error
    except (Exception, SystemExit) as error:
        # A config is a program of the user's own; whatever it raises is its mistake, told with its place.
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        place = f" in line {lines[-1]} of {path}" if lines else ""
        raise InputError(f"config {name} failed{place}: {type(error).__name__}: {error}") from error
    if not isinstance(made, RunConfig):
        raise InputError(f"config {name}: config() in {path} returns {made!r:.80}, not a RunConfig")
    return made


def parse_run(arguments: list[str], description: str) -> RunConfig:
    """`--config NAME` and any leaf's override as a checked configuration; prints help and exits where asked to.

    Raises:
        InputError: an argument is unknown or has a wrong value.
    """
    name, rest = take_option([_with_dashes(argument) for argument in arguments], "--config")
    if take_option(rest, "--config")[0] is not None:
        raise InputError("--config is given twice; name one config, and override its fields by their own options")
    wants_help = {"-h", "--help", "--help-all"} & set(rest)
    default = preset("gpt_tiny" if name is None else name)
    if wants_help:
        _print_help(default, description, everything="--help-all" in wants_help)
    if name is None:
        raise InputError(f"--config NAME is missing; shipped configs: {', '.join(preset_names())}")
    _check_flags(default, rest)
    return parse(RunConfig, rest, default)


def take_option(arguments: list[str], flag: str) -> tuple[str | None, list[str]]:
    """The value of `flag VALUE` or `flag=VALUE`, and the arguments without it."""
    for i, argument in enumerate(arguments):
        if argument.startswith(f"{flag}="):
            return argument.partition("=")[2], arguments[:i] + arguments[i + 1 :]
        if argument == flag:
            if i + 1 == len(arguments) or arguments[i + 1].startswith("--"):
                raise InputError(f"{flag} is missing its value")
            return arguments[i + 1], arguments[:i] + arguments[i + 2 :]
    return None, arguments


def parse(kind: Any, arguments: list[str], default: Any = tyro.MISSING_NONPROP) -> Any:
    """tyro's reading of `arguments` as a `kind`, its complaint turned into one sentence."""
    arguments = ["--help" if argument == "--help-all" else argument for argument in arguments]
    printed = io.StringIO()
    # Help is for the terminal as wide as it is; complaints are taken apart below.
    width = contextlib.nullcontext() if {"-h", "--help"} & set(arguments) else _wide_terminal()
    with contextlib.redirect_stderr(printed), width:
        try:
            return tyro.cli(kind, default=default, args=arguments)
        except SystemExit as stop:
            if stop.code == 0:
                raise
            raise InputError(_sentence(printed.getvalue())) from stop


def _with_dashes(argument: str) -> str:
    """`--a.b_c=VALUE` as `--a.b-c=VALUE`; whatever is no option stays as it is."""
    flag, equals, value = argument.partition("=")
    return flag.replace("_", "-") + equals + value if argument.startswith("--") else argument


def _check_flags(default: RunConfig, arguments: list[str]) -> None:
    known = {"--" + path.replace("_", "-"): path for path in leaves(default)}
    booleans = {
        flag.rpartition(".")[0] + ".no-" + flag.rpartition(".")[2]
        for flag, path in known.items()
        if isinstance(leaves(default)[path], bool)
    }
    for argument in arguments:
        flag = argument.partition("=")[0]
        if argument.startswith("--") and flag not in known and flag not in booleans:
            # A field's own name says more than the group it was looked for in.
            own = flag.strip("-").rpartition(".")[2]
            elsewhere = " or ".join(name for name in known if name.strip("-").rpartition(".")[2] == own)
            hint = f"; did you mean {elsewhere}?" if elsewhere else did_you_mean(flag, [*known, "--config", "--help-all"])
            raise InputError(f"there is no field {flag}{hint}")


_REWORDED = (
    (r"^Error parsing (--[\w.-]+): invalid literal for int\(\) with base 10: (.*)$", r"\1 is \2; it must be a whole number"),
    (r"^Error parsing (--[\w.-]+): could not convert string to float: (.*)$", r"\1 is \2; it must be a number"),
    (
        r"^Error parsing (--[\w.-]+): no type matching \{None\}\|INT .*? from \[(.*?)\]\. .*$",
        r"\1 is \2; it must be a whole number or None",
    ),
    (r"^Error parsing (--[\w.-]+): no type matching \{None\}\|FLOAT .*? from \[(.*?)\]\. .*$", r"\1 is \2; it must be a number or None"),
    (r"^Error parsing (--[\w.-]+): (.*)$", r"\1 cannot be read: \2"),
    (r"^invalid choice (.*) for argument '(--[\w.-]+)'. Expected one of \((.*)\)\.?$", r"\2 is \1; it must be one of \3"),
    (r"^Missing from \S+: (--[\w.-]+).*$", r"\1 is missing"),
    (r"^Missing value for argument '(--[\w.-]+)'.*$", r"\1 is missing its value"),
    (r"^Unrecognized options?: (.*)$", r"\1 cannot be understood: it is neither an option nor the value of one"),
)
"""What tyro says, and how a message of this program says it."""


def _sentence(boxed: str) -> str:
    """The first statement inside a box that tyro drew, or underlined where the terminal has no such characters."""
    lines = [line.strip("│ ") for line in boxed.splitlines()][1:]
    if lines and set(lines[0]) == {"-"}:
        lines = lines[1:]
    statement = itertools.takewhile(lambda line: not line.startswith("╰") and set(line) not in ({"─"}, {"-"}), lines)
    text = re.sub(r"^Error parsing [\w.]+: ", "", " ".join(line for line in statement if line))
    for pattern, words in _REWORDED:
        text = re.sub(pattern, words, text, flags=re.DOTALL)
    return text.rstrip(".") or "the command line cannot be read"


@contextlib.contextmanager
def _wide_terminal() -> Iterator[None]:
    """Keep tyro from wrapping its message in the middle of a path."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "4000"
    try:
        yield
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before


def _print_help(default: RunConfig, description: str, everything: bool) -> NoReturn:
    print(f"{description}\n\n  --config NAME   one of {', '.join(preset_names())}, or the path of a Python file")
    print("  --help-all      every field\n" if not everything else "")
    kind = RunConfig if everything else _only_common(RunConfig, "")
    shown = default if everything else _as_kind(kind, default)
    tyro.cli(kind, default=shown, args=["--help"], description="Fields, with the values of this config:", prog=f"python {sys.argv[0]}")
    sys.exit(0)


def documentation(kind: type) -> dict[str, str]:
    """The docstrings under the fields of a dataclass."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for statement, following in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            assert isinstance(statement.target, ast.Name)
            found[statement.target.id] = " ".join(str(following.value.value).split())
    return found


def _only_common(kind: Any, path: str) -> Any:
    """A copy of a configuration's type in which only common leaves show in the help."""
    hints, docs, made = typing.get_type_hints(kind), documentation(kind), []
    for item in dataclasses.fields(kind):
        hint, where = hints[item.name], f"{path}{item.name}"
        if dataclasses.is_dataclass(hint):
            made.append((item.name, _only_common(hint, f"{where}.")))
        else:
            told: Any = Annotated[hint, tyro.conf.arg(help=docs[item.name])]  # type: ignore[valid-type]
            made.append((item.name, told if where in COMMON else Annotated[told, tyro.conf.Suppress]))
    return dataclasses.make_dataclass(kind.__name__, made, namespace={"__doc__": kind.__doc__})


def _as_kind(kind: Any, value: Any) -> Any:
    hints = typing.get_type_hints(kind)
    parts = {name: getattr(value, name) for name in hints}
    return kind(**{name: _as_kind(hints[name], part) if dataclasses.is_dataclass(part) else part for name, part in parts.items()})
