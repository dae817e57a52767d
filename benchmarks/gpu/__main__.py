"""python -m benchmarks.gpu: training steps beside others', see models.py; with --all everything, see all.py."""

import sys

if "--all" in sys.argv[1:]:
    from benchmarks.gpu import all as everything

    sys.exit(everything.main([word for word in sys.argv[1:] if word != "--all"]))
else:
    from benchmarks.gpu import models

    sys.exit(models.main())
