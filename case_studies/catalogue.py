"""What is known of the studies without importing what they compute with: instant, and no torch."""

import os

from interp.case_studies.registry import Study, find_study, list_studies
from interp.case_studies.settings import config_as_json
from interp.case_studies.study import JSON


def describe_studies() -> list[dict[str, JSON]]:
    """What is known of every built-in study without importing what it computes with."""
    return [_describe(study) for study in list_studies()]


def describe_study(name: str | os.PathLike[str]) -> dict[str, JSON]:
    """One study in full: its scales with their configs, its claims with what is expected."""
    study = find_study(name)
    claims = []
    for claim in study.claims:
        at = {scale: claim.expected_at(scale) for scale in study.scales}
        claims.append(
            {
                "id": claim.id,
                "statement": claim.statement,
                "source": claim.source,
                "measured_by": claim.measured_by,
                "paper_value": claim.paper_value,
                "expected": {scale: str(found) for scale, found in at.items() if found},
            }
        )
    scales = {scale: config_as_json(config) for scale, config in study.scales.items()}
    return {**_describe(study), "folder": str(study.folder), "scales": scales, "claims": claims}


def _describe(study: Study) -> dict[str, JSON]:
    info = study.info
    return {
        "name": study.name,
        "title": info.title,
        "paper": info.paper,
        "summary": info.summary,
        "minutes": dict(info.minutes),
        "devices": list(info.devices),
        "dtypes": list(info.dtypes),
        "n_claims": len(study.claims),
    }
