"""Runs in every Python process of a supervised engine: boots the adapter, then the sitecustomize it displaced.

Spawned children, resource trackers and compile helpers come through here too, so nothing but os and sys is imported
before the gate. Measured: scripts/bench/adapter.
"""
import os
import sys


def _boot():
    if not os.environ.get("TIGHTRANK_ADAPTER"):
        return
    try:
        from tightrank_adapter import boot
        boot.start()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - an engine must start whatever is wrong with us
        if sys.stderr is not None:
            sys.stderr.write("tightrank adapter: not started: %s: %s\n" % (type(error).__name__, error))


def _run_displaced():
    """What would have run without us. Ours comes first on sys.path, so the displaced one lies further down.

    It takes our place in sys.modules and raises what it raises: site.py treats it as it always did.
    """
    from _frozen_importlib import module_from_spec
    from _frozen_importlib_external import PathFinder
    here = os.path.realpath(os.path.dirname(__file__))
    places = [os.path.realpath(place or ".") for place in sys.path]
    spec = PathFinder.find_spec("sitecustomize", sys.path[places.index(here) + 1:]) if here in places else None
    if spec is None or spec.loader is None:
        return
    module = sys.modules["sitecustomize"] = module_from_spec(spec)
    spec.loader.exec_module(module)


try:
    _boot()
finally:
    _run_displaced()
