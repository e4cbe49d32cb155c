"""Packages that SGLang imports and never runs on a CPU. Nothing in the compute path is replaced.

`take_over(__name__)` makes every attribute and every submodule of the calling package resolve to a stand-in. A stand-in may
be a decorator, a base class or a name; calling one for its result raises.
"""
import sys
import types
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec


class Name(type):
    """The class of stand-ins: attributes resolve, `[...]` and `|` answer themselves, calls decorate."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, stand_in("%s.%s" % (cls.__name__, name)))
        return cls.__dict__[name]

    def __call__(cls, *args, **kwargs):
        if "_stand_in" not in cls.__dict__:  # the engine's own class, derived from a stand-in
            return super().__call__(*args, **kwargs)
        return Decorator(cls.__name__).apply(args, kwargs) or Decorator(cls.__name__)

    def __getitem__(cls, item):
        return cls

    def __or__(cls, other):
        return cls

    __ror__ = __or__

    def __iter__(cls):
        return iter(())


class Kernel:
    """A function that was decorated as a kernel."""

    def __init__(self, function):
        self.fn = function
        self.__name__ = getattr(function, "__name__", "kernel")

    def __getitem__(self, grid):
        return self

    def __call__(self, *args, **kwargs):
        raise NotImplementedError("stand-in: kernel %s was launched" % self.__name__)


class Decorator:
    """What `triton.autotune(...)` and the like answer: only good for decorating."""

    def __init__(self, name):
        self._name = name

    def apply(self, args, kwargs):
        if len(args) == 1 and not kwargs and isinstance(args[0], (types.FunctionType, Kernel)):
            return Kernel(args[0])
        return None

    def __call__(self, *args, **kwargs):
        kernel = self.apply(args, kwargs)
        if kernel is None:
            raise NotImplementedError("stand-in: %s was called" % self._name)
        return kernel


def stand_in(name):
    return Name(name, (), {"_stand_in": True})


class Module(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, stand_in("%s.%s" % (self.__name__, name)))
        return self.__dict__[name]


class Finder(MetaPathFinder, Loader):
    """Makes every submodule of one package importable; `extras` gives some of them real attributes."""

    def __init__(self, package, extras):
        self.prefix, self.extras = package + ".", extras

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if name.startswith(self.prefix) else None

    def create_module(self, spec):
        return Module(spec.name)

    def exec_module(self, module):
        vars(module).update(self.extras.get(module.__name__, {}))


def take_over(package, extras=None):
    sys.meta_path.insert(0, Finder(package, extras or {}))
    sys.modules[package].__class__ = Module
