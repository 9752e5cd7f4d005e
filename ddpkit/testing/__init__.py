"""Run tests on several real ranks: a pytest plugin, `@pytest.mark.ranks`, and `on_ranks`.

pytest loads `hooks`, which loads the rest when the first test asks for ranks. Nothing else in
ddpkit imports this room.
"""

from .calls import on_ranks

__all__ = ["on_ranks"]
