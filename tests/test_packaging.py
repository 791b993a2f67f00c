"""What pyproject.toml says is in the wheel is what is on disk."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
FOLDERS = {name: ROOT / folder for name, folder in SETUPTOOLS["package-dir"].items()}


def folder_of(package):
    """The folder of a package, under the longest name for which package-dir has one."""
    root = max((name for name in FOLDERS if package == name or package.startswith(f"{name}.")), key=len)
    return FOLDERS[root].joinpath(*package.removeprefix(root).split("."))


def files_in(folder):
    return [path for path in sorted(folder.rglob("*")) if path.is_file() and "__pycache__" not in path.parts]


def test_packages_are_the_folders_with_code():
    on_disk = {path.parent for folder in FOLDERS.values() for path in files_in(folder) if path.suffix == ".py"}
    assert {folder_of(package) for package in SETUPTOOLS["packages"]} == on_disk


def test_each_is_named_once():
    assert len(SETUPTOOLS["packages"]) == len(set(SETUPTOOLS["packages"]))


def test_package_data_are_the_files_without_code():
    data = {
        path
        for package, patterns in SETUPTOOLS["package-data"].items()
        for pattern in patterns
        for path in folder_of(package).glob(pattern)
    }
    on_disk = {path for folder in FOLDERS.values() for path in files_in(folder) if path.suffix != ".py"}
    assert data == on_disk


def test_every_pattern_of_package_data_finds_something():
    found = {
        (package, pattern): any(folder_of(package).glob(pattern))
        for package, patterns in SETUPTOOLS["package-data"].items()
        for pattern in patterns
    }
    assert all(found.values()), found
