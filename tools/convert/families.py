"""All kinds of model that are converted. If several have the same name in a config.json, the class
that saved it decides; if none is named, the first of them is taken."""

from __future__ import annotations

from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any

from megatron.models.registry import KINDS
from tools.convert.table import Family

FAMILIES: tuple[Family, ...] = tuple(
    family
    for kind in KINDS.values()
    for family in (resolve_name(kind.conversion) if kind.conversion else ())
)


def family_of(manifest: Mapping[str, Any]) -> Family:
    """The family of a checkpoint's model."""
    kind, settings = manifest["kind"], manifest["config"]["model"]
    (family,) = (
        family
        for family in FAMILIES
        if family.section.kind == kind and family.fields.items() <= settings.items()
    )
    return family
