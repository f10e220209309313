"""The conda recipe renders, and names what pyproject.toml names. Nothing is built."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

tomllib = pytest.importorskip("tomllib")  # Python 3.11
rattler_build = pytest.importorskip("rattler_build")

ROOT = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
NAMES = {"torch": "pytorch"}  # where conda-forge names a package otherwise


@pytest.fixture(scope="module")
def recipe() -> dict[str, Any]:
    stage = rattler_build.Stage0Recipe.from_file(str(ROOT / "release" / "conda" / "recipe.yaml"))
    config = rattler_build.RenderConfig(platform=rattler_build.PlatformConfig(target_platform="linux-64"))
    (variant,) = stage.render(rattler_build.VariantConfig(), config)
    return variant.recipe.to_dict()


def conda_name(requirement: str) -> str:
    """Return a requirement of pip as conda writes it."""
    name, bound = re.fullmatch(r"([\w-]+)(.*)", requirement).groups()
    return f"{NAMES.get(name, name)} {bound}".strip()


def test_version_and_name(recipe: dict[str, Any]) -> None:
    assert recipe["package"]["name"] == PROJECT["project"]["name"]
    assert recipe["package"]["version"] == PROJECT["project"]["version"]


def test_dependencies(recipe: dict[str, Any]) -> None:
    python = f"python {PROJECT['project']['requires-python']}"
    expected = {python, *map(conda_name, PROJECT["project"]["dependencies"])}
    assert set(recipe["requirements"]["run"]) == expected
    host = {python, "pip", "pytorch >=2.11", *map(conda_name, PROJECT["build-system"]["requires"])}
    assert set(recipe["requirements"]["host"]) == host
    assert "pytorch >=2.11" in expected


def test_entry_points_license_and_summary(recipe: dict[str, Any]) -> None:
    project = PROJECT["project"]
    scripts = [f"{name} = {target}" for name, target in project["scripts"].items()]
    assert list(map(str, recipe["build"]["python"]["entry_points"])) == scripts
    assert recipe["about"]["license"] == project["license"]
    assert recipe["about"]["summary"] == project["description"]


def test_all_tiers_are_built(recipe: dict[str, Any]) -> None:
    environment = recipe["build"]["script"]["env"]
    assert environment == {"HF_CPU_ACCEL_REQUIRE_EXTENSION": "1", "HF_CPU_ACCEL_TIERS": "all"}
