"""The options of method `draft_tree`: the draft model, how children are chosen, and the shape of the tree."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, fields

from minillm.batch import MAX_TREE_TOKENS
from minillm.config import at_least, in_range
from minillm.errors import ConfigError, UnsupportedError
from minillm.json_files import short_repr
from minillm.models.loading import load_config
from minillm.speculative.draft_model import ModelOptions, draft_folder
from minillm.speculative.drafter import TargetInfo
from minillm.speculative.tree_shape import TreeShape

DEFAULT_BRANCHING = (2, 2, 2)


@dataclass(frozen=True)
class DraftTreeOptions(ModelOptions):
    """The options of method `draft_tree`, minillm's own except for those of a draft model and
    `speculative_token_tree`."""

    draft_sample_method: str = "greedy"
    """`greedy`: children are the draft model's top-k; `probabilistic`: for sampled requests, drawn from its
    distribution without replacement."""
    tree_branching: Sequence[int] | None = None
    """Number of children of each node, level by level; without any of these three options, (2, 2, 2)."""
    speculative_token_tree: Sequence[tuple[int, ...]] | str | None = None
    """Each node as the ranks on the way to it, `[(0,), (1,), (0, 0)]`: vLLM's former option, also as its string."""
    tree_shape: str | None = None
    """`measured`: the shape with the most tokens per unit of time, for the acceptance measured so far."""
    tree_nodes: int = 14
    """Most nodes of a measured tree."""
    tree_levels: int = 4
    """Most levels of a measured tree."""
    tree_draft_cost: float = 0.0
    """Time of one draft forward, in decode steps of the target. Like the next one, it only affects a measured shape;
    with both 0, the tree uses all its nodes. They are given and not timed, so that runs can be repeated."""
    tree_verify_cost: float = 0.0
    """Time that one more token adds to a target forward, in decode steps of the target."""

    def __post_init__(self) -> None:
        self.check("draft_tree")
        shapes = ("tree_branching", "speculative_token_tree", "tree_shape")
        if len(given := [name for name in shapes if getattr(self, name) is not None]) > 1:
            raise ConfigError(f"{' and '.join(given)} each set the shape of the tree; give one of them")
        _check_branching(self.tree_branching)
        self._check_measured()
        if self.num_nodes >= MAX_TREE_TOKENS:
            source = "tree_nodes" if self.is_measured else "speculative_token_tree"
            raise ConfigError(_too_many(source, getattr(self, source), str(self.num_nodes)))

    def check_target(self, target: TargetInfo) -> int:
        """See `Drafter.Options`. Raises `UnsupportedError` for a draft model with a sliding window: trees are
        drafted without one."""
        assert self.model is not None
        if (config := load_config(draft_folder(self.model, target))).has_windows:
            raise UnsupportedError(
                f"the draft model {self.model!r} has a sliding window (here {config.sliding_window} tokens), and "
                "trees are drafted without one; use a method that drafts chains, like 'draft_model'"
            )
        return self.num_nodes

    def _check_measured(self) -> None:
        if self.tree_shape not in (None, "measured"):
            raise ConfigError(f"tree_shape={self.tree_shape!r} must be 'measured', or left out for a fixed shape")
        at_least("tree_nodes", self.tree_nodes, 1)
        at_least("tree_levels", self.tree_levels, 1)
        in_range("tree_draft_cost", self.tree_draft_cost, None)
        in_range("tree_verify_cost", self.tree_verify_cost, None)
        defaults = {f.name: f.default for f in fields(self)}
        for name in ("tree_nodes", "tree_levels", "tree_draft_cost", "tree_verify_cost"):
            if not self.is_measured and (value := getattr(self, name)) != defaults[name]:
                raise ConfigError(f"{name}={value!r} only affects a measured shape; add tree_shape='measured'")

    @property
    def is_measured(self) -> bool:
        """Whether the shape follows from measured acceptance."""
        return self.tree_shape == "measured"

    @property
    def fixed_shape(self) -> TreeShape:
        """The shape, if it is not measured."""
        if self.speculative_token_tree is not None:
            return TreeShape.from_paths(_read_paths(self.speculative_token_tree))
        return TreeShape.from_branching(self.tree_branching or DEFAULT_BRANCHING)

    @property
    def num_nodes(self) -> int:
        """Most drafts in a tree."""
        return self.tree_nodes if self.is_measured else self.fixed_shape.num_nodes

    def verify_cost(self, rows: int) -> float:
        """Time of a target forward with `rows` tokens of a request, in decode steps."""
        return 1 + self.tree_verify_cost * (rows - 1)


def _too_many(option: str, value: object, num_nodes: str) -> str:
    return (
        f"{option}={short_repr(value)} makes {num_nodes} drafts, at most {MAX_TREE_TOKENS - 1} can be verified at "
        "once; lower it"
    )


def _check_branching(branching: Sequence[int] | None) -> None:
    if branching is None:
        return
    if not isinstance(branching, list | tuple) or not branching:
        raise ConfigError(f"tree_branching={branching!r} must list the children per node of each level: [2, 2, 2]")
    nodes, of_level = 0, 1
    for count in branching:
        at_least("tree_branching's levels", count, 1)
        of_level *= count
        nodes += of_level
        if nodes >= MAX_TREE_TOKENS:
            raise ConfigError(_too_many("tree_branching", branching, f"at least {short_repr(nodes)}"))


def _read_paths(given: Sequence[tuple[int, ...]] | str) -> list[tuple[int, ...]]:
    """The nodes of a `speculative_token_tree`. Raises `ConfigError` if it is no list of tuples of ranks."""
    try:
        listed = ast.literal_eval(given) if isinstance(given, str) else given
        paths = [tuple(path) for path in listed]
        is_valid = bool(paths) and all(type(rank) is int and rank >= 0 for path in paths for rank in path)
    except (TypeError, ValueError, SyntaxError, MemoryError, RecursionError):
        is_valid = False
    if not is_valid:
        raise ConfigError(
            f"speculative_token_tree={str(given)[:80]!r} must list each node by the ranks on the way to it: "
            "[(0,), (1,), (0, 0)]"
        )
    return paths
