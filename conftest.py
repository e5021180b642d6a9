"""What pytest collects: doctests import every module, and the kernels' cannot be imported without triton."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["lastlayer/_triton/*.py"]
