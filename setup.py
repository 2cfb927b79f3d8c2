"""Build step that puts the example folders into the wheel, as `raylight/examples`."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithExamples(build_py):
    """Build of the package with the example folders. An editable install finds them in its checkout."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            source, target = (
                Path(__file__).parent / "examples",
                Path(self.build_lib) / "raylight" / "examples",
            )
            shutil.rmtree(target, ignore_errors=True)
            left_out = shutil.ignore_patterns("__pycache__", "outputs", "node_modules", "dist")
            shutil.copytree(source, target, ignore=left_out)


setup(cmdclass={"build_py": BuildWithExamples})
