"""Calls verbs with command-line arguments, and the functions of the package with Python arguments.

Fire splits the command line. The fields of an options dataclass define the types and limits of options. A user's
mistake becomes an error message of one line, without a traceback."""

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
from mamba_fsdp.fields import default, format_value, has_effect, ineffective_message, read_field
from mamba_fsdp.reporting.console import Console
from mamba_fsdp.settings.help import Page, field_docs, help_query
from mamba_fsdp.text import escape_unprintable, suggest_name
from mamba_fsdp.this_process import write_torchrun_error

MAX_ERROR_CHARS = 2000  # longer lines of an error message are cut, because they can quote a file


def run(
    verb: Callable[..., Any], page: Callable[[], Page], arguments: Sequence[str] | None = None
) -> None:
    """Calls `verb` with the arguments of the command line, and exits.

    The exit code is the return value of the verb (None means 0), the exit_code of a UserError, or 130 after Ctrl-C.

    page: a function that returns the help page. arguments: by default, the arguments of this process.
    """
    if arguments is None:
        arguments = sys.argv[1:]
    code = None
    topic = help_query(arguments)
    with errors_as_one_line():
        if "--version" in arguments:
            Console().print_line(f"mamba_fsdp {mamba_fsdp.__version__}")
        elif topic is not None:
            Console().print_line(page().text(topic))
        else:
            code = call(verb, arguments)
    raise SystemExit(code or 0)


