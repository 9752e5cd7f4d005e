"""Nested states: their tensors, and a digest of each leaf by its path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..collectives.digest import digest


def tensors_of(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Go through the tensors of an object or nested value, without asking for its state dict."""
    if isinstance(value, nn.Module):
        for inner, tensor in (*value.named_parameters(), *value.named_buffers()):
            yield f"{name}.{inner}", tensor
    elif isinstance(value, Optimizer):
        yield from tensors_of(f"{name}.param_groups", value.param_groups)
        yield from tensors_of(f"{name}.state", list(value.state.values()))
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from tensors_of(f"{name}.{key}", inner)
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from tensors_of(f"{name}.{number}", inner)
    elif isinstance(value, Tensor):
        yield name, value


def digest_leaves(name: str, state: Any) -> dict[str, str]:
    """Digest each leaf of a nested state, by path.

    Digests are equal if the leaves are, and others if one bit is. Containers have one, too, of
    their class and length.
    """
    if isinstance(state, Mapping):
        items = list(state.items())
    elif isinstance(state, list | tuple):
        items = list(enumerate(state))
    else:
        return {name: digest(state)}
    digests = {name: f"{type(state).__name__} of {len(state)}"}
    for key, value in items:
        digests.update(digest_leaves(path_to(name, key), value))
    return digests


def has_names(value: Any) -> bool:
    """Return whether a value is a mapping from names."""
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)


def path_to(container: str, key: Any) -> str:
    """Write the path of a container's value under a key, as no other key or nesting is written."""
    if type(key) is str and key.isidentifier():
        return f"{container}.{key}"
    return f"{container}[{key!r}]"
