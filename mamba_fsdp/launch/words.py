"""What the project's files alone tell of settings, for a host with nothing but Python 3.10 and PyYAML:

    python3 -m mamba_fsdp.launch.words [--help[=WORD]] [--SETTING=VALUE ...]

Exit code 2 and the reason for settings that can't be, 1 where this Python can't read them. An
image, which has all else, is still to be unpacked on many nodes then.
"""

import importlib.util
import sys

from mamba_fsdp.interpreter import OLDEST


def main(words):
    """The exit code. Words that only the command line's library can read are left to the image."""
    if sys.version_info < OLDEST or not importlib.util.find_spec("yaml"):
        return 1
    from mamba_fsdp import command_line
    from mamba_fsdp.settings import resolve
    from mamba_fsdp.settings.settings_page import settings_page

    with command_line.mistakes_in_a_line():
        if command_line.show_help(settings_page, words):
            return 0
        given = {}
        for word in words:
            name, equals, text = word.partition("=")
            if not equals:
                return 0
            given[name.lstrip("-").replace("-", "_")] = text
        resolve.resolve_settings(given, given.pop("config", None))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
