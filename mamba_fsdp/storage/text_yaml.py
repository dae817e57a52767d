"""Reads YAML files and keeps their values as text, so that the types of our settings decide how to
read them."""

import re
from pathlib import Path
from typing import Any

from mamba_fsdp.errors import UserError
from mamba_fsdp.storage.patience import read_text


def load_yaml(path: Path, is_own: bool = False) -> dict[str, Any]:
    """Returns the content of a YAML file, with every scalar as text, or None if it is null; {} for an empty file. Raises
    UserError for a file that can't be read, is not a mapping, or gives a name twice.

    is_own: whether the file belongs to this program. Then nothing is null, and the C reader is used: it is ten times as
    fast but crashes on deep nesting.
    """
    import yaml

    loader: Any = yaml.SafeLoader
    if is_own:
        loader = getattr(yaml, "CSafeLoader", loader)

    class TextLoader(loader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            # Nested aliases of collections could stand for more values than any memory holds.
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

    TextLoader.yaml_implicit_resolvers = {}  # they would turn text into numbers and booleans
    if not is_own:
        null = re.compile("~|null|Null|NULL|None|$")
        TextLoader.add_implicit_resolver("tag:yaml.org,2002:null", null, None)
    try:
        content = yaml.load(read_text(path), Loader=TextLoader)
    except Exception as error:  # PyYAML raises many kinds of error
        reason = " ".join(str(error).split()) or "it is cut short"
        raise UserError(f"{path}: can't be read as YAML: {reason}") from None
    if content in (None, ""):
        return {}
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected `name: value` lines")
    return content
