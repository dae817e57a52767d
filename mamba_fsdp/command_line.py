"""Runs verbs and the functions of the package: Fire splits words, dataclasses of options give their types, and a mistake
becomes one line without a traceback."""

import contextlib
import dataclasses
import errno
import functools
import inspect
import os
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from keyword import iskeyword
from typing import Any, NoReturn

import mamba_fsdp
from mamba_fsdp.errors import StorageError, UserError
from mamba_fsdp.fields import default, does_nothing, has_effect, read_field, shown
from mamba_fsdp.reporting.console import Console
from mamba_fsdp.settings.help import Page, asked_for, meanings_in
from mamba_fsdp.text import escape_unprintable, suggest_name
from mamba_fsdp.this_process import write_torchrun_error

MOST_OF_A_LINE = 2000  # characters of an error, which may quote what a file holds


def run(
    verb: Callable[..., Any], page: Callable[[], Page], arguments: Sequence[str] | None = None
) -> None:
    """Calls `verb` with the command line's words and exits with its code.

    page: returns the page of --help. Exit codes: what the verb returns or 0; a UserError's own;
    130 for Ctrl-C.
    """
    if arguments is None:
        arguments = sys.argv[1:]
    code = None
    with mistakes_in_a_line():
        if "--version" in arguments:
            Console().print_line(f"mamba_fsdp {mamba_fsdp.__version__}")
        elif not show_help(page, arguments):
            code = call(verb, arguments)
    raise SystemExit(code or 0)


def show_help(page: Callable[[], Page], arguments: Sequence[str]) -> bool:
    """Prints the part of the help page that the words ask for. Returns False if they don't ask for help."""
    topic = asked_for(arguments)
    if topic is not None:
        Console().print_line(page().text(topic))
    return topic is not None


