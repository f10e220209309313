"""The attributes that calls of modules store, observed while matchers run copies of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import is_
from weakref import WeakKeyDictionary

from torch import nn

from hf_cpu_accel.guard.modules import OF_MODULES, class_of

_stores: WeakKeyDictionary[type, frozenset[str]] = WeakKeyDictionary()


def stores_of(cls: type) -> frozenset[str]:
    """Return the attributes that calls of modules of this class stored in their module so far."""
    return _stores.get(cls, frozenset())


@contextmanager
def observe_stores(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, observe which attributes calls store in `modules`, which nothing else may set meanwhile."""
    before = [(module, dict(vars(module))) for module in modules]
    try:
        yield
    finally:
        for module, state in before:
            now = vars(module)
            if len(now) != len(state) or not all(map(is_, now.values(), state.values())):
                names = {name for name, value in now.items() if state.get(name, _stores) is not value}
                cls = class_of(module)
                _stores[cls] = stores_of(cls) | names - OF_MODULES
