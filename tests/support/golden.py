"""Golden files: recorded results for comparison, which `pytest --renew` rewrites.

After a renewal, `git diff` shows what has changed; review it before you commit it.
"""

import yaml


class GoldenFiles:
    """Compares results with the golden files in a folder. With `renew`, the results replace the content of the files
    first."""

    def __init__(self, folder, renew):
        self.folder = folder
        self.renew = renew

    def check_text(self, name, text):
        file = self.folder / name
        if self.renew:
            file.write_text(text)
        assert text == file.read_text()

    def check_yaml(self, name, content, flow=None):
        """Compares a YAML file, without the comments that begin at the start of a line.

        flow: the argument default_flow_style of yaml.safe_dump.
        """
        lines = (self.folder / name).read_text().splitlines(keepends=True)
        comments = "".join(line for line in lines if line.startswith("#"))
        text = yaml.safe_dump(content, default_flow_style=flow, sort_keys=False, width=120)
        self.check_text(name, comments + text)

    def check_entry(self, name, key, content, flow=None):
        """Compares the entry `key` of a YAML file."""
        entries = yaml.safe_load((self.folder / name).read_text())
        self.check_yaml(name, {**entries, key: content}, flow)
