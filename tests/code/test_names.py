"""Files of tests have names of their own: pytest imports two of one name as one module, and stops."""

from collections import Counter

from tests.support.projects import PROJECT


def test_no_two_files_of_tests_have_one_name():
    names = Counter(path.name for path in (PROJECT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
