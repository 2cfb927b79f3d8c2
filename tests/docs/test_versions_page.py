"""The generated page of versions has a row for each framework, with the packages that its page installs."""

import re
import shlex
import sys

from docs_snippets import DOCS
from packaging.requirements import Requirement
from packaging.version import Version

sys.path.insert(0, str(DOCS))
import generate_versions

ROWS = re.findall(r"^\| (.+?) \| (.+?) \| (.*?) ?\| (yes|no) \|$", generate_versions.PAGE.read_text(), re.M)


def test_the_page_has_a_row_for_each_framework() -> None:
    assert [framework for framework, *_ in ROWS] == list(generate_versions.FRAMEWORKS)
    for framework, versions, replaced, _ in ROWS:
        named = dict(part.split(" ") for part in versions.split(", "))
        packages = [Requirement(package).name for package in generate_versions.FRAMEWORKS[framework]]
        assert list(named) == packages
        assert all(Version(version) for version in named.values())
        assert all(
            re.fullmatch(r"[\w.-]+ [\w.]+ by [\w.]+", part) for part in replaced.split(", ") if replaced
        )


def test_the_page_is_made_by_the_generator() -> None:
    assert generate_versions.PAGE.read_text().startswith(generate_versions.HEAD)
    assert "](versions.md)" in (DOCS / "clients" / "README.md").read_text()


def test_the_packages_of_a_row_are_those_of_the_page() -> None:
    pages = [page.read_text() for page in (DOCS / "clients").glob("*.md")]
    installed = re.findall(r"^    pip install (.+)$", "\n".join(pages), re.M)
    rows = [set(packages) for packages in generate_versions.FRAMEWORKS.values()]
    for line in installed:
        assert set(shlex.split(line)) in rows, line
