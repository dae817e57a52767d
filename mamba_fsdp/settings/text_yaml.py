"""Reads YAML files whose values stay the text that was written, so that the types of our settings
decide."""

from pathlib import Path
from typing import Any

from mamba_fsdp.errors import UserError


def load_yaml(path: Path, ours: bool = False) -> dict[str, Any]:
    """The content of a YAML file, every scalar as text; empty for an empty file. Raises UserError
    for a file that can't be read, is no mapping, or gives a name twice.

    ours: a file of this program is read in C, ten times as fast. Deep nesting would crash that
    reader.
    """
    import yaml

    loader: Any = yaml.SafeLoader
    if ours:
        loader = getattr(yaml, "CSafeLoader", loader)

    class TextLoader(loader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            # An alias of a collection could stand for more values than any memory holds.
            alias = self.peek_event() if self.check_event(yaml.AliasEvent) else None
            node = super().compose_node(parent, index)
            if alias and not isinstance(node, yaml.ScalarNode):
                raise yaml.YAMLError(
                    f"*{alias.anchor} stands for more than one value; write it out"
                )
            return node

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            content = super().construct_mapping(node, deep)
            if len(content) < len(node.value):
                names = [key.value for key, _ in node.value]
                raise yaml.YAMLError(f"{max(names, key=names.count)} is given twice")
            return content

    TextLoader.yaml_implicit_resolvers = {}  # which would make numbers and booleans of text
    try:
        content = yaml.load(path.read_text(), Loader=TextLoader)
    except Exception as error:  # PyYAML raises whatever a file runs into
        reason = " ".join(str(error).split()) or "it is cut short"
        raise UserError(f"{path}: can't be read as YAML: {reason}") from None
    if content in (None, ""):
        return {}
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected `name: value` lines")
    return content
