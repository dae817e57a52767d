"""Reads YAML files and keeps scalar values as text. The values are parsed later, by the types of the settings that they
belong to."""

import re
from pathlib import Path
from typing import Any

from mamba_fsdp.errors import UserError
from mamba_fsdp.storage.retry import read_text


def load_yaml(path: Path, is_own: bool = False) -> dict[str, Any]:
    """Reads a YAML file.

    is_own: whether the file is a part of this program. Then null stays text, and the C parser is used. The C parser is ten
    times faster but crashes on deep nesting, so it is not used for untrusted files.

    Returns the content, or {} for an empty file. Every scalar in the content is text, but if `is_own` is false, null is
    None. Raises UserError for a file that can't be read, is not a mapping, or contains a
    name twice.
    """
    import yaml

    loader: Any = yaml.SafeLoader
    if is_own:
        loader = getattr(yaml, "CSafeLoader", loader)

    class TextLoader(loader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            # Nested aliases of collections could expand to more values than fit into memory.
            alias = self.peek_event() if self.check_event(yaml.AliasEvent) else None
            node = super().compose_node(parent, index)
            if alias and not isinstance(node, yaml.ScalarNode):
                raise yaml.YAMLError(
                    f"the alias *{alias.anchor} stands for more than one value; write the values out"
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
        reason = " ".join(str(error).split()) or "the file is incomplete"
        raise UserError(f"{path}: can't be read as YAML: {reason}") from None
    if content in (None, ""):
        return {}
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected `name: value` lines")
    return content
