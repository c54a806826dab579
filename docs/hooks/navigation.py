"""The table of contents of the site. A page of docs/ that is not named here is listed under More."""

from __future__ import annotations

from typing import Any

from reference_pages import PAGES as REFERENCE
from site_pages import DOCS, Pages

SECTIONS: dict[str, list[str]] = {
    "Start": ["index.md", "first-hour.md"],
    "How to": [
        "how-to/index.md",
        "how-to/translate.md",
        "how-to/load-llama.md",
        "how-to/does-not-train.md",
        "how-to/classify.md",
        "how-to/own-loop.md",
        "how-to/several-gpus.md",
    ],
    "Course": ["course.md", "notebooks/*", "classic.md", "exercises.md", "paper-to-code.md", "errata.md"],
    "Guides": [
        "data.md",
        "tasks.md",
        "translation.md",
        "labels.md",
        "answers.md",
        "vision.md",
        "finetuning.md",
        "decoding.md",
        "serving.md",
        "distributed.md",
        "inspection.md",
        "doctor.md",
    ],
    "Reference": ["reference/*", "cli.md", "recipes.md", "config.md", "shapes.md"],
    "Results": ["results.md", "experiments.md", "results/*"],
    "Project": ["ARCHITECTURE.md", "adding.md", "decisions/*", "project/contributing.md", "project/changelog.md"],
}
MORE = "Guides"


def build_navigation(pages: Pages) -> list[dict[str, Any]]:
    """Return the navigation for mkdocs, with the pages that exist."""
    written = [file.relative_to(DOCS).as_posix() for file in sorted(DOCS.rglob("*.md"))]
    existing = [*written, *(page for page in pages.texts if not page.startswith("source/"))]
    order = {f"reference/{name}.md": number for number, (name, *_) in enumerate(REFERENCE, start=1)}
    existing.sort(key=lambda page: (order.get(page, 0), page))
    named = {name for names in SECTIONS.values() for name in names}
    navigation = []
    for section, names in SECTIONS.items():
        entries: list[Any] = []
        for name in names:
            folder, star, _ = name.partition("*")
            if star:
                group = [page for page in existing if page.startswith(folder) and page not in named]
                entries += [{FOLDER_TITLES[folder]: group}] if folder in FOLDER_TITLES and group else group
            elif name in existing:
                entries.append(name)
        if section == MORE:
            entries += [page for page in written if page not in named and "/" not in page]
        navigation.append({section: entries})
    return navigation


FOLDER_TITLES = {"notebooks/": "Notebooks", "reference/": "Python", "results/": "Tables", "decisions/": "Decisions"}
