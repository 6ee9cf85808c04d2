"""All kinds of model that are converted; of several with one name in a config.json, the class that
saved it decides, and the first where none is named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tools.convert.bert import BERTS
from tools.convert.gpt2 import GPT2
from tools.convert.table import Family

FAMILIES: tuple[Family, ...] = (GPT2, *BERTS)


def family_of(manifest: Mapping[str, Any]) -> Family:
    """That of a checkpoint."""
    kind, settings = manifest["kind"], manifest["config"]["model"]
    (family,) = (
        family
        for family in FAMILIES
        if family.section.kind == kind and family.fields.items() <= settings.items()
    )
    return family
