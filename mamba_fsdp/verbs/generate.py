"""python -m mamba_fsdp generate MODEL [--prompt=TEXT] [--OPTION=VALUE ...]

Continue a text, and print it as it is generated. MODEL is a run folder, a
checkpoint, a consolidated.00.pth, or a transformers or state-spaces folder.
The text goes to stdout, the speed to stderr. On a terminal, control
characters are made visible. Ctrl-C stops it.
"""

import sys
import time

from mamba_fsdp.inference.generate import GenerationConfig, check_valid, generate
from mamba_fsdp.interop.places import check_model_path
from mamba_fsdp.reporting.console import escape_for
from mamba_fsdp.text import format_count


def main(model: str, options: GenerationConfig) -> None:
    check_valid(options.prompt)
    check_model_path(model)
    from mamba_fsdp.inference.loading import load

    loaded = load(model, model_name=options.model_name)
    pieces = generate(loaded, options)
    count = 0
    began = time.perf_counter()
    try:
        for piece in pieces:
            if count == 0:
                print(escape_for(sys.stdout, options.prompt), end="")
            print(escape_for(sys.stdout, piece), end="", flush=True)
            count += 1
    finally:  # also after Ctrl-C
        if count:
            seconds = time.perf_counter() - began
            print(flush=True)
            speed = f"{format_count(count, 'token')} in {seconds:.2f} s, {count / seconds:,.0f} tokens/s"
            print(speed, file=sys.stderr)
