"""YAML as settings and recipes are read: without the readings that lose or change a value silently."""

import re
from typing import Any

import yaml


class YamlLoader(yaml.SafeLoader):
    """YAML in which a key given twice is an error; plain YAML takes the last and drops the others.

    Nor is 0123 read as an octal number: it stays text, of which a setting makes the number 123 where it wants one.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    problem="a mapping or list in brackets stands where a key is expected; fill in a template's"
                    " {{ name }}, and quote text that begins with a bracket",
                    problem_mark=key.start_mark,
                )
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"'{key.value}' is given twice", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_whole_number(self, node: yaml.ScalarNode) -> int | str:
        """A whole number; the text where it begins with a zero, as hashes and ids do."""
        if re.fullmatch("[-+]?0[0-7_]+", node.value):
            return str(node.value)
        return int(self.construct_yaml_int(node))


YamlLoader.add_constructor("tag:yaml.org,2002:int", YamlLoader.construct_whole_number)
