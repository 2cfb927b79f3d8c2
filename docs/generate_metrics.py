"""Writes the list of metrics in docs/observability.md: `python docs/generate_metrics.py`."""

from pathlib import Path

from raylight.ray_metrics.table import reference

PAGE = Path(__file__).parent / "observability.md"
BEGIN, END = "<!-- metrics -->\n", "<!-- end of the metrics -->\n"


def main() -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + BEGIN + reference() + END + after)


if __name__ == "__main__":
    main()
