"""Every way to install finds its kernels: wheel, sdist, editable install and bare checkout. What packages say."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import numpy as np
import pytest

import cupy_mla

ROOT = Path(__file__).resolve().parent.parent
NOT_SOURCE = shutil.ignore_patterns(
    ".git", ".venv", ".*cache", ".hypothesis", ".peer", "__pycache__", "build", "*.egg-info"
)
LIBRARIES = Path(np.__file__).parent.parent
SHOW = """
import site, sys
site.addsitedir(sys.argv[1])  # as a site-packages folder at start-up: .pth files run
sys.path.append(sys.argv[2])  # where NumPy is; no .pth file of this environment runs
import pathlib, cupy_mla
from cupy_mla.cuda.kernel import kernels_root
print(pathlib.Path(cupy_mla.__file__).parent)
print(kernels_root())
"""


def python(cwd: Path, *arguments: object) -> str:
    result = subprocess.run([sys.executable, "-I", *map(str, arguments)], cwd=cwd, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def build(hook: str, source: Path, into: Path) -> Path:
    """Runs one of setuptools' build hooks, as pip does, and returns what it made."""
    into.mkdir()
    python(source, "-c", f"import sys, setuptools.build_meta as b; b.{hook}(sys.argv[1])", into)
    (made,) = into.iterdir()
    return made


def unpack(wheel: Path, into: Path) -> Path:
    zipfile.ZipFile(wheel).extractall(into)
    return into


def found_from(site: Path) -> tuple[Path, Path]:
    """The folders of the package and of its kernels, as an interpreter finds them that has `site` on its path."""
    package, kernels = python(site.parent, "-S", "-c", SHOW, site, LIBRARIES).splitlines()
    return Path(package), Path(kernels)


def kernels_in(root: Path) -> set[str]:
    return {p.relative_to(root).as_posix() for p in root.rglob("*") if p.suffix in (".cu", ".cuh")}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, so that no build leaves anything in it."""
    return Path(shutil.copytree(ROOT, tmp_path_factory.mktemp("source") / "checkout", ignore=NOT_SOURCE))


@pytest.fixture(scope="module")
def wheel(checkout: Path) -> Path:
    return build("build_wheel", checkout, checkout.parent / "wheel")


def test_wheel(wheel: Path, tmp_path: Path) -> None:
    site = unpack(wheel, tmp_path / "site")
    package, kernels = found_from(site)
    assert package == site / "cupy_mla"
    assert kernels == site / "cupy_mla" / "kernels_cu"
    assert kernels_in(kernels) == kernels_in(ROOT / "kernels_cu") != set()
    assert (package / "py.typed").is_file()
    assert {p.name.partition("-")[0] for p in site.iterdir()} == {"cupy_mla"}, "no generic name in site-packages"


@pytest.fixture(scope="module")
def sdist(checkout: Path) -> Path:
    """The unpacked source distribution."""
    with tarfile.open(build("build_sdist", checkout, checkout.parent / "sdist")) as archive:
        archive.extractall(checkout.parent / "unpacked")
    (source,) = (checkout.parent / "unpacked").iterdir()
    return source


def test_sdist_builds_the_same_wheel(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    again = build("build_wheel", sdist, tmp_path / "wheel")
    assert set(zipfile.ZipFile(again).namelist()) == set(zipfile.ZipFile(wheel).namelist())


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a git checkout, to know what belongs to it")
def test_sdist_holds_all_that_git_does(sdist: Path) -> None:
    """So that its tests and README have what they need."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    assert [name for name in tracked if not (sdist / name).is_file()] == []


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_bytes(archive.read(name))


def test_version(metadata: Message) -> None:
    """It stands in one module, and the newest section of the changelog is that of this version."""
    assert metadata["Version"] == cupy_mla.__version__
    sections = re.findall(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert sections[0] == cupy_mla.__version__


def test_project_urls(metadata: Message) -> None:
    """The works that this one follows; it has no address of its own yet."""
    urls = dict(url.split(", ") for url in metadata.get_all("Project-URL", []))
    assert urls.keys() == {"FlashMLA", "vLLM"}
    assert all(re.fullmatch(r"https://github\.com/[\w-]+/[\w-]+", url) for url in urls.values())


def test_classifiers(metadata: Message) -> None:
    """An index refuses those that it does not know."""
    known = pytest.importorskip("trove_classifiers", reason="trove-classifiers is not installed").classifiers
    named = metadata.get_all("Classifier")
    assert set(named) - known == set()
    assert "Environment :: GPU :: NVIDIA CUDA" in named


def test_text_on_a_package_index(metadata: Message) -> None:
    """The README without links and pictures that lead nowhere there; the paths are those of the sdist."""
    text = metadata.get_payload()
    assert "Sparse Multi-head Latent Attention for NumPy, CuPy and torch arrays." in text
    paths = re.findall(r"\]\((?!https?:|#)([^)]+)\)", (ROOT / "README.md").read_text())
    pictures = [path for path in paths if path.endswith(".png")]
    assert pictures
    assert all(f"(`{path}`)" in text for path in paths if path not in pictures)
    assert re.findall(r"\]\((?!https?:|#)[^)]*\)", text) == []
    assert not any(path in text for path in pictures)


def test_editable_install(checkout: Path, tmp_path: Path) -> None:
    site = unpack(build("build_editable", checkout, tmp_path / "wheel"), tmp_path / "site")
    assert found_from(site) == (checkout / "cupy_mla", checkout / "kernels_cu")
    (named,) = site.glob("*.pth")  # no import hook, which type checkers do not know
    assert named.read_text().splitlines() == [str(checkout)]


def test_bare_checkout(checkout: Path) -> None:
    assert found_from(checkout) == (checkout / "cupy_mla", checkout / "kernels_cu")


def test_setup_cfg_lists_every_package() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    folders = {".".join(p.parent.relative_to(ROOT).parts) for p in (ROOT / "cupy_mla").rglob("__init__.py")}
    assert set(setup["options"]["packages"].split()) == folders | {"cupy_mla.kernels_cu"}
