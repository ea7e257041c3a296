"""YAML of bounded depth: the parser written in C overflows the stack of its process on a file nested without end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING or not hasattr(yaml, "CSafeLoader"):
    from yaml import SafeLoader as Loader
else:
    from yaml import CSafeLoader as Loader  # written in C: ten times as fast
DEEPEST = 50


class BoundedLoader(Loader):
    """A safe loader that counts how deep it is; both loaders call the two methods around every node."""

    depth = 0

    def descend_resolver(self, current_node: Any, current_index: Any) -> None:
        self.depth += 1
        if self.depth > DEEPEST:
            raise yaml.YAMLError(f"nested deeper than {DEEPEST} levels")
        super().descend_resolver(current_node, current_index)

    def ascend_resolver(self) -> None:
        self.depth -= 1
        super().ascend_resolver()


def load_yaml(text: str | bytes) -> Any:
    """Plain values of a YAML text. Raises YAMLError, also where it is nested too deep."""
    return yaml.load(text, Loader=BoundedLoader)  # a safe one  # nosec B506
