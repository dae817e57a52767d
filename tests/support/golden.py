"""Golden files: recorded results for comparison, which `pytest --renew` rewrites.

After a renewal, `git diff` shows what has changed; review it before you commit it.
"""

import yaml


class GoldenFiles:
    """Compares results with the golden files in a folder. With `renew`, each result is written to its file before the
    comparison."""

    def __init__(self, folder, renew):
        self.folder = folder
        self.renew = renew

    def check_text(self, name, text):
        file = self.folder / name
        if self.renew:
            file.write_text(text)
        assert text == file.read_text()

    def check_yaml(self, name, content, flow=None):
        """Compares `content` with a YAML file. Comments that begin at the start of a line are ignored, and a renewal
        keeps them at the top of the file.

        flow: the argument default_flow_style of yaml.safe_dump.
        """
        lines = (self.folder / name).read_text().splitlines(keepends=True)
        comments = "".join(line for line in lines if line.startswith("#"))
        text = yaml.safe_dump(content, default_flow_style=flow, sort_keys=False, width=120)
        self.check_text(name, comments + text)

    def check_entry(self, name, key, content, flow=None):
        """Compares `content` with the entry `key` of a YAML file."""
        entries = yaml.safe_load((self.folder / name).read_text())
        self.check_yaml(name, {**entries, key: content}, flow)