@contextlib.contextmanager
def errors_as_one_line() -> Iterator[None]:
    """Prints a message without a traceback for Ctrl-C and user errors, and exits. Exits silently if the reader of stdout
    has exited. Other exceptions are raised again."""
    try:
        yield
        if sys.stdout:  # it is None if stdout is closed
            sys.stdout.flush()
    except KeyboardInterrupt:
        print("\nstopped by Ctrl-C", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:  # the reader of stdout, such as head, has exited
        discard_output()
        raise SystemExit(0) from None
    except OSError as error:
        if error.filename and error.errno in (errno.EACCES, errno.ENAMETOOLONG):
            _fail(UserError(f"{error.filename}: {error.strerror}"))  # usually a path of the user
        if error.errno == errno.ENOSPC:  # stdout can be on a full disk, for example
            discard_output()
            _fail(StorageError(f"can't write {error.filename or 'any more'}: {error.strerror}"))
        write_torchrun_error(error)
        raise
    except UserError as error:
        _fail(error)
    except Exception as error:
        write_torchrun_error(error)
        if "CUDA error" in str(error):  # a normal exit would use the failed GPU, and abort
            traceback.print_exc()
            sys.stdout.flush()
            os._exit(1)
        raise


def discard_output() -> None:
    """Redirects stdout to /dev/null. Otherwise Python reports at exit that stdout can't be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(error: UserError) -> NoReturn:
    """Prints the error, and exits with its exit_code. An error in several settings is printed as a line for each of
    them."""
    write_torchrun_error(error)
    mistakes = f"error: {error}".split("\n  ")  # an error in the settings lists several mistakes
    lines = [escape_unprintable(mistake)[:MAX_ERROR_CHARS] for mistake in mistakes]
    print("\n  ".join(lines), file=sys.stderr)
    raise SystemExit(error.exit_code) from None


def call(verb: Callable[..., Any], arguments: Sequence[str]) -> Any:
    """Calls the verb with command-line arguments; see `invoke`."""
    if "--" in arguments:  # Fire would parse arguments after -- as its own flags
        raise UserError("arguments after -- are not supported; see --help")
    positional, named = split_arguments(arguments)
    return invoke(verb, positional, named, "--", "see --help")


def python_function(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Returns the public function `name` of the package. The returned function calls `function` through `invoke`. Its
    documentation and its signature contain the options."""

    @functools.wraps(function)
    def checked(*positional: Any, **named: Any) -> Any:
        try:
            return invoke(function, positional, named, "", f"see help({name})")
        except UserError as error:  # a traceback through the library does not help a user
            raise error.with_traceback(None) from None

    lines = [inspect.getdoc(function) or ""]
    if options_class(function):
        lines += [f"{field}: {text}" for field, text in field_docs(options_class(function)).items()]
    checked.__doc__ = "\n".join(lines)
    checked.__signature__ = signature_with_options(function)  # type: ignore[attr-defined]
    return checked


def invoke(
    function: Callable[..., Any],
    positional: Sequence[Any],
    named: Mapping[str, Any],
    dashes: str,
    see: str,
) -> Any:
    """Calls the function. Arguments that are fields of its options dataclass are collected into its `options`
    parameter.

    dashes: the prefix of an argument's name in messages, "--" or "". see: the end of messages; it refers to the
    documentation of the arguments. Raises UserError for too many, missing or unknown arguments, and for options with a
    wrong type, out of bounds, or without effect. For an unknown argument, the message suggests the most similar name.
    """
    options = options_class(function)
    fields = {field.name: field for field in dataclasses.fields(options)} if options else {}
    signature = signature_with_options(function)
    check_names(signature, fields, named, dashes, see)
    try:
        bound = signature.bind(*positional, **named)
    except TypeError as error:
        raise UserError(f"{error}; {see}") from None
    given = {name: bound.arguments.pop(name) for name in fields if name in bound.arguments}
    for name, value in bound.arguments.items():
        parameter = signature.parameters[name]
        if parameter.kind is parameter.VAR_POSITIONAL:
            bound.arguments[name] = tuple(read_argument(parameter, one, see) for one in value)
        elif parameter.kind is not parameter.VAR_KEYWORD:
            bound.arguments[name] = read_argument(parameter, value, see)
    if options:
        return function(*bound.args, **bound.kwargs, options=read_options(options, given, dashes))
    return function(*bound.args, **bound.kwargs)


def check_names(
    signature: inspect.Signature,
    fields: Mapping[str, Any],
    named: Mapping[str, Any],
    dashes: str,
    see: str,
) -> None:
    """Raises UserError for a name that is neither a parameter nor an option. The message suggests the most similar name,
    or the option that has this name in other programs. A function with a parameter such as **settings accepts any name
    that is not another program's name of an option."""
    elsewhere = {
        word: name for name, field in fields.items() for word in field.metadata["elsewhere"].split()
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
    """Returns an instance of the dataclass `options` with the given values. Raises UserError for a value with a wrong
    type, out of bounds, or without effect together with the other values."""
    fields = {field.name: field for field in dataclasses.fields(options)}
    values = {}
    for name, value in given.items():
        if value is not None:
            text = value if isinstance(value, (list, dict)) else format_value(value)
            values[name] = read_field(f"{dashes}{name.rstrip('_')}", fields[name], text)
    made = options(**values)
    for name, value in values.items():
        if value != default(fields[name]) and not has_effect(fields[name], made):
            raise UserError(f"{dashes}{ineffective_message(fields[name], value)}; leave it out")
    return made


def read_argument(parameter: inspect.Parameter, value: Any, see: str) -> Any:
    """Returns the value of a parameter that is not a field of the options. In a string or path, ~ is expanded. Raises
    UserError for a value of another type."""
    if isinstance(value, (str, os.PathLike)):  # these parameters are paths, or names without ~
        value = os.path.expanduser(value)
    kind = parameter.annotation  # a string if its class is imported for type checkers only
    is_checked = kind in (str, bool) or isinstance(kind, types.UnionType)
    if is_checked and not isinstance(value, kind):
        wanted = "True or False" if kind is bool else "a path or a name"
        raise UserError(f"{parameter.name}: expected {wanted}, not {type(value).__name__}; {see}")
    return value


def options_class(function: Callable[..., Any]) -> Any:
    """Returns the dataclass of the function's parameter `options`, or None without such a parameter."""
    parameter = inspect.signature(function).parameters.get("options")
    return parameter and parameter.annotation


def signature_with_options(function: Callable[..., Any]) -> inspect.Signature:
    """Returns the function's signature with the fields of `options` in place of the parameter `options`."""
    signature = inspect.signature(function)
    parameters = []
    for name, parameter in signature.parameters.items():
        if name != "options":
            parameters.append(parameter)
            continue
        for field in dataclasses.fields(parameter.annotation):
            option = parameter.replace(
                name=field.name, default=default(field), annotation=field.type
            )
            parameters.append(option)
    return signature.replace(parameters=parameters)


def split_arguments(arguments: Sequence[str]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Splits a command line into (positional, named) arguments by the rules of Fire. All values stay strings: 0123 is
    not turned into a number."""
    if all(word.startswith("--") and "=" in word for word in arguments):
        parts = [word[2:].partition("=") for word in arguments]
        return (), {name.replace("-", "_"): text for name, _, text in parts}
    import fire  # imported here because it is slow, help does not need it, and some hosts lack it

    parsed: list[tuple[tuple[str, ...], dict[str, Any]]] = []

    @fire.decorators.SetParseFn(str)
    def capture(*positional: str, **named: str) -> None:
        parsed.append((positional, named))

    fire.Fire(capture, command=list(arguments))
    positional, named = parsed[0]
    text_by_name = {}
    for name, text in named.items():
        if name.startswith("_"):  # Fire parses --no_wandb as the negation of a flag _wandb
            text_by_name[f"no{name}"] = "True"
        else:  # `from` is a keyword of Python; the field is from_
            text_by_name[name + "_" * iskeyword(name)] = text
    return positional, text_by_name
