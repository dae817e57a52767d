"""All ranks of a test use one thread each: spinning threads on few cores slow each other down."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
