"""Others' tokens as documents, for the writer of token stores: one module a format."""

from mamba_fsdp.data.importers.arrow import arrow_rows
from mamba_fsdp.data.importers.datalayout import datalayout_rows
from mamba_fsdp.data.importers.save_to_disk import open_saved_to_disk, rows_are_blocks

GENERATORS = {"arrow": arrow_rows, "datalayout": datalayout_rows}

__all__ = ["GENERATORS", "open_saved_to_disk", "rows_are_blocks"]
