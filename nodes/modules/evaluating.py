"""Modules in evaluation mode, for pieces that make train batches."""

import copy
from collections import OrderedDict
from types import MethodType
from typing import Any

import torch

_MARK = "_is_evaluating_view"
_HOLDERS = {dict, OrderedDict, list, tuple}


def evaluating(module: Any) -> Any:
    """A view of a module in evaluation mode, which shares the parameters and has copies of the buffers.

    Passes of the view leave no trace in the module: its mode, its statistics and its other attributes stay, and another
    thread may train it meanwhile. A compiled module runs uncompiled. An object without a `__dict__` is returned as it
    is, a dict with views of its values.
    """
    if type(module) is dict:
        return {key: evaluating(value) for key, value in module.items()}
    if isinstance(module, type) or _MARK in getattr(module, "__dict__", {_MARK: None}):
        return module
    view = _view_of(module, {})
    if not isinstance(view, torch.nn.Module) and callable(getattr(view, "eval", None)):
        view.eval()
    return view


def _view_of(owner: Any, views: dict[int, Any]) -> Any:
    """The view of a module, or of an object that has modules; `views` has those made so far, by the owner's id."""
    if isinstance(owner, torch.jit.ScriptModule):
        return views.setdefault(id(owner), copy.deepcopy(owner).eval())
    if "_orig_mod" in vars(owner).get("_modules", ()):  # what torch.compile makes runs the original, not its own child
        return _seen(owner._modules["_orig_mod"], views)
    try:
        view = views[id(owner)] = object.__new__(type(owner))
    except TypeError:  # an extension type: only its own constructor makes objects
        return owner
    attributes = vars(view)
    attributes.update(vars(owner))
    for name, value in vars(owner).items():
        if type(value) in _HOLDERS and (value or type(value) is not OrderedDict):  # empty ones are torch's hooks
            attributes[name] = _seen(value, views)
        elif isinstance(value, torch.nn.Module | MethodType):
            attributes[name] = _seen(value, views)
    attributes[_MARK] = True
    if isinstance(view, torch.nn.Module):
        buffers = vars(owner)["_buffers"].items()
        attributes["_buffers"] = {name: value if value is None else value.detach().clone() for name, value in buffers}
        attributes |= {"training": False, "_compiled_call_impl": None}
    return view


def _seen(value: Any, views: dict[int, Any]) -> Any:
    """The value of an attribute, with views in place of modules and copies of lists and dicts."""
    if id(value) in views:
        return views[id(value)]
    if isinstance(value, torch.nn.Module):
        return _view_of(value, views)
    if type(value) is MethodType and isinstance(value.__self__, torch.nn.Module):
        return MethodType(value.__func__, _seen(value.__self__, views))
    if type(value) is tuple:
        return tuple(_seen(item, views) for item in value)
    if type(value) is list:
        items = views[id(value)] = []
        items += [_seen(item, views) for item in value]
        return items
    if type(value) in _HOLDERS:
        entries = views[id(value)] = type(value)()
        for key, item in value.items():
            entries[key] = _seen(item, views)
        return entries
    return value
