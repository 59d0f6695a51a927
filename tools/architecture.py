"""The picture of the packages in docs/architecture.md, drawn from the imports: `python -m tools.architecture`.

An arrow leads from a package to one that it imports. Arrows that follow from others are left out: where A imports B,
and B imports C, no arrow from A to C is drawn unless `SHOWN` has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from xml.sax.saxutils import escape

from tools.imports import imports_below

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "architecture.svg"
PLACES: Mapping[str, tuple[float, float, str]] = {
    "cli": (1.0, 0, "commands"),
    "demo": (2.2, 0, "a run that loses workers"),
    "adapters": (0.0, 2, "other frameworks' loops"),
    "trainer": (1.0, 1, "ElasticTrainer"),
    "preflight": (2.2, 1, "raysharded check"),
    "testing": (3.4, 1, "faults, chaos, launchers"),
    "run": (1.0, 2, "runs and their handles"),
    "ray_backend": (0.0, 3, "Ray actors and nodes"),
    "planning": (2.0, 3, "memory and traffic ahead"),
    "metrics": (3.9, 3, "TensorBoard, Grafana"),
    "orphans": (0.0, 4, "workers after their driver"),
    "actors": (0.4, 5, "compute: a training step"),
    "driver": (1.8, 5, "decide: a state machine"),
    "report": (3.9, 5, "a run's history"),
    "ownership": (2.9, 6, "leadership and lease"),
    "protocol": (1.4, 7, "driver-worker messages"),
    "layout": (0.4, 8, "who holds which bytes"),
    "rendezvous": (1.5, 8, "who may join"),
    "journal": (2.6, 8, "the run's log"),
    "data": (3.9, 8, "samples, in order"),
    "checkpoint": (1.8, 9, "format, commit, storage"),
}
"""Package -> its column, its row and what it is for, in a few words."""
LOWEST = ("display",)
"""Packages that are drawn with the modules at the top level, below all others."""
SHOWN = (("cli", "trainer"), ("trainer", "run"))
"""Arrows that follow from others and are drawn nevertheless."""
COLUMN, ROW, WIDTH, HEIGHT, MARGIN = 196, 86, 176, 46, 20


def package_of(module: str) -> str:
    """The package, or the module at the top, that a module of the library is in."""
    return module.split(".")[1] if "." in module else ""


def arrows(root: Path) -> set[tuple[str, str]]:
    """The imports between packages, by the packages' names."""
    found = {(package_of(one), package_of(other)) for one, wanted in imports_below(root).items() for other in wanted}
    return {(one, other) for one, other in found if one != other and one in PLACES and other in PLACES}


def reduced(graph: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """The arrows from which all others follow (Aho, Garey and Ullman, 1972). `graph` has no cycle."""
    below = {one: {other for start, other in graph if start == one} for one, _ in graph}

    def reached(start: str) -> set[str]:
        return set().union(*({other} | reached(other) for other in below.get(start, ())))

    return {(one, other) for one, other in graph if not any(other in reached(via) for via in below[one] - {other})}


def picture(root: Path) -> str:
    """The picture as SVG."""
    lines = [_arrow(*pair) for pair in sorted(reduced(arrows(root)) | set(SHOWN))]
    boxes = [_box(name, *place) for name, place in PLACES.items()]
    bottom = max(row for _, row, _ in PLACES.values()) + 1
    modules = [path.stem for path in (root / "raysharded").glob("[!_]*.py") if path.stem not in PLACES]
    width = round(max(column for column, _, _ in PLACES.values()) * COLUMN + WIDTH + 2 * MARGIN)
    height = round(bottom * ROW + HEIGHT + 2 * MARGIN)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif" role="img" aria-label="The packages of raysharded">'
    )
    marker = (
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#667085"/></marker></defs>'
    )
    paper = f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    return "\n".join(
        [head, marker, paper, *lines, *boxes, _foundation(sorted([*modules, *LOWEST]), bottom, width), "</svg>\n"]
    )


def _corner(column: float, row: float) -> tuple[float, float]:
    return MARGIN + column * COLUMN, MARGIN + row * ROW


def _box(name: str, column: float, row: float, says: str) -> str:
    x, y = _corner(column, row)
    middle = x + WIDTH / 2
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{WIDTH}" height="{HEIGHT}" rx="6" fill="#eef4ff" stroke="#3563b8"/>'
        f'<text x="{middle:g}" y="{y + 20:g}" text-anchor="middle" font-size="15" font-weight="600">{name}</text>'
        f'<text x="{middle:g}" y="{y + 37:g}" text-anchor="middle" font-size="12" fill="#475467">{escape(says)}</text>'
    )


def _arrow(start: str, end: str) -> str:
    (x, y), (to_x, to_y) = (_corner(*PLACES[name][:2]) for name in (start, end))
    if PLACES[start][1] == PLACES[end][1]:
        ends = (x + WIDTH, y + HEIGHT / 2, to_x, to_y + HEIGHT / 2)
    else:
        ends = (x + WIDTH / 2, y + HEIGHT, to_x + WIDTH / 2, to_y)
    places = " ".join(f'{key}="{value:g}"' for key, value in zip(("x1", "y1", "x2", "y2"), ends, strict=True))
    return f'<line {places} stroke="#667085" stroke-width="1.4" marker-end="url(#head)"/>'


def _foundation(modules: list[str], row: float, width: int) -> str:
    """The modules and packages that all others may import."""
    _, y = _corner(0, row)
    return (
        f'<rect x="{MARGIN}" y="{y:g}" width="{width - 2 * MARGIN}" height="{HEIGHT}" rx="6" fill="#f2f4f7" '
        f'stroke="#98a2b3"/><text x="{width / 2:g}" y="{y + 28:g}" text-anchor="middle" font-size="13">'
        f"{', '.join(modules)}</text>"
    )


if __name__ == "__main__":
    PICTURE.write_text(picture(ROOT), encoding="utf-8")