@contextlib.contextmanager
def mistakes_in_a_line() -> Iterator[None]:
    """Turns Ctrl-C and user errors into one line; exits silently if stdout's reader has gone."""
    try:
        yield
        if sys.stdout:  # None if it is closed
            sys.stdout.flush()
    except KeyboardInterrupt:
        print("\nstopped by Ctrl-C", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:  # the reader, such as head, has seen enough
        drop_output()
        raise SystemExit(0) from None
    except OSError as error:
        if error.filename and error.errno in (errno.EACCES, errno.ENAMETOOLONG):
            _fail(UserError(f"{error.filename}: {error.strerror}"))  # whatever used the path
        if error.errno == errno.ENOSPC:  # such as that of the output
            drop_output()
            _fail(StorageError(f"can't write {error.filename or 'any more'}: {error.strerror}"))
        write_torchrun_error(error)
        raise
    except UserError as error:
        _fail(error)
    except Exception as error:
        write_torchrun_error(error)
        if "CUDA error" in str(error):  # at its usual end PyTorch would use the lost GPU, and abort
            traceback.print_exc()
            sys.stdout.flush()
            os._exit(1)
        raise


def drop_output() -> None:
    """Points stdout to /dev/null, so that Python does not complain at exit that it can't be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(error: UserError) -> NoReturn:
    """Ends the process with the error as one line."""
    write_torchrun_error(error)
    mistakes = f"error: {error}".split("\n  ")  # see settings.resolve.check_none
    lines = [escape_unprintable(mistake)[:MOST_OF_A_LINE] for mistake in mistakes]
    print("\n  ".join(lines), file=sys.stderr)
    raise SystemExit(error.exit_code) from None


def call(verb: Callable[..., Any], arguments: Sequence[str]) -> Any:
    """Calls the verb with the words as the values of its parameters, see `invoke`."""
    if "--" in arguments:  # Fire takes flags of its own after it
        raise UserError("nothing is expected after --; see --help")
    positional, named = split(arguments)
    return invoke(verb, positional, named, "--", "see --help")


def for_python(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Returns the package's function `name`: it calls `function` through `invoke`."""

    @functools.wraps(function)
    def checked(*positional: Any, **named: Any) -> Any:
        try:
            return invoke(function, positional, named, "", f"see help({name})")
        except UserError as error:  # what is inside the library is of no use to a notebook's reader
            raise error.with_traceback(None) from None

    lines = [inspect.getdoc(function) or ""]
    if options_of(function):
        lines += [f"{leaf}: {text}" for leaf, text in meanings_in(options_of(function)).items()]
    checked.__doc__ = "\n".join(lines)
    checked.__signature__ = with_options(function)  # type: ignore[attr-defined]
    return checked


def invoke(
    function: Callable[..., Any],
    positional: Sequence[Any],
    named: Mapping[str, Any],
    dashes: str,
    see: str,
) -> Any:
    """Calls the function; arguments that are fields of its `options` dataclass are collected into it.

    Raises UserError for arguments that are too many, missing or unknown (with the nearest name), and
    for fields of a wrong type, out of bounds, or without effect. dashes: what is written before a name.
    see: where names are explained.
    """
    options = options_of(function)
    leaves = {leaf.name: leaf for leaf in dataclasses.fields(options)} if options else {}
    signature = with_options(function)
    refuse_unknown(signature, leaves, named, dashes, see)
    try:
        bound = signature.bind(*positional, **named)
    except TypeError as error:
        raise UserError(f"{error}; {see}") from None
    given = {name: bound.arguments.pop(name) for name in leaves if name in bound.arguments}
    for name, value in bound.arguments.items():
        parameter = signature.parameters[name]
        if parameter.kind is parameter.VAR_POSITIONAL:
            bound.arguments[name] = tuple(read_argument(parameter, one, see) for one in value)
        elif parameter.kind is not parameter.VAR_KEYWORD:
            bound.arguments[name] = read_argument(parameter, value, see)
    if options:
        return function(*bound.args, **bound.kwargs, options=read_options(options, given, dashes))
    return function(*bound.args, **bound.kwargs)


def refuse_unknown(
    signature: inspect.Signature,
    leaves: Mapping[str, Any],
    named: Mapping[str, Any],
    dashes: str,
    see: str,
) -> None:
    """Raises UserError for a name that no parameter and no option has, with the nearest name or other tools' word for it."""
    elsewhere = {
        word: name for name, leaf in leaves.items() for word in leaf.metadata["elsewhere"].split()
    }
    parameters = signature.parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    known_names = [known.rstrip("_") for known in signature.parameters]
    for name in named:
        is_known = name in signature.parameters
        if not is_known and (name in elsewhere or not takes_any):
            hint = suggest_name(name, known_names, see, dashes, elsewhere)
            raise UserError(f"{dashes}{name}: there is no such option; {hint}")


def read_options(options: Any, given: Mapping[str, Any], dashes: str) -> Any:
    """Returns the dataclass `options` with the values that were given. Raises UserError for one of a wrong type, out of
    bounds, or without effect beside the others."""
    leaves = {leaf.name: leaf for leaf in dataclasses.fields(options)}
    values = {}
    for name, value in given.items():
        if value is not None:
            text = value if isinstance(value, (list, dict)) else shown(value)
            values[name] = read_field(f"{dashes}{name.rstrip('_')}", leaves[name], text)
    made = options(**values)
    for name, value in values.items():
        if value != default(leaves[name]) and not has_effect(leaves[name], made):
            raise UserError(f"{dashes}{does_nothing(leaves[name], value)}; leave it out")
    return made


def read_argument(parameter: inspect.Parameter, value: Any, see: str) -> Any:
    """Returns the value of a parameter that is no option: of a path a text with its ~ expanded, as a shell does it.
    Raises UserError for a value of another type."""
    if isinstance(value, (str, os.PathLike)):  # paths all
        value = os.path.expanduser(value)
    kind = parameter.annotation  # a text, unchecked, if it names a class that is not imported here
    is_checked = kind in (str, bool) or isinstance(kind, types.UnionType)
    if is_checked and not isinstance(value, kind):
        wanted = "True or False" if kind is bool else "a path or a name"
        raise UserError(f"{parameter.name}: expected {wanted}, not {type(value).__name__}; {see}")
    return value


def options_of(function: Callable[..., Any]) -> Any:
    """Returns the dataclass of the parameter `options`; None if there is no such parameter."""
    parameter = inspect.signature(function).parameters.get("options")
    return parameter and parameter.annotation


def with_options(function: Callable[..., Any]) -> inspect.Signature:
    """Returns the function's signature with the fields of `options` in its place."""
    signature = inspect.signature(function)
    parameters = []
    for name, parameter in signature.parameters.items():
        if name != "options":
            parameters.append(parameter)
            continue
        for leaf in dataclasses.fields(parameter.annotation):
            field = parameter.replace(name=leaf.name, default=default(leaf), annotation=leaf.type)
            parameters.append(field)
    return signature.replace(parameters=parameters)


def split(arguments: Sequence[str]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Returns (positional, named) words, by Fire's rules, but without its guesses of types: 0123 stays 0123."""
    if all(word.startswith("--") and "=" in word for word in arguments):
        parts = [word[2:].partition("=") for word in arguments]
        return (), {name.replace("-", "_"): text for name, _, text in parts}
    import fire  # slower than all that a help page needs, and not every host has it

    words: list[tuple[tuple[str, ...], dict[str, Any]]] = []

    @fire.decorators.SetParseFn(str)
    def capture(*positional: str, **named: str) -> None:
        words.append((positional, named))

    fire.Fire(capture, command=list(arguments))
    positional, named = words[0]
    text_by_name = {}
    for name, text in named.items():
        if name.startswith("_"):  # Fire takes --no_wandb for the opposite of a flag called _wandb
            text_by_name[f"no{name}"] = "True"
        else:  # Python reserves `from`, so that the field is called from_
            text_by_name[name + "_" * iskeyword(name)] = text
    return positional, text_by_name
