"""What all verbs share: Fire reads the words, we read the types, and a user's mistake is two lines without a traceback."""

import inspect
import sys

import fire

from mamba_fsdp.errors import UserError


def run(verb, help_page, arguments=None):
    """Call `verb(*positional, **named)` with the command line's words as text and exit with its code.

    `help_page()` gives the text of --help. Exit codes: 0 or what the verb returns, 2 for a UserError, 130 for Ctrl-C.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    before_separator = arguments[:arguments.index("--")] if "--" in arguments else arguments
    if any(word in ("--help", "-h", "help") for word in before_separator):
        print(help_page())
        raise SystemExit(0)
    try:
        raise SystemExit(call(verb, arguments) or 0)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
        raise SystemExit(130) from None


def call(verb, arguments):
    """Let Fire split `arguments` into positional and named words, none of them guessed into a type, and call `verb`."""
    calls = []

    @fire.decorators.SetParseFn(str)
    def capture(*positional, **named):
        calls.append((positional, named))

    fire.Fire(capture, command=[word for word in arguments])
    (positional, named), = calls
    try:
        bound = inspect.signature(verb).bind(*positional, **named)
    except TypeError as error:
        raise UserError(f"{error}; see --help") from None
    return verb(*bound.args, **bound.kwargs)
