"""Tests that run on several real ranks: a pytest plugin, `@pytest.mark.ranks`, and `on_ranks` for functions.

`hooks` is what pytest loads; it loads the rest when the first test asks for ranks. Nothing else in ddpkit imports this.
"""

from .calls import on_ranks

__all__ = ["on_ranks"]
